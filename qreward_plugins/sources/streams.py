"""Reads streamed replies: splits bytes into server-sent events, and assembles the events into one body.

A dialect defines a `StreamReader`. It makes the body that the server would have sent without streaming, so that the
same `Answer` reads both, and no rule about replies exists twice. `StreamPassing` hands events on to a client.

The parser follows the HTML standard, section 9.2.6. It is our own, because `httpx-sse` reads httpx's responses only and
bounds neither an event nor a stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

MEDIA_TYPE = "text/event-stream"
_BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"
"""The data of the event with which servers of any format may end a stream."""
_KEEP_ALIVE = frozenset({"ping", "keepalive"})
_MOST_NAME_BYTES = 200


class StreamBroken(Exception):
    """A stream that cannot be read. The text says what came, without parts of the stream."""


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event. `name` is "" if the server gave none. `data` is UTF-8 only if the server keeps to it."""

    name: str
    data: bytes

    @property
    def keeps_alive(self) -> bool:
        """Whether it only keeps the connection alive, as a comment does."""
        return self.name in _KEEP_ALIVE

    def json(self) -> dict[str, Any]:
        """Return the data as a JSON object. Raises StreamBroken for anything else."""
        try:
            found = orjson.loads(self.data)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise StreamBroken("an event that is not a JSON object")
        return found


class EventParser:
    """Splits the bytes of a stream into events. `most_bytes` bounds an event, its names and its comments."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._rest = bytearray()
        self._after_cr = False
        self._at_start = True
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that end in `chunk`. Raises StreamBroken for an event that is too large."""
        if self._after_cr and chunk:
            # CR and LF of one line end may come in two chunks.
            chunk, self._after_cr = chunk.removeprefix(b"\n"), False
        self._rest += chunk
        if b"\n" not in chunk and b"\r" not in chunk:
            self._check(len(self._rest))
            return
        self._after_cr = self._rest.endswith(b"\r")
        *lines, rest = bytes(self._rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            if self._at_start:
                line, self._at_start = line.removeprefix(_BOM), False
            if line:
                self._take(line)
                continue
            # Without data there is no event, according to the standard; a name alone is forgotten.
            if self._data:
                yield Event(self._name, b"\n".join(self._data))
            self._name, self._data, self._size = "", [], 0
        self._check(len(self._rest))

    def _take(self, line: bytes) -> None:
        self._check(len(line))
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._size += len(value) + 1
            self._data.append(value)
        elif field == b"event":
            self._name = value[:_MOST_NAME_BYTES].decode("utf-8", "replace")

    def _check(self, more: int) -> None:
        if self._size + more > self._most_bytes:
            raise StreamBroken(f"an event larger than {self._most_bytes:,} bytes")


class EventSink(ABC):
    """Takes in the events of one streamed reply as they come."""

    idle_s: float | None = None
    """Most seconds between two events; None: any number."""
    begun = False
    """Whether a part of the answer has come."""
    whole = False
    """Whether the server said that the answer is whole; a stream that ends before that is broken."""
    ended = False
    """Whether nothing that counts can follow, so that reading may stop."""

    def begin(self, status: int, headers: Mapping[str, str], most_bytes: int) -> None:
        """Begin with the head of the reply. `most_bytes` bounds one event, and what is kept."""
        self._most = most_bytes
        self._parser = EventParser(most_bytes)

    @abstractmethod
    def take(self, chunk: bytes) -> bool:
        """Take in bytes. Return whether there was an event that is more than a sign of life. Raises StreamBroken for
        what cannot be read.
        """

    @property
    def has_room(self) -> bool:
        """Whether more may come. False: read on after `wait_for_room`."""
        return True

    async def wait_for_room(self) -> None:  # noqa: B027 -- a default
        """Wait until more may come."""

    def finish(self) -> None:
        """The server has ended the stream. Raises StreamBroken if the answer is not whole."""
        if not self.whole:
            raise StreamBroken("a stream that ended before the answer was whole")

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the body of the same reply without streaming, as far as it is known."""


class StreamReader(EventSink):
    """Assembles the events of one streamed reply of one dialect.

    A dialect defines `ASKS`, `take_event` and `answer`. `take_event` calls `add`, and sets `whole` and `ended`. An
    event that is an error ends the stream, and does not come to `take_event`.
    """

    ASKS: ClassVar[Mapping[str, Any]] = {"stream": True}
    """The keys of the body that ask for a stream; parameters of the configuration override them."""
    on_text: Callable[[str], None] | None = None
    """That of the request."""

    def __init__(self) -> None:
        self.text = ""
        """The answer so far, without thoughts."""
        self.thoughts = ""
        """The thoughts so far, as far as the server states them apart from the answer."""
        self.error: Any = None
        """The error that the server sent in the middle of the stream."""
        self._passed_on = 0

    def take(self, chunk: bytes) -> bool:
        heard = False
        for event in self._parser.feed(chunk):
            if event.keeps_alive:
                continue
            heard = True
            self.read(event)
            if self.ended:
                break
        if len(self.text) + len(self.thoughts) > self._most:
            raise StreamBroken(f"a text larger than {self._most:,} bytes")
        if self.on_text is not None and self.error is None and len(self.text) > self._passed_on:
            self.on_text(self.text[self._passed_on :])
            self._passed_on = len(self.text)
        return heard

    def read(self, event: Event) -> None:
        """Take in an event. Raises StreamBroken for one that cannot be."""
        # Gateways end the streams of any dialect so.
        if event.data.strip() == DONE:
            self.ended = True
            return
        content = event.json()
        kind = content.get("type") or event.name
        # Some servers send an error as data, others under the event's name. A `response.*` may tell that of a tool.
        if "error" in (kind, event.name) or (content.get("error") and not str(kind).startswith("response.")):
            self.fail(content.get("error") or content)
        else:
            self.take_event(content, kind)

    def fail(self, error: Any) -> None:
        """Take note of an error, which ends the stream."""
        self.error = error
        self.whole = self.ended = True

    def add(self, text: str = "", thoughts: str = "") -> None:
        """Take note of a further part of the answer and of the thoughts."""
        self.text += text
        self.thoughts += thoughts
        self.begun |= bool(text or thoughts)

    def body(self) -> dict[str, Any]:
        return self.answer() if self.error is None else {"error": self.error}

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the body of the same reply without streaming, if the server sent no error."""

    @abstractmethod
    def take_event(self, event: dict[str, Any], kind: Any) -> None:
        """Take in the data of an event of this type. Raises StreamBroken for one that cannot be."""


def only_in(event: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """Return the part of the answer in an event; None if it has none. Raises StreamBroken for parts of several answers,
    and for a value of another type.
    """
    # Some servers write null instead of [] beside the usage.
    found = event.get(key) or []
    if not isinstance(found, list) or len(found) > 1:
        raise StreamBroken(f"an event with more than one of the {key}")
    if not found:
        return None
    if not isinstance(found[0], dict):
        raise StreamBroken(f"an event with {key} of the wrong type")
    if found[0].get("index") not in (0, None):
        raise StreamBroken("a second answer")
    return found[0]


def text_in(part: Mapping[str, Any], key: str) -> str:
    """Return a text in an event; "" if it has none. Raises StreamBroken for a value of another type."""
    value = part.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise StreamBroken(f"an event whose {key} is not text")
    return value


def object_in(part: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object in an event; an empty one if it has none. Raises StreamBroken for a value of another type."""
    value = part.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise StreamBroken(f"an event whose {key} is not an object")
    return value
