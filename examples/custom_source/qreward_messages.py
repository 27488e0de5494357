"""A kind of source: language models behind the Messages API.

The API is like chat completions and differs in every detail: the system message is a key of its own, the key has its
own header, the answer is a list of blocks, usage and the reasons to stop have other names, and 529 means "overloaded".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from qreward_plugins import InvalidReply, QRewardError, Throttled
from qreward_plugins.sources import (
    TEXT,
    Answer,
    Endpoint,
    EndpointConfig,
    ModelName,
    Problem,
    Reply,
    Request,
    URLs,
    announced_limits,
    json_of,
    retry_after_s,
    usage_of,
)


class MessagesAnswer(Answer):
    """One reply of the Messages API."""

    __slots__ = ()

    def read(self) -> Reply | QRewardError:
        said = json_of(self.http.body)
        if not isinstance(said, dict) or not isinstance(said.get("content"), list):
            return self.unreadable("no list of content blocks", self.http.body)
        if said.get("stop_reason") == "refusal":
            return InvalidReply(f"source {self.name!r} refused to judge")
        blocks = [block for block in said["content"] if isinstance(block, dict) and block.get("type") == "text"]
        usage = said.get("usage")
        if isinstance(usage, dict):
            usage = {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")}
        return Reply(
            text="".join(block["text"] for block in blocks if isinstance(block.get("text"), str)),
            usage=usage_of(usage),
            model=str(said.get("model", "")),
            finish_reason="length" if said.get("stop_reason") == "max_tokens" else "stop",
            announced=announced_limits(self.http.headers),
        )

    def of_status(self, status: int, problem: Problem) -> QRewardError:
        if problem.has(("overloaded_error",)):
            # All else (401, 429 with Retry-After, 5xx) means what it means everywhere.
            pause_s = retry_after_s(self.http.headers)
            return Throttled(f"source {self.name!r} is overloaded", status=status, retry_after_s=pause_s)
        return super().of_status(status, problem)


class MessagesSource(Endpoint):
    """A language model behind the Messages API (`/v1/messages`)."""

    class Config(EndpointConfig):
        url: URLs
        """URL without a path, e.g. `https://api.example.com`; or a list of replicas that share the limits."""

        model: ModelName
        """Name of the model, as the server knows it."""

        thinking_tokens: Annotated[int, Field(ge=1024)] | None = None
        """Tokens that the model may think before it answers. Default: it does not think."""

    answers = (TEXT,)
    usual_latency_s = 3.0
    ANSWER = MessagesAnswer
    PATH = "/v1/messages"
    KEY_HEADER = ("x-api-key", "")
    HEADERS: ClassVar = {"anthropic-version": "2023-06-01"}

    def __init__(self, name: str, config: Config) -> None:
        super().__init__(name, config)
        self._thinking_tokens = config.thinking_tokens

    def body(self, request: Request) -> Mapping[str, Any]:
        system = "\n\n".join(message["content"] for message in request.messages if message["role"] == "system")
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.parameters.get("max_tokens", 512),
            "messages": [message for message in request.messages if message["role"] != "system"],
        }
        if system:
            body["system"] = system
        if self._thinking_tokens is None:
            body["temperature"] = request.parameters.get("temperature", 0.0)
        else:
            body["max_tokens"] += self._thinking_tokens
            body["thinking"] = {"type": "enabled", "budget_tokens": self._thinking_tokens}
        return body
