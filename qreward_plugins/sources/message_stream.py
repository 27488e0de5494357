"""Reads a streamed message of Anthropic's: a list of content blocks, each with its start, its parts and its stop.

Events: `anthropic.types.RawMessageStreamEvent` of Anthropic's package for Python.
"""

from __future__ import annotations

from typing import Any

import orjson

from .streams import StreamBroken, StreamReader, object_in, text_in

_PARTS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "input_json_delta": ("tool_use", "partial_json"),
}
"""Kinds of parts: the type of their block, and the key of their text."""


class MessageStream(StreamReader):
    """The events of one message. The answer is its text, and the input of the tool `tool`, as it was written.

    A server may leave out `message_stop`, but not the `stop_reason`. A part of a block that is not open, and any part
    after the `stop_reason`, are refused: then it is unknown what the answer is. Events and parts of unknown types are
    ignored, as the API reference demands.
    """

    tool = "verdict"

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None
        self._usage: dict[str, Any] = {}
        self._stop: dict[str, Any] = {}
        self._begun = 0
        self._kind = ""
        """The type of the open block; "" if none is open, "other" for one that is not read."""
        self._has_text = False

    def take(self, event: dict[str, Any], name: str) -> None:
        kind = event.get("type") or name
        if kind == "error":
            self.fail(event.get("error") or event)
        elif kind == "message_start":
            message = object_in(event, "message")
            self._model = message.get("model")
            self._take_usage(object_in(message, "usage"))
        elif kind == "content_block_start":
            self._start(event.get("index"), object_in(event, "content_block"))
        elif kind == "content_block_delta":
            self._take_part(event.get("index"), object_in(event, "delta"))
        elif kind == "content_block_stop":
            if self._kind == "tool_use":
                self.text += "\n"
            self._kind = ""
        elif kind == "message_delta":
            self._take_usage(object_in(event, "usage"))
            delta = object_in(event, "delta")
            if delta.get("stop_reason"):
                self._stop = delta
                self.whole = True
        elif kind == "message_stop":
            self.ended = True

    def _take_usage(self, stated: dict[str, Any]) -> None:
        self._usage.update((key, value) for key, value in stated.items() if value is not None)

    def _start(self, index: Any, block: dict[str, Any]) -> None:
        if self._stop:
            raise StreamBroken("a content block after the stop_reason")
        if self._kind or index != self._begun:
            raise StreamBroken("a content block that begins out of order")
        self._begun += 1
        kind = block.get("type")
        self._kind = "other"
        if kind == "tool_use" and block.get("name") == self.tool:
            self._kind, self._has_text = "tool_use", True
            self.text += "\n"
            if block.get("input"):
                self.add(orjson.dumps(block["input"]).decode())
        elif kind == "text":
            self._kind, self._has_text = "text", True
            self.add(text_in(block, "text"))
        elif kind == "thinking":
            self._kind = "thinking"
            self.add(thoughts=text_in(block, "thinking"))
        elif kind == "redacted_thinking":
            self.add(thoughts="...")

    def _take_part(self, index: Any, part: dict[str, Any]) -> None:
        if self._stop:
            raise StreamBroken("a part of a content block after the stop_reason")
        if not self._kind or index != self._begun - 1:
            raise StreamBroken("a part of a content block that is not open")
        of_block, key = _PARTS.get(str(part.get("type")), ("", ""))
        if not key or self._kind == "other":
            return
        if self._kind != of_block:
            raise StreamBroken("a part of a content block of another type")
        text = text_in(part, key)
        self.add(*(("", text) if of_block == "thinking" else (text, "")))

    def body(self) -> dict[str, Any]:
        if self.error is not None:
            return {"type": "error", "error": self.error}
        content: list[dict[str, Any]] = []
        if self.thoughts:
            content.append({"type": "thinking", "thinking": self.thoughts})
        if self._has_text:
            # The input of the tool stays a text: parsed here, a duplicate key could give another score.
            content.append({"type": "text", "text": self.text})
        body = {"type": "message", "model": self._model, "content": content, **self._stop}
        return {**body, "usage": self._known_usage()}

    def _known_usage(self) -> dict[str, Any] | None:
        # `message_start` states the tokens of the beginning only.
        return self._usage if self.whole else None
