"""Reads a streamed chat completion: `chat.completion.chunk` events, and `[DONE]` at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .completions import has_thoughts, text_of_parts
from .streams import StreamBroken, StreamReader, text_in

_THOUGHTS = ("reasoning_content", "reasoning")


class CompletionStream(StreamReader):
    """The chunks of one chat completion.

    A server may leave out `[DONE]` and the usage, but not the `finish_reason`. Several choices, text after the
    `finish_reason`, and parts that are not text are refused: then it is unknown what the answer is.
    """

    ASKS: ClassVar[Mapping[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None
        self._usage: Any = None
        self._finish: Any = None
        self._refusal = ""

    def take(self, event: dict[str, Any], name: str) -> None:
        # vLLM sends an error as data, others under the event's name.
        if event.get("error") or name == "error":
            self.fail(event.get("error") or event)
            return
        self._model = event.get("model") or self._model
        self._usage = event.get("usage") or self._usage
        # Some servers write null instead of [] beside the usage.
        choices = event.get("choices")
        if choices is None:
            choices = []
        if not isinstance(choices, list) or len(choices) > 1:
            raise StreamBroken("an event with more than one choice")
        for choice in choices:
            if not isinstance(choice, dict):
                raise StreamBroken("an event with a choice of the wrong type")
            if choice.get("index") not in (0, None):
                raise StreamBroken("a second choice")
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        if choice.get("error"):
            self.fail(choice["error"])
            return
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise StreamBroken("an event with a delta of the wrong type")
        text, refusal = _text_of(delta, "content"), _text_of(delta, "refusal")
        thoughts = "".join(_text_of(delta, key) for key in _THOUGHTS)
        content = delta.get("content")
        if not thoughts and (delta.get("reasoning_details") or (isinstance(content, list) and has_thoughts(content))):
            thoughts = "..."
        if self._finish is not None and (text or refusal):
            raise StreamBroken("text after the finish_reason")
        self.add(text, thoughts)
        self._refusal += refusal
        self.tokens += bool(refusal and not text and not thoughts)
        finish = choice.get("finish_reason")
        # Some servers write "" instead of null until the end.
        if finish is not None and finish != "":
            self._finish = finish
            self.whole = True

    def body(self) -> dict[str, Any]:
        if self.error is not None:
            return {"error": self.error}
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self._refusal:
            message["refusal"] = self._refusal
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        choice = {"index": 0, "message": message, "finish_reason": self._finish}
        return {"model": self._model, "choices": [choice], "usage": self._usage}


def _text_of(delta: dict[str, Any], key: str) -> str:
    value = delta.get(key)
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return text_of_parts(value)
    return text_in(delta, key)
