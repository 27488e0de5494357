"""Hands on a stream of server-sent events to a client, event by event, without reading its answer.

A stream is held back until its first event with a part of the answer, because until then another source can still be
asked. It is whole only if the server said so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..secrets import Redactor
from .passed_requests import RawReply, Receiver, loads_leniently, returned_headers
from .replies import Problem
from .streams import DONE, Event, EventSink, StreamBroken

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
