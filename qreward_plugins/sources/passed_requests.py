"""A client's own request that a source sends on, and the reply or stream that goes back to the client as it came.

The body is parsed once, and written again with another model. JSON's numbers and texts survive that exactly: integers
of any size, and lone surrogates.

A stream is handed on event by event, without reading its answer. It is held back until its first event with a part of
the answer, because until then another source can still be asked. It is whole only if the server said so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from ..quotas.tokens import TOKENS_PER_ATTACHMENT, Texture, overhead_of
from ..secrets import Redactor
from .replies import Problem
from .streams import DONE, Event, EventSink, StreamBroken

FORWARDED_HEADERS = ("anthropic-beta", "anthropic-version", "openai-beta")
"""Headers of a client that are sent on. They say how the body is to be read; no other header leaves."""
RETURNED_HEADERS = (
    "content-type",
    "request-id",
    "x-request-id",
    "openai-processing-ms",
    "openai-version",
    "retry-after",
    "retry-after-ms",
)
"""Headers of a source that its caller gets. The rate limits of a source are not among them: many callers share them."""
_DATA = frozenset({"data", "file_data", "b64_json"})
"""Keys of attachments in base64."""
_DATA_URLS = frozenset({"file_data", "file_url", "image", "image_url", "uri", "url", "video_url"})
"""Keys of attachments in a data URL. Under other keys, such as `text`, it is a text that a model reads."""
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+=-]+)*;base64,")
_BASE64 = re.compile(r"[A-Za-z0-9+/_\r\n-]+={0,2}\s*")
_NO_DATA = 256
"""A text up to this length is no attachment, whatever its key is."""


@dataclass(frozen=True, slots=True)
class RawReply:
    """The reply of a source, for a client. `headers` are those of `RETURNED_HEADERS`, names in lower case. No secret of
    the source is in it. `body` is empty for the head of a stream.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(default=b"", repr=False)


class Receiver:
    """Who gets the reply to a client's own request, beside the pieces of a stream. By default nobody does."""

    def begin(self, head: RawReply) -> None:
        """Take in the head of a stream, before its first piece."""

    def refused(self, reply: RawReply) -> None:
        """Take in the reply of a source that refuses the request."""

    def has_room(self) -> bool:
        """Whether more may come. False: the client reads slowly, and the source goes on after `wait_for_room`."""
        return True

    async def wait_for_room(self) -> None:
        """Wait until the client has read enough."""


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """A client's own request.

    `body` is JSON, and `headers` are those of `FORWARDED_HEADERS`. `stream`: the client asked for server-sent events.
    """

    body: Mapping[str, Any] = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    stream: bool = False
    alone: bool = False
    """Whether no other source can be asked. A 403 or 404 is then the reply to the client, which may have named what the
    provider does not keep."""
    receiver: Receiver = field(default_factory=Receiver, repr=False)

    texture: Texture = field(init=False, repr=False, compare=False)
    """What its texts consist of. All texts count, because tools, calls and documents get into the prompt, too."""
    overhead: int = field(init=False, repr=False, compare=False)
    """Assumed tokens of the chat template and of attachments."""

    def __post_init__(self) -> None:
        texts, attachments = _texts_in(self.body)
        object.__setattr__(self, "texture", Texture.of(texts))
        messages = max((len(item) for item in self.body.values() if isinstance(item, list)), default=1)
        overhead = overhead_of(max(1, messages)) + TOKENS_PER_ATTACHMENT * attachments
        object.__setattr__(self, "overhead", overhead)

    def written(self, model: str | None) -> bytes:
        """Return the body as bytes, with `model` in place of its own; None: the model is not in the body."""
        body = dict(self.body)
        if model is not None:
            # The place of a key does not change.
            body["model"] = model
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


def _texts_in(body: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return all texts and keys in a body, and the number of attachments (images, audio, files)."""
    texts: list[str] = []
    attachments = 0
    pending: list[Any] = [value for key, value in body.items() if key != "model"]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            for key, value in item.items():
                if isinstance(value, str) and _is_attachment(key, value):
                    attachments += 1
                else:
                    texts.append(key)
                    pending.append(value)
    return texts, attachments


def _is_attachment(key: str, value: str) -> bool:
    """Whether a text is an attachment. Any other text counts as one, or a long prompt would exceed the token limits."""
    if key in _DATA_URLS and _DATA_URL.match(value):
        return True
    return key in _DATA and len(value) > _NO_DATA and _BASE64.fullmatch(value) is not None


def forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a client that are sent on, in lower case. One that comes several times is joined.

    Raises `InputError` for a value that cannot be sent: it would look like a fault of the source.
    """
    found: dict[str, str] = {}
    for key, value in headers.items():
        name = key.lower()
        if name not in FORWARDED_HEADERS:
            continue
        if not can_be_sent(value):
            raise InputError(f"the header {name} must be printable ASCII")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def can_be_sent(value: str) -> bool:
    """Whether a header can carry this value."""
    return value.isascii() and value.isprintable()


def parsed_body(data: bytes) -> dict[str, Any]:
    """Parse the body of a client's request. Raises `InputError` for anything but a JSON object."""
    try:
        body = json.loads(data, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos:,}" if isinstance(error, json.JSONDecodeError) else ""
        problem = f"the body is not JSON: {type(error).__name__}{where}"
    else:
        if isinstance(body, dict):
            return body
        problem = "the body must be a JSON object"
    raise InputError(problem)


def loads_leniently(data: bytes) -> dict[str, Any] | None:
    """Parse a reply as clients do: with lone surrogates and NaN, which strict parsers refuse. None: it is no object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(text)
    return number


def returned_headers(headers: Mapping[str, str], clean: Callable[[str], str] | None) -> dict[str, str]:
    """Return the headers of a reply that its client gets. One that is not ASCII is left out: httpx cannot hold it."""
    found: dict[str, str] = {}
    for name in RETURNED_HEADERS:
        value = headers.get(name)
        if value is not None and can_be_sent(value):
            found[name] = value if clean is None else clean(value)
    return found


def cleaned(body: bytes, clean: Callable[[str], str] | None) -> bytes:
    """Return a body with the source's secrets redacted. Without a secret in it, not one byte changes."""
    if clean is None:
        return body
    text = body.decode("utf-8", "surrogateescape")
    return clean(text).encode("utf-8", "surrogateescape")


_BLANK_LINE = re.compile(rb"\r?\n\r?\n|\r\r")
_LONGEST_BLANK_LINE = 4
_BEFORE_THE_ANSWER = ("ping", "message_start", "response.created", "response.queued", "response.in_progress")
"""Types of events after which another source can still be asked."""
_ENDS = ("message_stop", "response.completed", "response.incomplete")


class StreamPassing(EventSink):
    """Hands on one stream. `receiver` gets its head before the first `on_piece`, which is called
    with one or several whole events. The source's long secrets are redacted in each event. A secret that a server
    spreads over several events reaches the client, but no message: those have what a server says instead of an answer
    on one line, with all secrets redacted. `idle_s`: most seconds between two events; None: any number.

    Pieces are text as UTF-8 with surrogate escapes, so that encoding them gives the bytes that came.
    """

    def __init__(
        self,
        receiver: Receiver,
        on_piece: Callable[[str], None],
        redactor: Redactor,
        idle_s: float | None = None,
    ) -> None:
        self.idle_s = idle_s
        self._receiver, self._on_piece, self._redactor = receiver, on_piece, redactor
        self._error = ""
        """What the server said instead of an answer; "" if it did not."""
        self._usage: dict[str, dict[str, Any]] = {}
        """What was stated under each key of a usage."""
        self._model: Any = None
        self._unfinished: dict[int, bool] = {}
        self._head = RawReply(200, {})
        self._rest = bytearray()
        self._searched = 0
        """Bytes of `_rest` in which no blank line begins."""
        self._held: list[str] = []
        self._held_bytes = 0
        self._passed = False

    @property
    def has_room(self) -> bool:
        """Whether its client has read enough for more to come."""
        return self._receiver.has_room()

    async def wait_for_room(self) -> None:
        """Wait until its client has read enough for more to come."""
        await self._receiver.wait_for_room()

    def begin(self, status: int, headers: Mapping[str, str], most_bytes: int) -> None:
        self._head = RawReply(status, returned_headers(headers, self._redactor.clean))
        super().begin(status, headers, most_bytes)

    def take(self, chunk: bytes) -> bool:
        """Take in bytes, and hand on the whole events among them. What follows the end of the answer is ignored."""
        self._rest += chunk
        has_event = False
        for block in self._blocks():
            if not self.ended:
                has_event |= self._take_block(block)
        if not self.ended and len(self._rest) + self._held_bytes > self._most:
            raise StreamBroken(f"an event larger than {self._most:,} bytes")
        return has_event

    def _blocks(self) -> Iterator[bytes]:
        start = 0
        for found in _BLANK_LINE.finditer(self._rest, self._searched):
            yield bytes(self._rest[start : found.end()])
            start = found.end()
        del self._rest[:start]
        # A large event comes in many chunks. Only the end of what was there can be the beginning of a blank line.
        self._searched = max(0, len(self._rest) - _LONGEST_BLANK_LINE + 1)

    def _take_block(self, block: bytes) -> bool:
        has_event = False
        begun_before = self.begun
        for event in self._parser.feed(block):
            if event.keeps_alive:
                continue
            has_event = True
            self._read(event)
            if self._error and not begun_before:
                raise StreamBroken(f"an error instead of an answer ({self._redactor.of(self._error)})")
        text = block.decode("utf-8", "surrogateescape")
        clean = self._redactor.clean
        self._held.append(text if clean is None else clean(text))
        self._held_bytes += len(block)
        if self.begun or self.whole:
            self._pass_on()
        if self._error:
            raise StreamBroken(f"an error in the middle of the answer ({self._redactor.of(self._error)})")
        return has_event

    def _read(self, event: Event) -> None:
        """Take in an event. The types of events and the keys of all formats are apart, so this reads them all. Raises
        StreamBroken for one that is no JSON object.
        """
        if event.data.strip() == DONE:
            self.whole = self.ended = True
            return
        content = loads_leniently(event.data)
        if content is None:
            raise StreamBroken("an event that is not a JSON object")
        kind = content.get("type") or event.name
        within = _object_in(content, "response") or _object_in(content, "message") or content
        if content.get("error") or "error" in (kind, event.name) or kind == "response.failed":
            self._error = (
                Problem.of({"error": content.get("error") or within.get("error") or content}).message
                or "no reason given"
            )
            return
        self._model = within.get("model") or within.get("modelVersion") or self._model
        for key in ("usage", "usageMetadata"):
            stated = _object_in(within, key).items()
            self._usage.setdefault(key, {}).update((name, value) for name, value in stated if value is not None)
        choices = content.get("choices") or content.get("candidates")
        if isinstance(choices, list):
            for choice in choices:
                self._take_choice(choice)
        elif _object_in(content, "promptFeedback").get("blockReason"):
            self.begun = self.whole = True
        elif kind in _ENDS:
            self.begun = self.whole = self.ended = True
        elif kind and kind not in _BEFORE_THE_ANSWER:
            self.begun = True

    def _take_choice(self, choice: Any) -> None:
        """Take in a part of one of several answers. All of them have to be whole."""
        if not isinstance(choice, Mapping):
            return
        finished = bool(choice.get("finish_reason") or choice.get("finishReason"))
        said = any(value for key, value in _object_in(choice, "delta").items() if key != "role")
        self.begun |= finished or said or "content" in choice
        index = choice.get("index")
        number = index if isinstance(index, int) else 0
        self._unfinished[number] = self._unfinished.get(number, True) and not finished
        self.whole = not any(self._unfinished.values())

    def _pass_on(self) -> None:
        if not self._passed:
            self._passed = True
            self._receiver.begin(self._head)
        piece = "".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        self._on_piece(piece)

    def finish(self) -> None:
        if self._rest and not self.ended:
            # The last event may end without a blank line.
            block, self._rest = bytes(self._rest) + b"\n\n", bytearray()
            self._take_block(block)
        super().finish()

    def body(self) -> dict[str, Any]:
        """Return model and usage, as a reply that is not streamed states them."""
        return {"model": self._model, **self._usage}


def _object_in(part: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = part.get(key)
    return value if isinstance(value, Mapping) else {}
