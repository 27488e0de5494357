"""OpenAI's chat completions, as every compatible server reads them, and as OpenAI's reasoning models want them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import QRewardError
from ...quotas.tokens import of_messages
from ..base import Logprobs, Reply, Request
from ..replies import Answer, Problem, name_of
from ..streams import StreamBroken, StreamReader, object_in, only_in, text_in
from .base import NO_EFFORT, Dialect, is_on

_BROKEN_OFF = ("error", "abort", "aborted", "cancelled")
"""Values of `finish_reason` for a fault of the provider, which does not depend on the question."""
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
"""What is in the type of a part that holds thoughts: `thinking` (Mistral, Cohere), `reasoning`, `reasoning_text`."""
_FILTERED = ("content_filter", "refusal")
"""Values of `finish_reason` for an answer that was withheld because of the question; the judge rejects those."""
_MOST_TOKENS_READ = 8
_MOST_LIKELY = 100


class CompletionAnswer(Answer):
    """One HTTP reply to a chat completion request."""

    __slots__ = ()

    def read_content(self, body: Mapping[str, Any]) -> Reply | QRewardError:
        choices = body.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            choice = {}
        if choice.get("error"):
            return self.error_of(Problem.of(choice))
        message = choice.get("message")
        if not isinstance(message, dict):
            return self.unreadable("no choices[0].message", self.http.body)
        ended = name_of(choice.get("finish_reason"))
        if ended.lower() in _BROKEN_OFF:
            return self.unreadable(f"a reply that the provider broke off (finish_reason {ended!r})")
        text, refusal = _text(message.get("content"))
        if text is None:
            return self.unreadable("a message content of the wrong type", self.http.body)
        refusal = refusal or name_of(message.get("refusal"))
        if refusal and not text:
            return self.refused(refusal)
        thinking = _thinking(message)
        unanswered = not text.strip() and (message.get("content") is None or thinking)
        if unanswered and ended.lower() not in _FILTERED:
            # A reply that ended in its thoughts is no fault of the source: the judge says which number to raise.
            usage = self.usage_in(body)
            if ended != "length" or not (thinking or (usage and usage.thinking_tokens)):
                what = "reasoning and no answer" if thinking else "a content of null"
                return self.unreadable(f"{what} (finish_reason {ended or 'null'!r})")
        logprobs = _logprobs(choice.get("logprobs"))
        return self.replied(body, text=text, thinking=thinking, finish_reason=ended, logprobs=logprobs)


def _logprobs(stated: Any) -> Logprobs:
    """Return the first tokens of a reply with the likely ones at their places; () if one of them is not of the known
    form.
    """
    content = stated.get("content") if isinstance(stated, dict) else None
    if not isinstance(content, list):
        return ()
    found = []
    for chosen in content[:_MOST_TOKENS_READ]:
        several = chosen.get("top_logprobs") if isinstance(chosen, dict) else None
        if not isinstance(several, list):
            return ()
        pairs: list[tuple[Any, Any]] = [
            (each.get("token"), each.get("logprob")) for each in several[:_MOST_LIKELY] if isinstance(each, dict)
        ]
        if not all(isinstance(name, str) and type(number) in (int, float) for name, number in pairs):
            return ()
        found.append((str(chosen.get("token")), tuple((name, float(number)) for name, number in pairs)))
    return tuple(found)


def _thinking(message: Mapping[str, Any]) -> str:
    """Return the reasoning beside a message's content; "..." if it is not readable. Servers use several keys for it."""
    for key in ("reasoning_content", "reasoning", "reasoning_details"):
        stated = message.get(key)
        if stated:
            return stated if isinstance(stated, str) else "..."
    content = message.get("content")
    return "..." if isinstance(content, list) and has_thoughts(content) else ""


def _text(content: Any) -> tuple[str | None, str]:
    """Return the text and the refusal in a message's content; the text is None if the type is unknown."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return None, ""
    refusals = [part["refusal"] for part in content if isinstance(part.get("refusal"), str)]
    return text_of_parts(content), "".join(refusals)


def text_of_parts(parts: list[dict[str, Any]]) -> str:
    """Return the answer in the parts of a content. Thoughts may be such parts, too; a verdict in them is a draft."""
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str) and not _is_thought(part))


def has_thoughts(parts: list[Any]) -> bool:
    """Whether thoughts are among the parts of a content."""
    return any(isinstance(part, dict) and _is_thought(part) for part in parts)


def _is_thought(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and _THOUGHT.search(kind) is not None


_THOUGHTS = ("reasoning_content", "reasoning")


class CompletionStream(StreamReader):
    """The chunks of one chat completion.

    A server may leave out `[DONE]` and the usage, but not the `finish_reason`. Several choices, text after the
    `finish_reason`, and parts that are not text are refused: then it is unknown what the answer is.
    """

    ASKS: ClassVar[Mapping[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None
        self._usage: Any = None
        self._finish: Any = None
        self._refusal = ""

    def take_event(self, event: dict[str, Any], kind: Any) -> None:
        self._model = event.get("model") or self._model
        self._usage = event.get("usage") or self._usage
        choice = only_in(event, "choices")
        if choice is not None:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        if choice.get("error"):
            self.fail(choice["error"])
            return
        delta = object_in(choice, "delta")
        text, refusal = _text_of(delta, "content"), _text_of(delta, "refusal")
        thoughts = "".join(_text_of(delta, key) for key in _THOUGHTS)
        content = delta.get("content")
        if not thoughts and (delta.get("reasoning_details") or (isinstance(content, list) and has_thoughts(content))):
            thoughts = "..."
        if self._finish is not None and (text or refusal):
            raise StreamBroken("text after the finish_reason")
        self.add(text, thoughts)
        self._refusal += refusal
        self.begun |= bool(refusal)
        finish = choice.get("finish_reason")
        # Some servers write "" instead of null until the end.
        if finish is not None and finish != "":
            self._finish = finish
            self.whole = True

    def answer(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self._refusal:
            message["refusal"] = self._refusal
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        choice = {"index": 0, "message": message, "finish_reason": self._finish}
        return {"model": self._model, "choices": [choice], "usage": self._usage}


def _text_of(delta: dict[str, Any], key: str) -> str:
    value = delta.get(key)
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return text_of_parts(value)
    return text_in(delta, key)


_REASONING_BOUND = "max_completion_tokens"


class Completions(Dialect):
    """OpenAI's chat completions, as vLLM, SGLang, llama.cpp and most providers read them."""

    name = "openai"
    path = "/chat/completions"
    answer = CompletionAnswer
    stream = CompletionStream
    bound: ClassVar[tuple[str, ...]] = ("max_tokens",)
    bound_holds_budget = False
    prompt_keys: ClassVar[tuple[str, ...]] = ("messages",)
    answers_in = "choices"

    def body(self, model: str, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
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
    bound = (_REASONING_BOUND,)
    bound_holds_budget = True
    sends_temperature = False
    lacks = ("logprobs",)

    def body(self, model: str, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
        parameters.pop("temperature", None)
        if "max_tokens" in parameters:
            parameters[_REASONING_BOUND] = parameters.pop("max_tokens")
        return super().body(model, request, parameters)

    def thinks(self, parameters: Mapping[str, Any]) -> bool:
        return parameters.get("reasoning_effort") != NO_EFFORT
