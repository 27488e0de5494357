"""OpenAI's chat completions, on the side of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..judge_calls import Completion, JudgeCall, Refused, check_messages, read_object
from .base import Events, Protocol, bound_of, event, known_model, tokens_of


class Chat(Protocol):
    """`POST /v1/chat/completions`."""

    name = "openai"

    def read(self, body: bytes, models: Sequence[str], model: str = "") -> JudgeCall:
        fields = read_object(body)
        name = known_model(fields.pop("model", None), models)
        messages = fields.pop("messages", None)
        if not isinstance(messages, list) or not messages:
            raise Refused(400, "'messages' must be a list of at least one message")
        check_messages(messages)
        if fields.get("n", 1) != 1:
            raise Refused(400, "this server gives one choice: leave 'n' out")
        for key in ("max_tokens", "max_completion_tokens"):
            bound_of(dict(fields), key)
        return JudgeCall(name, messages, fields)

    def reply(self, completion: Completion, call: JudgeCall, number: int) -> Any:
        # `created` is 0, so that the same requests get the same bytes.
        message: dict[str, object] = {"role": "assistant", "content": completion.content}
        logprobs: dict[str, object] | None = None
        if call.parameters.get("logprobs"):
            # The whole content is one token here, and the judge is sure of it.
            token = {"token": completion.content, "logprob": 0.0}
            logprobs = {"content": [{**token, "top_logprobs": [token]}]}
        if completion.refusal is not None:
            message["refusal"] = completion.refusal
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": completion.finish_reason}
        return {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": call.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": call.prompt_tokens,
                "completion_tokens": completion.tokens,
                "total_tokens": call.prompt_tokens + completion.tokens,
            },
        }

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
