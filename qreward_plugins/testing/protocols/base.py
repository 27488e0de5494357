"""Defines `Protocol`: one wire format of a judge server, the neutral forms that all formats share, and `Chat`.

A request of any format becomes a `JudgeCall` in the words of chat completions, so a scorer need not know the format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from ..judge_calls import Completion, JudgeCall, Refused, check_messages, duration, error_body, read_object

_CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class Events:
    """A reply as server-sent events, and what faults put between them. An event ends with a blank line."""

    good: Sequence[bytes]
    """The events up to the last part of the answer."""
    end: Sequence[bytes]
    """The events after that. With the first, no part of the answer may follow any more."""
    whole: int
    """How many events of `end` a client needs."""
    part: Callable[[str], bytes]
    """Makes an event with a further part of the answer."""
    second: bytes
    """An event with a part of a second answer."""
    error: bytes
    """An error in the middle of the answer."""
    ping: bytes = b": keep-alive\n\n"
    """What keeps the connection alive."""


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return one event with this data; `name` "" leaves the name out."""
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + orjson.dumps(data) + b"\n\n"


def tokens_of(text: str) -> list[str]:
    """Split a text into the texts of its tokens."""
    return [text[at : at + _CHARS_PER_TOKEN] for at in range(0, len(text), _CHARS_PER_TOKEN)]


class Protocol(ABC):
    """A wire format: how requests are read, and how replies, errors and limits are written."""

    name: ClassVar[str]
    """Its name in `JudgeServer(protocols=...)`."""
    key_headers: ClassVar[tuple[str, ...]] = ("Authorization",)
    """The headers that may carry the key."""
    pause_in_body: ClassVar[bool] = False
    """Whether the body of an error says when to retry, and no header does."""

    @abstractmethod
    def read(self, body: bytes, models: Sequence[str], model: str = "") -> JudgeCall:
        """Read the body of a request. `model` is the one in the path, if the path names one. Raises `Refused`, or what
        Python does with a body of another form: `KeyError`, `TypeError`, `AttributeError`.
        """

    @abstractmethod
    def reply(self, completion: Completion, call: JudgeCall, number: int) -> Any:
        """Return the body of the `number`-th reply."""

    @abstractmethod
    def events(self, body: Mapping[str, Any], options: Mapping[str, Any]) -> Events:
        """Return the events of a good reply, given its body. `options` are the `stream_options` of the request."""

    def error(self, status: int, message: str, code: str | None = None, retry_s: float | None = None) -> object:
        """Return the body of an error. `retry_s` is the pause that it asks for in the body, if the format has this."""
        return error_body(status, message, code)

    def key_in(self, headers: Mapping[str, str]) -> str:
        """Return the key of a request, as the header `Authorization` would carry it."""
        for name in self.key_headers:
            if name in headers:
                return headers[name] if name == "Authorization" else f"Bearer {headers[name]}"
        return ""

    def key_refused(self) -> Refused:
        """Return the refusal of a request without the right key."""
        return Refused(401, "incorrect API key provided", "invalid_api_key")

    def announce(self, what: str, limit: int | None, remaining: int, reset_s: float) -> dict[str, str]:
        """Return the headers that announce a limit on "requests" or "tokens"; `limit` None leaves it out."""
        return {
            **({} if limit is None else {f"x-ratelimit-limit-{what}": str(limit)}),
            f"x-ratelimit-remaining-{what}": str(remaining),
            f"x-ratelimit-reset-{what}": duration(reset_s),
        }

    def model_list(self, models: Sequence[str]) -> object:
        """Return the body of the list of models."""
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "qreward"} for name in models]
        return {"object": "list", "data": listed}


def known_model(model: object, models: Sequence[str]) -> str:
    """Return the model. Raises `Refused` for one that the server does not have."""
    if not isinstance(model, str):
        raise Refused(400, "you must provide a model")
    if model not in models:
        raise Refused(404, f"the model {model[:100]!r} does not exist", "model_not_found")
    return model


def bound_of(fields: dict[str, Any], key: str, *, required: bool = False) -> int | None:
    """Remove and return a bound on the completion. Raises `Refused` for one that is no integer from 1 on."""
    bound = fields.pop(key, None)
    if bound is None and not required:
        return None
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
        raise Refused(400, f"{key!r} must be an integer of at least 1")
    return bound


def chat_message(role: str, content: object, image: str) -> dict[str, Any]:
    """Return the chat message of a turn: its content is a text, or a list of blocks that have a `text`, or an image
    under the key `image`. The content of one that has text only is a text.
    """
    if not isinstance(content, list):
        return {"role": role, "content": content}
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": block["text"]}
        if "text" in block
        else {"type": "image_url", "image_url": {"url": block[image]}}
        for block in content
    ]
    if all(part["type"] == "text" for part in parts):
        return {"role": role, "content": "".join(part["text"] for part in parts)}
    return {"role": role, "content": parts}


def schema_format(schema: object) -> dict[str, Any]:
    """Return the `response_format` of chat completions for a schema."""
    return {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}


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
