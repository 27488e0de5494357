"""Google's Gemini, on the side of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..judge_calls import Completion, JudgeCall, Refused, read_object
from .base import Events, Protocol, bound_of, chat_message, event, known_model, schema_format, tokens_of

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_KEY_REASON = "API_KEY_INVALID"


class Gemini(Protocol):
    """`POST /v1beta/models/MODEL:generateContent`."""

    name = "gemini"
    key_headers: ClassVar[tuple[str, ...]] = ("x-goog-api-key", "Authorization")
    pause_in_body = True

    def read(self, body: bytes, models: Sequence[str], model: str = "") -> JudgeCall:
        known_model(model, models)
        fields = read_object(body)
        system = fields.pop("systemInstruction", None)
        turns = [("system", system["parts"])] if system else []
        turns += [
            ("assistant" if turn.get("role") == "model" else "user", turn["parts"]) for turn in fields.pop("contents")
        ]
        messages = [chat_message(role, parts, "inlineData") for role, parts in turns]
        settings = dict(fields.pop("generationConfig", None) or {})
        if (bound := bound_of(settings, "maxOutputTokens")) is not None:
            fields["max_tokens"] = bound
        schema = settings.pop("responseSchema", None) or settings.pop("responseJsonSchema", None)
        if schema is not None:
            fields["response_format"] = schema_format(schema)
        elif settings.pop("responseMimeType", "") == "application/json":
            fields["response_format"] = {"type": "json_object"}
        return JudgeCall(model, messages, {**fields, **settings})

    def reply(self, completion: Completion, call: JudgeCall, number: int) -> Any:
        finish = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}.get(completion.finish_reason, "STOP")
        content: dict[str, Any] = {"role": "model"}
        if completion.content:
            content["parts"] = [{"text": completion.content}]
        usage = {"promptTokenCount": call.prompt_tokens, "totalTokenCount": call.prompt_tokens + completion.tokens}
        if completion.tokens:
            usage["candidatesTokenCount"] = completion.tokens
        fields: dict[str, Any] = {
            "candidates": [{"content": content, "finishReason": finish, "index": 0}],
            "usageMetadata": usage,
            "modelVersion": call.model,
            "responseId": str(number),
        }
        if completion.refusal is not None:
            del fields["candidates"]
            fields["promptFeedback"] = {"blockReason": "PROHIBITED_CONTENT"}
        return fields

    def events(self, body: Mapping[str, Any], options: Mapping[str, Any]) -> Events:
        head = {key: value for key, value in body.items() if key != "candidates"}
        usage = body["usageMetadata"]

        def chunk(text: str, index: int = 0, tokens: int = 1, **more: Any) -> bytes:
            stated = {"promptTokenCount": usage["promptTokenCount"], "candidatesTokenCount": tokens}
            stated["totalTokenCount"] = sum(stated.values())
            candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "index": index, **more}
            return event({**head, "candidates": [candidate], "usageMetadata": stated})

        good: list[bytes] = []
        end = [event(body)]
        for candidate in body.get("candidates", ()):
            texts = [part["text"] for part in candidate["content"].get("parts", ())]
            good = [chunk(token, tokens=number) for number, token in enumerate(tokens_of("".join(texts)), 1)]
            end = [event({**body, "candidates": [{**candidate, "content": {"role": "model"}}]})]
        error = {"code": 503, "message": "injected fault stream_error", "status": "UNAVAILABLE"}
        return Events(good, end, whole=1, part=chunk, second=chunk("x", 1), error=event({"error": error}))

    def error(self, status: int, message: str, code: str | None = None, retry_s: float | None = None) -> object:
        details: list[dict[str, Any]] = []
        if code == _KEY_REASON:
            details.append({"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": _KEY_REASON})
        if retry_s is not None:
            details.append({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{retry_s:.9g}s"})
        error: dict[str, Any] = {"code": status, "message": message, "status": _STATUSES.get(status, "UNKNOWN")}
        return {"error": {**error, "details": details} if details else error}

    def key_refused(self) -> Refused:
        return Refused(400, "API key not valid. Please pass a valid API key.", _KEY_REASON)

    def announce(self, what: str, limit: int | None, remaining: int, reset_s: float) -> dict[str, str]:
        # Gemini announces nothing.
        return {}

    def model_list(self, models: Sequence[str]) -> object:
        methods = ["generateContent", "countTokens"]
        return {"models": [{"name": f"models/{name}", "supportedGenerationMethods": methods} for name in models]}
