"""OpenAI's responses, on the side of the server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..judge_calls import Completion, JudgeCall, read_object
from .base import Events, Protocol, bound_of, chat_message, event, known_model, tokens_of


class Responses(Protocol):
    """`POST /v1/responses`."""

    name = "responses"

    def read(self, body: bytes, models: Sequence[str], model: str = "") -> JudgeCall:
        fields = read_object(body)
        name = known_model(fields.pop("model", None), models)
        asked = fields.pop("input")
        turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        if system := fields.pop("instructions", None):
            turns = [{"role": "system", "content": system}, *turns]
        messages = [chat_message(turn["role"], turn["content"], "image_url") for turn in turns]
        if (bound := bound_of(fields, "max_output_tokens")) is not None:
            fields["max_tokens"] = bound
        if form := fields.pop("text", {}).get("format"):
            named = {key: value for key, value in form.items() if key != "type"}
            fields["response_format"] = {"type": form["type"], "json_schema": named}
        return JudgeCall(name, messages, fields)

    def reply(self, completion: Completion, call: JudgeCall, number: int) -> Any:
        tokens = completion.tokens
        output: list[dict[str, Any]] = []
        if completion.refusal is not None:
            output = [_message(number, {"type": "refusal", "refusal": completion.refusal})]
        elif completion.content or (completion.finish_reason == "stop" and completion.content is not None):
            output = [_message(number, _text(completion.content))]
        ended = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(completion.finish_reason)
        return {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": 0,
            "model": call.model,
            "status": "incomplete" if ended else "completed",
            "error": None,
            "incomplete_details": {"reason": ended} if ended else None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "output": output,
            "usage": {
                "input_tokens": call.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": call.prompt_tokens + tokens,
            },
        }

    def events(self, body: Mapping[str, Any], options: Mapping[str, Any]) -> Events:
        numbers = itertools.count()

        def named(kind: str, **fields: Any) -> bytes:
            return event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields}, f"response.{kind}")

        def part(text: str, index: int = 0) -> bytes:
            place = {"item_id": "msg_0", "output_index": index, "content_index": 0}
            return named("output_text.delta", **place, delta=text, logprobs=[])

        empty: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        good = [named(kind, response={**body, **empty}) for kind in ("created", "in_progress")]
        end: list[bytes] = []
        for index, item in enumerate(body["output"]):
            [content] = item["content"]
            kind, key = ("refusal", "refusal") if content["type"] == "refusal" else ("output_text", "text")
            item_place = {"output_index": index}
            place = {**item_place, "item_id": item["id"], "content_index": 0}
            more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            started = {**item, "status": "in_progress", "content": []}
            good.append(named("output_item.added", **item_place, item=started))
            good.append(named("content_part.added", **place, part={**content, key: ""}))
            good += [named(f"{kind}.delta", **place, delta=token, **more) for token in tokens_of(content[key])]
            end.append(named(f"{kind}.done", **place, **{key: content[key]}, **more))
            end.append(named("content_part.done", **place, part=content))
            end.append(named("output_item.done", **item_place, item=item))
        end.append(named(body["status"], response=body))
        error = {"type": "error", "code": "server_error", "message": "injected fault stream_error", "param": None}
        return Events(
            good,
            end,
            whole=len(end),
            part=part,
            second=part("x", 1),
            error=event({**error, "sequence_number": next(numbers)}, "error"),
            ping=event({"type": "keepalive", "sequence_number": next(numbers)}, "keepalive"),
        )


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _message(number: int, part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [part]}
