"""OpenAI's chat completions, on the side of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..judge_calls import Completion, JudgeCall, read_call
from .base import Protocol


class Chat(Protocol):
    """`POST /v1/chat/completions`."""

    name = "openai"

    def read(self, body: bytes, models: Sequence[str], model: str = "") -> JudgeCall:
        return read_call(body, models)

    def reply(self, completion: Completion, call: JudgeCall, number: int) -> Any:
        return completion.reply(call, number)
