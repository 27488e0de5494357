"""Anthropic's messages, on the side of the server."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, ClassVar

from ..judge_calls import Completion, JudgeCall, read_object
from .base import Events, Protocol, bound_of, chat_message, event, known_model, schema_format, tokens_of

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_BOUNDS = re.compile(r"\{(minimum|maximum): (-?[\d.]+)(?:, (minimum|maximum): (-?[\d.]+))?\}")


class Anthropic(Protocol):
    """`POST /v1/messages`."""

    name = "anthropic"
    key_headers: ClassVar[tuple[str, ...]] = ("x-api-key", "Authorization")

    def read(self, body: bytes, models: Sequence[str], model: str = "") -> JudgeCall:
        fields = read_object(body)
        name = known_model(fields.pop("model", None), models)
        bound_of(dict(fields), "max_tokens", required=True)
        turns = [{"role": "system", "content": system}] if (system := fields.pop("system", None)) else []
        turns += fields.pop("messages")
        messages = [chat_message(turn["role"], turn["content"], "source") for turn in turns]
        if form := fields.get("output_config", {}).get("format"):
            fields["response_format"] = schema_format(_bounded(form["schema"]))
        return JudgeCall(name, messages, fields)

    def reply(self, completion: Completion, call: JudgeCall, number: int) -> Any:
        stop = {"length": "max_tokens", "content_filter": "refusal"}.get(completion.finish_reason, "end_turn")
        content: list[dict[str, Any]] = []
        if completion.refusal is not None:
            stop = "refusal"
        elif completion.content is not None and stop != "refusal":
            content = [{"type": "text", "text": completion.content, "citations": None}]
        details = {"type": "refusal", "category": None, "explanation": completion.refusal}
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": None,
            "stop_details": details if stop == "refusal" else None,
            "usage": {
                "input_tokens": call.prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": completion.tokens,
            },
        }

    def events(self, body: Mapping[str, Any], options: Mapping[str, Any]) -> Events:
        def named(kind: str, **fields: Any) -> bytes:
            return event({"type": kind, **fields}, kind)

        def part(text: str, index: int = 0) -> bytes:
            return named("content_block_delta", index=index, delta={"type": "text_delta", "text": text})

        stop = {key: body[key] for key in ("stop_reason", "stop_sequence", "stop_details")}
        started = {**body, **dict.fromkeys(stop), "content": [], "usage": {**body["usage"], "output_tokens": 1}}
        ping = named("ping")
        good = [named("message_start", message=started)]
        end: list[bytes] = []
        for block in body["content"]:
            good += [named("content_block_start", index=0, content_block={**block, "text": ""}), ping]
            good += map(part, tokens_of(block["text"]))
            end.append(named("content_block_stop", index=0))
        end += [named("message_delta", delta=stop, usage=body["usage"]), named("message_stop")]
        error = {"type": "overloaded_error", "message": "injected fault stream_error"}
        return Events(
            good, end, whole=len(end) - 1, part=part, second=part("x", 1), error=named("error", error=error), ping=ping
        )

    def error(self, status: int, message: str, code: str | None = None, retry_s: float | None = None) -> object:
        kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}

    def announce(self, what: str, limit: int | None, remaining: int, reset_s: float) -> dict[str, str]:
        # A point in time is wall-clock time by definition.
        reset = datetime.now(timezone.utc) + timedelta(seconds=math.ceil(reset_s))
        return {
            **({} if limit is None else {f"anthropic-ratelimit-{what}-limit": str(limit)}),
            f"anthropic-ratelimit-{what}-remaining": str(remaining),
            f"anthropic-ratelimit-{what}-reset": reset.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def model_list(self, models: Sequence[str]) -> object:
        created = "1970-01-01T00:00:00Z"
        listed = [{"type": "model", "id": name, "display_name": name, "created_at": created} for name in models]
        return {"data": listed, "has_more": False, "first_id": models[0] if models else None, "last_id": None}


def _bounded(schema: object) -> object:
    """Read the bounds of numbers from their descriptions, where clients put them, so that a scorer finds them."""
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _bounded(value) for key, value in schema.items()}
    found = _BOUNDS.search(str(schema.get("description", "")))
    if found is not None:
        names = found.groups()
        copy |= {names[at]: float(names[at + 1]) for at in (0, 2) if names[at]}
    return copy
