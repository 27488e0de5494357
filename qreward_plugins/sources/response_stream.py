"""Reads a streamed response of OpenAI's: parts of items, and the whole response at the end.

Events: `openai.types.responses.ResponseStreamEvent` of OpenAI's package for Python.
"""

from __future__ import annotations

from typing import Any

from .streams import StreamBroken, StreamReader, object_in, text_in

_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_OPENS = ("response.output_item.added", "response.content_part.added")
_CLOSES = ("response.output_text.done", "response.refusal.done", "response.output_item.done")
_THOUGHTS = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")


class ResponseStream(StreamReader):
    """The events of one response.

    The last event has the whole response, and that is the body, if it has an output: some gateways leave it out. A part
    of the answer whose item is not the last one that began, or has ended, is refused: then it is unknown what the
    answer is. Events of unknown types are ignored, because tools have theirs, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None
        self._last: dict[str, Any] = {}
        """The whole response of the last event."""
        self._index: Any = 0
        self._is_open = True
        self._is_commentary = False
        self._has_message = False
        self._refusal = ""

    def take(self, event: dict[str, Any], name: str) -> None:
        kind = event.get("type") or name
        if kind == "error" or (event.get("error") and not str(kind).startswith("response.")):
            self.fail(event.get("error") or event)
        elif kind in _ENDS:
            self._last = object_in(event, "response")
            self._model = self._last.get("model") or self._model
            self.whole = self.ended = True
            if kind == "response.failed" and self._last.get("error"):
                self.error = self._last["error"]
        elif kind in _OPENS:
            self._open(event)
        elif kind in _CLOSES:
            self._is_open = False
        elif kind == "response.output_text.delta":
            self._check(event)
            self._has_message |= not self._is_commentary
            text = text_in(event, "delta")
            self.add(*(("", text) if self._is_commentary else (text, "")))
        elif kind == "response.refusal.delta":
            self._check(event)
            refusal = text_in(event, "delta")
            self._refusal += refusal
            self.tokens += bool(refusal)
        elif kind in _THOUGHTS:
            self.add(thoughts=text_in(event, "delta"))
        elif "response" in event:
            self._model = object_in(event, "response").get("model") or self._model

    def _open(self, event: dict[str, Any]) -> None:
        self._is_open = True
        self._index = event.get("output_index", self._index)
        if "item" in event:
            self._is_commentary = object_in(event, "item").get("phase") == "commentary"

    def _check(self, event: dict[str, Any]) -> None:
        if event.get("output_index", self._index) != self._index:
            raise StreamBroken("a part of an output item that has not begun")
        if not self._is_open:
            raise StreamBroken("a part of an output item after its end")

    def body(self) -> dict[str, Any]:
        body = {key: self._last.get(key) for key in ("status", "incomplete_details", "usage")}
        body |= {"model": self._model, "output": self._last.get("output") or self._output()}
        return body if self.error is None else {**body, "error": self.error}

    def _output(self) -> list[dict[str, Any]]:
        output = _thoughts_of(self.thoughts)
        if self._refusal:
            output.append(_message({"type": "refusal", "refusal": self._refusal}))
        if self._has_message:
            output.append(_message({"type": "output_text", "text": self.text}))
        return output


def _thoughts_of(thoughts: str) -> list[dict[str, Any]]:
    return [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": thoughts}]}] if thoughts else []


def _message(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [part]}
