"""Google's Gemini: `POST /models/MODEL:generateContent`.

Requests and replies: `google.genai.types` of Google's package for Python, in the camel case of the REST interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import InvalidReply, QRewardError
from ...samples.images import EncodedImage
from ...samples.spent import Usage
from ..base import Reply, Request
from ..replies import Answer, counted, json_of, name_of
from ..streams import StreamBroken, StreamReader, object_in, only_in, text_in
from .base import Dialect, image_data, prompt_in, schema_in, system_and_turns, written_parts


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

    def take_event(self, event: dict[str, Any], kind: Any) -> None:
        self._model = event.get("modelVersion") or self._model
        # Each object has the usage up to there.
        self._usage = object_in(event, "usageMetadata") or self._usage
        self._feedback = object_in(event, "promptFeedback") or self._feedback
        self.whole |= bool(self._feedback.get("blockReason"))
        candidate = only_in(event, "candidates")
        if candidate is not None:
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

    def answer(self) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [{"text": self.thoughts, "thought": True}] if self.thoughts else []
        if self._has_text:
            parts.append({"text": self.text})
        candidate = {"content": {"role": "model", "parts": parts}, "finishReason": self._finish}
        return {
            "modelVersion": self._model,
            "promptFeedback": self._feedback,
            "usageMetadata": self._usage or None,
            "candidates": [candidate] if self._has_candidate else [],
        }


_CONFIG = "generationConfig"
_BOUND = "maxOutputTokens"
_WITHHELD = (
    "SAFETY RECITATION LANGUAGE BLOCKLIST PROHIBITED_CONTENT SPII IMAGE_SAFETY IMAGE_PROHIBITED_CONTENT "
    "IMAGE_RECITATION ESCALATION MODEL_ARMOR"
)
_ENDS = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "CONTINUATION": "length",
    **dict.fromkeys(_WITHHELD.split(), "content_filter"),
}
_NAMES = {
    "max_tokens": _BOUND,
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "seed": "seed",
    "stop": "stopSequences",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}
"""A judge's parameters and the settings that they become."""


class GeminiAnswer(Answer):
    """One HTTP reply to a `generateContent` request."""

    __slots__ = ()

    def json(self) -> Any:
        content = json_of(self.http.body)
        # Some gateways wrap the reply in a list, as in a stream.
        return content[0] if isinstance(content, list) and len(content) == 1 else content

    def usage_in(self, content: Any) -> Usage | None:
        stated = content.get("usageMetadata") if isinstance(content, Mapping) else None
        if not isinstance(stated, Mapping):
            return None
        # Counts that are 0 are left out.
        return counted(
            stated.get("promptTokenCount"),
            stated.get("candidatesTokenCount", 0),
            further_prompt=(stated.get("toolUsePromptTokenCount"),),
            further_completion=(stated.get("thoughtsTokenCount"),),
            cached=stated.get("cachedContentTokenCount"),
            thinking=stated.get("thoughtsTokenCount"),
        )

    def read_content(self, body: Mapping[str, Any]) -> Reply | QRewardError:
        feedback = body.get("promptFeedback")
        blocked = name_of(feedback.get("blockReason")) if isinstance(feedback, dict) else ""
        if blocked:
            return InvalidReply(f"source {self.name!r} refused the prompt (blockReason {self.redactor.of(blocked)})")
        candidates = body.get("candidates")
        candidate = candidates[0] if isinstance(candidates, list) and candidates else None
        if not isinstance(candidate, dict):
            return self.unreadable("no candidates[0]", self.http.body)
        stated = name_of(candidate.get("finishReason"))
        ended = _ENDS.get(stated, stated)
        if stated and stated not in _ENDS:
            return self.unreadable(f"a reply that the provider broke off (finishReason {stated!r})")
        content = candidate.get("content")
        parts = content.get("parts", []) if isinstance(content, dict) else []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            return self.unreadable("parts of the wrong type", self.http.body)
        written = [part for part in parts if isinstance(part.get("text"), str)]
        texts = [part["text"] for part in written if not part.get("thought")]
        if not texts and ended in ("stop", ""):
            return self.unreadable(f"no text (finishReason {stated or 'null'!r})")
        thinking = "".join(part["text"] for part in written if part.get("thought"))
        return self.replied(body, text="".join(texts), thinking=thinking, finish_reason=ended)


class Gemini(Dialect):
    """Google's Gemini."""

    name = "gemini"
    path = "/{model}:generateContent"
    stream_path = "/{model}:streamGenerateContent?alt=sse"
    key_header: ClassVar[tuple[str, str]] = ("x-goog-api-key", "")
    answer = GeminiAnswer
    stream = GeminiStream
    bound: ClassVar[tuple[str, ...]] = (_CONFIG, _BOUND)
    prompt_keys: ClassVar[tuple[str, ...]] = ("contents", "systemInstruction")
    answers_in = "candidates"
    containers: ClassVar[tuple[str, ...]] = (_CONFIG,)
    lacks = ("logprobs",)

    def body(self, model: str, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
        system, turns = system_and_turns(request.messages)
        settings: dict[str, Any] = {}
        for key, name in _NAMES.items():
            if parameters.get(key) is not None:
                settings[name] = parameters[key]
            parameters.pop(key, None)
        if isinstance(settings.get("stopSequences"), str):
            settings["stopSequences"] = [settings["stopSequences"]]
        asked = parameters.pop("response_format", None)
        if isinstance(asked, Mapping) and asked.get("type") in ("json_schema", "json_object"):
            settings["responseMimeType"] = "application/json"
            schema = schema_in(asked)
            if schema is not None:
                settings["responseSchema"] = _ordered(schema)
        body: dict[str, Any] = {"contents": list(map(_turn, turns)), _CONFIG: settings}
        if system:
            body["systemInstruction"] = {"parts": [{"text": system}]}
        return {**body, **parameters}

    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        system = body.pop("systemInstruction", None)
        return prompt_in(body.pop("contents", ()), system["parts"] if system else None, blocks="parts")

    def thinks(self, parameters: Mapping[str, Any]) -> bool:
        settings = parameters.get(_CONFIG)
        thinking = settings.get("thinkingConfig") if isinstance(settings, Mapping) else None
        return not (isinstance(thinking, Mapping) and thinking.get("thinkingBudget") == 0)

    def holds_answer(self, content: Mapping[str, Any]) -> bool:
        return super().holds_answer(content) or isinstance(content.get("promptFeedback"), Mapping)


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    parts = written_parts(message["content"], lambda text: {"text": text}, _image)
    return {"role": "model" if message["role"] == "assistant" else "user", "parts": parts}


def _image(url: str | EncodedImage) -> dict[str, Any]:
    found = image_data(url)
    if found is None:
        return {"fileData": {"fileUri": url}}
    return {"inlineData": {"mimeType": found[0], "data": found[1]}}


def _ordered(schema: Any) -> Any:
    """Copy a JSON schema as a schema of OpenAPI. Gemini writes properties in the order of `propertyOrdering`, and has
    no `additionalProperties` before the models of 2025.
    """
    if isinstance(schema, list):
        return [_ordered(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: _ordered(value) for key, value in schema.items() if key != "additionalProperties"}
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        copy["propertyOrdering"] = list(properties)
    return copy
