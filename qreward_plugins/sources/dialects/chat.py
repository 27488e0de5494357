"""OpenAI's chat completions, as every compatible server reads them, and as OpenAI's reasoning models want them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ...errors import QRewardError
from ...quotas.demand import of_messages
from ..base import Logprobs, Reply, Request
from ..replies import Answer, Problem, logprobs_of, name_of
from ..streams import DONE, EventSink, StreamBroken
from .base import NO_EFFORT, Dialect, is_on

_BROKEN_OFF = ("error", "abort", "aborted", "cancelled")
"""Values of `finish_reason` for a fault of the provider, which does not depend on the question."""
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)
"""What is in the type of a part that holds thoughts: `thinking` (Mistral, Cohere), `reasoning`, `reasoning_text`."""
_FILTERED = ("content_filter", "refusal")
"""Values of `finish_reason` for an answer that was withheld because of the question; the judge rejects those."""


class CompletionAnswer(Answer):
    """One HTTP reply to a chat completion request."""

    __slots__ = ()

    def read_content(self, body: Mapping[str, Any]) -> Reply | QRewardError:
        choices = body.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(choice, dict) and choice.get("error"):
            return self.error_of(Problem.of(choice))
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(message, dict):
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
    content = stated.get("content") if isinstance(stated, dict) else None
    if not isinstance(content, list) or not all(isinstance(token, dict) for token in content):
        return ()
    return logprobs_of(content, [token.get("top_logprobs") for token in content])


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


class CompletionStream(EventSink):
    """Assembles the chunks of one chat completion. `on_text` is that of the request.

    `body` is what the server would have sent without streaming, so that the same `Answer` reads both; it has the key
    `error` only if the server sent one. A server may leave out `[DONE]` and the usage, but not the `finish_reason`.
    Several choices, text after the `finish_reason`, and parts that are not text are refused: then it is unknown what
    the answer is.
    """

    def __init__(self, idle_s: float | None, on_text: Callable[[str], None] | None) -> None:
        self.idle_s = idle_s
        self._on_text = on_text
        self._text = self._thoughts = self._refusal = ""
        self._passed_on = 0
        self._model: Any = None
        self._usage: Any = None
        self._finish: Any = None
        self._error: Any = None

    def take(self, chunk: bytes) -> bool:
        heard = False
        for event in self._parser.feed(chunk):
            if event.keeps_alive:
                continue
            heard = True
            if event.data.strip() == DONE:
                self.ended = True
            else:
                self._read(event.json(), event.name)
            if self.ended:
                break
        if len(self._text) + len(self._thoughts) > self._most:
            raise StreamBroken(f"a text larger than {self._most:,} bytes")
        if self._on_text is not None and self._error is None and len(self._text) > self._passed_on:
            self._on_text(self._text[self._passed_on :])
            self._passed_on = len(self._text)
        return heard

    def _read(self, event: dict[str, Any], name: str) -> None:
        # Some servers write null instead of [] beside the usage.
        choices = event.get("choices") or []
        if not isinstance(choices, list) or len(choices) > 1 or not all(isinstance(one, dict) for one in choices):
            raise StreamBroken("an event with more than one of the choices")
        choice = choices[0] if choices else {}
        # vLLM sends an error as data, others under the event's name.
        self._error = event.get("error") or choice.get("error") or (event if name == "error" else None)
        if self._error:
            self.whole = self.ended = True
            return
        if choice.get("index") not in (0, None):
            raise StreamBroken("a second answer")
        self._model = event.get("model") or self._model
        self._usage = event.get("usage") or self._usage
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise StreamBroken("an event whose delta is not an object")
        self._take_delta(delta)
        # Some servers write "" instead of null until the end.
        if choice.get("finish_reason") not in (None, ""):
            self._finish = choice["finish_reason"]
            self.whole = True

    def _take_delta(self, delta: dict[str, Any]) -> None:
        text, refusal = _text_of(delta, "content"), _text_of(delta, "refusal")
        thoughts = "".join(_text_of(delta, key) for key in _THOUGHTS)
        content = delta.get("content")
        if not thoughts and (delta.get("reasoning_details") or (isinstance(content, list) and has_thoughts(content))):
            thoughts = "..."
        if self._finish is not None and (text or refusal):
            raise StreamBroken("text after the finish_reason")
        self._text += text
        self._thoughts += thoughts
        self._refusal += refusal
        self.begun |= bool(text or thoughts or refusal)

    def body(self) -> dict[str, Any]:
        if self._error is not None:
            return {"error": self._error}
        message: dict[str, Any] = {"role": "assistant", "content": self._text}
        if self._refusal:
            message["refusal"] = self._refusal
        if self._thoughts:
            message["reasoning_content"] = self._thoughts
        choice = {"index": 0, "message": message, "finish_reason": self._finish}
        return {"model": self._model, "choices": [choice], "usage": self._usage}


def _text_of(delta: dict[str, Any], key: str) -> str:
    value = delta.get(key) or ""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return text_of_parts(value)
    if not isinstance(value, str):
        raise StreamBroken(f"an event whose {key} is not text")
    return value


_REASONING_BOUND = "max_completion_tokens"


class Completions(Dialect):
    """OpenAI's chat completions, as vLLM, SGLang, llama.cpp and most providers read them."""

    name = "openai"
    path = "/chat/completions"
    answer = CompletionAnswer
    streams = True
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
