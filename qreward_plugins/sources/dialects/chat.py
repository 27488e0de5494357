"""OpenAI's chat completions, as every compatible server reads them, and as OpenAI's reasoning models want them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...quotas.demand import of_messages
from ..base import Request
from ..completion_stream import CompletionStream
from ..completions import CompletionAnswer
from .base import NO_EFFORT, Dialect, Refusal, is_on

_REASONING_BOUND = "max_completion_tokens"


class Completions(Dialect):
    """OpenAI's chat completions, as vLLM, SGLang, llama.cpp and most providers read them."""

    name = "openai"
    title = "OpenAI chat completions"
    path = "/chat/completions"
    answer = CompletionAnswer
    stream = CompletionStream
    bound: ClassVar[tuple[str, ...]] = ("max_tokens",)
    bound_holds_budget = False
    prompt_keys: ClassVar[tuple[str, ...]] = ("messages",)
    answers_in = "choices"

    def body(self, model: str, request: Request, parameters: dict[str, Any], *, as_tool: bool) -> dict[str, Any]:
        return {"model": model, "messages": request.messages, **parameters}

    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        messages = body.pop("messages", None)
        return of_messages(messages) if isinstance(messages, (list, tuple)) else ([], 0, 0)

    def thinks(self, parameters: Mapping[str, Any]) -> bool:
        template = parameters.get("chat_template_kwargs")
        settings = {**parameters, **template} if isinstance(template, Mapping) else parameters
        if any(key in settings and not is_on(settings[key]) for key in ("enable_thinking", "thinking", "reasoning")):
            return False
        if settings.get("reasoning_effort") == NO_EFFORT:
            return False
        return any(settings.get(key) for key in ("enable_thinking", "thinking", "reasoning", "reasoning_effort"))

    def holds_answer(self, content: Mapping[str, Any]) -> bool:
        return super().holds_answer(content) and bool(content[self.answers_in])

    def identity(self, model: str) -> object:
        return None


class ReasoningCompletions(Completions):
    """Chat completions for OpenAI's reasoning models, which refuse `max_tokens` and `temperature`."""

    name = "openai_reasoning"
    title = "OpenAI chat completions of reasoning models"
    bound = (_REASONING_BOUND,)
    bound_holds_budget = True
    sends_temperature = False
    lacks: ClassVar[Mapping[str, tuple[str, ...]]] = {"logprobs": (), "top_logprobs": ()}

    def body(self, model: str, request: Request, parameters: dict[str, Any], *, as_tool: bool) -> dict[str, Any]:
        parameters.pop("temperature", None)
        if "max_tokens" in parameters:
            parameters[_REASONING_BOUND] = parameters.pop("max_tokens")
        return super().body(model, request, parameters, as_tool=as_tool)

    def thinks(self, parameters: Mapping[str, Any]) -> bool:
        return parameters.get("reasoning_effort") != NO_EFFORT

    def refusals(self, parameters: Mapping[str, Any], headers: Mapping[str, str]) -> list[Refusal]:
        found = super().refusals(parameters, headers)
        if parameters.get("max_tokens") is not None:
            found.append(Refusal("max_tokens", "reasoning models of OpenAI refuse it.", f"Write {_REASONING_BOUND}."))
        return found
