"""OpenAI's chat completions, on the side of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..judge_calls import Completion, Forms, JudgeCall, read_call
from .base import Events, Protocol, event, tokens_of

_AROUND = (
    b'{"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": "',
    b'"}}]}',
)


class Chat(Protocol):
    """`POST /v1/chat/completions`."""

    name = "openai"

    def read(self, body: bytes, models: Sequence[str], model: str = "") -> JudgeCall:
        return read_call(body, models)

    def reply(self, completion: Completion, call: JudgeCall, number: int) -> Forms:
        fields = completion.body(call, number)
        return Forms(fields, {**fields, "choices": []}, _AROUND)

    def events(self, body: Mapping[str, Any], options: Mapping[str, Any]) -> Events:
        choice, usage = body["choices"][0], body["usage"]
        message = choice["message"]
        key = "content" if message.get("refusal") is None else "refusal"
        head = {"id": body["id"], "object": "chat.completion.chunk", "created": 0, "model": body["model"]}

        def chunk(delta: Mapping[str, Any], finish: str | None = None, /, *, index: int = 0, **more: Any) -> bytes:
            return event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish}], **more})

        good = [chunk({"role": "assistant", "content": ""})]
        for number, token in enumerate(tokens_of(message[key] or ""), 1):
            continuous = options.get("continuous_usage_stats")
            stated: dict[str, Any] = {"usage": {**usage, "completion_tokens": number}} if continuous else {}
            good.append(chunk({key: token}, **stated))
        end = [chunk({}, choice["finish_reason"])]
        if options.get("include_usage"):
            end.append(event({**head, "choices": [], "usage": usage}))
        end.append(b"data: [DONE]\n\n")
        error = {"message": "injected fault stream_error", "code": 500}
        return Events(
            good,
            end,
            whole=1,
            part=lambda text: chunk({"content": text}),
            second=chunk({"content": "x"}, index=1),
            error=event({"error": error}),
        )
