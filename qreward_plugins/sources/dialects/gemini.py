"""Google's Gemini: `POST /models/MODEL:generateContent`.

Requests and replies: `google.genai.types` of Google's package for Python, in the camel case of the REST interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import InvalidReply, QRewardError
from ...samples.spent import Usage
from ..base import Reply, Request
from ..gemini_stream import GeminiStream
from ..rate_limit_headers import announced_limits
from ..replies import Answer, counted, json_of, name_of
from .base import Dialect, Refusal, image_data, parts_of, prompt_in, schema_in, system_and_turns

_CONFIG = "generationConfig"
_BOUND = "maxOutputTokens"
_ENDS = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "CONTINUATION": "length",
    **dict.fromkeys(
        (
            "SAFETY",
            "RECITATION",
            "LANGUAGE",
            "BLOCKLIST",
            "PROHIBITED_CONTENT",
            "SPII",
            "IMAGE_SAFETY",
            "IMAGE_PROHIBITED_CONTENT",
            "IMAGE_RECITATION",
            "ESCALATION",
            "MODEL_ARMOR",
        ),
        "content_filter",
    ),
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
    "logprobs": "responseLogprobs",
    "top_logprobs": "logprobs",
}
"""A judge's parameters and the settings that they become."""
_SNAKE = (
    "generation_config",
    "system_instruction",
    "safety_settings",
    "tool_config",
    "cached_content",
    "max_output_tokens",
    "candidate_count",
    "response_schema",
    "response_mime_type",
    "thinking_config",
    "thinking_budget",
    "thinking_level",
    "stop_sequences",
    "top_p",
    "top_k",
    "response_logprobs",
)


class GeminiAnswer(Answer):
    """One HTTP reply to a `generateContent` request."""

    __slots__ = ()

    def json(self) -> Any:
        content = json_of(self.http.body)
        # Some gateways wrap the reply in a list, as in a stream.
        return content[0] if isinstance(content, list) and len(content) == 1 else content

    def usage_in(self, content: Any) -> Usage | None:
        return _usage(content.get("usageMetadata")) if isinstance(content, dict) else None

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
        return Reply(
            text="".join(texts),
            thinking="".join(part["text"] for part in written if part.get("thought")),
            usage=_usage(body.get("usageMetadata")),
            model=name_of(body.get("modelVersion")),
            finish_reason=ended,
            announced=announced_limits(self.http.headers),
        )


def _usage(stated: Any) -> Usage | None:
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


class Gemini(Dialect):
    """Google's Gemini."""

    name = "gemini"
    title = "Gemini generateContent"
    path = "/{model}:generateContent"
    stream_path = "/{model}:streamGenerateContent?alt=sse"
    key_header: ClassVar[tuple[str, str]] = ("x-goog-api-key", "")
    answer = GeminiAnswer
    stream = GeminiStream
    bound: ClassVar[tuple[str, ...]] = (_CONFIG, _BOUND)
    prompt_keys: ClassVar[tuple[str, ...]] = ("contents", "systemInstruction")
    answers_in = "candidates"
    containers: ClassVar[tuple[str, ...]] = (_CONFIG,)
    foreign: ClassVar[Mapping[str, str]] = {
        **{key: f"Write {_CONFIG}: {{{name}: ...}}." for key, name in _NAMES.items() if name != key},
        **{name: f"Write {_CONFIG}: {{{name}: ...}}." for name in _NAMES.values()},
        "max_completion_tokens": f"Write {_CONFIG}: {{{_BOUND}: ...}}.",
        "thinkingConfig": f"Write {_CONFIG}: {{thinkingConfig: ...}}.",
        "candidateCount": f"Write {_CONFIG}: {{candidateCount: ...}}.",
        "n": "Leave it out; the judge reads one answer.",
        "stream_options": "Leave it out.",
        "messages": "Leave it out; the judge writes the prompt.",
        "model": "The model stands in the URL; set the key model of the source.",
        "response_format": f"Write {_CONFIG}: {{responseSchema: ...}}.",
        "reasoning_effort": f"Write {_CONFIG}: {{thinkingConfig: {{thinkingLevel: ...}}}}.",
        "reasoning": f"Write {_CONFIG}: {{thinkingConfig: {{thinkingLevel: ...}}}}.",
        "thinking": f"Write {_CONFIG}: {{thinkingConfig: {{thinkingLevel: ...}}}}.",
        **{key: f"Write {''.join((key[:1], key.title().replace('_', '')[1:]))}." for key in _SNAKE[:5]},
        **dict.fromkeys(_SNAKE[5:], f"Write it in camel case, in {_CONFIG}."),
    }

    def body(self, model: str, request: Request, parameters: dict[str, Any], *, as_tool: bool) -> dict[str, Any]:
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
        thinking = _below(parameters, "thinkingConfig")
        return not (isinstance(thinking, Mapping) and thinking.get("thinkingBudget") == 0)

    def holds_answer(self, content: Mapping[str, Any]) -> bool:
        return super().holds_answer(content) or isinstance(content.get("promptFeedback"), Mapping)

    def longest_thoughts(self, parameters: Mapping[str, Any]) -> int:
        thinking = _below(parameters, "thinkingConfig")
        budget = thinking.get("thinkingBudget") if isinstance(thinking, Mapping) else 0
        return budget if isinstance(budget, int) and not isinstance(budget, bool) else 0

    def refusals(self, parameters: Mapping[str, Any], headers: Mapping[str, str]) -> list[Refusal]:
        found = super().refusals(parameters, headers)
        settings = parameters.get(_CONFIG)
        if not isinstance(settings, Mapping):
            return found
        for key in settings:
            if "_" in str(key):
                found.append(Refusal(f"{_CONFIG}.{key}", "settings are written in camel case.", "See maxOutputTokens."))
        thinking = settings.get("thinkingConfig")
        if isinstance(thinking, Mapping):
            bound, budget = settings.get(_BOUND), thinking.get("thinkingBudget")
            both = thinking.get("thinkingLevel") is not None and budget is not None
            if both:
                problem = "it cannot be combined with thinkingLevel."
                found.append(Refusal(f"{_CONFIG}.thinkingConfig.thinkingBudget", problem, "Keep one of the two."))
            elif isinstance(budget, int) and isinstance(bound, (int, float)) and bound <= budget:
                problem = f"{budget:,} is not less than {_BOUND}, {bound:,}, which counts the thoughts, too."
                found.append(Refusal(f"{_CONFIG}.thinkingConfig.thinkingBudget", problem, f"Raise {_BOUND}."))
        elif thinking is not None:
            found.append(Refusal(f"{_CONFIG}.thinkingConfig", "it is a mapping."))
        return found


def _below(parameters: Mapping[str, Any], key: str) -> Any:
    settings = parameters.get(_CONFIG)
    return settings.get(key) if isinstance(settings, Mapping) else None


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    parts: list[Any] = []
    for kind, value in parts_of(message["content"]):
        if kind == "text":
            parts.append({"text": value})
        elif kind == "image":
            parts.append(_image(value))
        else:
            parts.append(value)
    return {"role": "model" if message["role"] == "assistant" else "user", "parts": parts}


def _image(url: Any) -> dict[str, Any]:
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
