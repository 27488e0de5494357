"""Reads a streamed reply of Gemini's: `GenerateContentResponse` objects with parts of the answer.

Events: `google.genai.types.GenerateContentResponse` of Google's package for Python, in camel case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .streams import StreamBroken, StreamReader, object_in, text_in


class GeminiStream(StreamReader):
    """The objects of one reply. No event ends the stream; the connection does.

    Several candidates and text after the `finishReason` are refused: then it is unknown what the answer is.
    """

    # The path asks for a stream.
    ASKS: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None
        self._usage: dict[str, Any] = {}
        self._feedback: dict[str, Any] = {}
        self._has_candidate = False
        self._has_text = False
        self._finish: Any = None

    def take(self, event: dict[str, Any], name: str) -> None:
        if event.get("error") or name == "error":
            self.fail(event.get("error") or event)
            return
        self._model = event.get("modelVersion") or self._model
        # Each object has the usage up to there.
        self._usage = object_in(event, "usageMetadata") or self._usage
        self._feedback = object_in(event, "promptFeedback") or self._feedback
        self.whole |= bool(self._feedback.get("blockReason"))
        candidates = event.get("candidates") or []
        if not isinstance(candidates, list) or len(candidates) > 1:
            raise StreamBroken("an event with more than one candidate")
        for candidate in candidates:
            if not isinstance(candidate, dict):
                raise StreamBroken("an event with a candidate of the wrong type")
            if candidate.get("index") not in (0, None):
                raise StreamBroken("a second candidate")
            self._take_candidate(candidate)

    def _take_candidate(self, candidate: dict[str, Any]) -> None:
        self._has_candidate = True
        parts = object_in(candidate, "content").get("parts") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise StreamBroken("an event with parts of the wrong type")
        texts = [text_in(part, "text") for part in parts if not part.get("thought")]
        thoughts = [text_in(part, "text") for part in parts if part.get("thought")]
        if self._finish is not None and any(texts):
            raise StreamBroken("text after the finishReason")
        self._has_text |= any(isinstance(part.get("text"), str) and not part.get("thought") for part in parts)
        self.add("".join(texts), "".join(thoughts))
        if candidate.get("finishReason"):
            self._finish = candidate["finishReason"]
            self.whole = True

    def body(self) -> dict[str, Any]:
        if self.error is not None:
            return {"error": self.error}
        body: dict[str, Any] = {"modelVersion": self._model}
        if self._feedback:
            body["promptFeedback"] = self._feedback
        body["usageMetadata"] = self._known_usage()
        if self._has_candidate:
            body["candidates"] = [self._candidate(self.text if self._has_text else None)]
        return body

    def _known_usage(self) -> dict[str, Any] | None:
        is_known = self._usage and (self.whole or self._usage.get("candidatesTokenCount"))
        return self._usage if is_known else None

    def _candidate(self, text: str | None) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []
        if self.thoughts:
            parts.append({"text": self.thoughts, "thought": True})
        if text is not None:
            parts.append({"text": text})
        return {"index": 0, "content": {"role": "model", "parts": parts}, "finishReason": self._finish}
