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
from ..replies import Answer, counted, name_of
from .base import Dialect, image_data, prompt_in, schema_in, system_and_turns, written_parts

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
