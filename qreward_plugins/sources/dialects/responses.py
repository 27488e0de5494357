"""OpenAI's responses: `POST /responses`.

Requests and replies: `openai.types.responses` of OpenAI's package for Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import InvalidReply, QRewardError
from ...samples.spent import Usage
from ..base import Reply, Request
from ..rate_limit_headers import announced_limits
from ..replies import Answer, name_of, usage_of
from ..stream_passing import Progress, words_of
from ..streams import StreamBroken, StreamReader, object_in, text_in
from .base import Dialect, Refusal, is_on, parts_of, prompt_in, system_and_turns, text_of

_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_OPENS = ("response.output_item.added", "response.content_part.added")
_CLOSES = ("response.output_text.done", "response.refusal.done", "response.output_item.done")
_THOUGHTS = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")


class ResponseStream(StreamReader):
    """The events of one response.

    The last event has the whole response, and that is the body, if it has an output: some gateways leave it out. A part
    of the answer whose item is not the last one that began, or has ended, is refused: then it is unknown what the
    answer is. Events of unknown types are ignored, because tools have theirs, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None
        self._last: dict[str, Any] = {}
        """The whole response of the last event."""
        self._index: Any = 0
        self._is_open = True
        self._is_commentary = False
        self._has_message = False
        self._refusal = ""

    def take(self, event: dict[str, Any], name: str) -> None:
        kind = event.get("type") or name
        if kind == "error" or (event.get("error") and not str(kind).startswith("response.")):
            self.fail(event.get("error") or event)
        elif kind in _ENDS:
            self._last = object_in(event, "response")
            self._model = self._last.get("model") or self._model
            self.whole = self.ended = True
            if kind == "response.failed" and self._last.get("error"):
                self.error = self._last["error"]
        elif kind in _OPENS:
            self._open(event)
        elif kind in _CLOSES:
            self._is_open = False
        elif kind == "response.output_text.delta":
            self._check(event)
            self._has_message |= not self._is_commentary
            text = text_in(event, "delta")
            self.add(*(("", text) if self._is_commentary else (text, "")))
        elif kind == "response.refusal.delta":
            self._check(event)
            refusal = text_in(event, "delta")
            self._refusal += refusal
            self.tokens += bool(refusal)
        elif kind in _THOUGHTS:
            self.add(thoughts=text_in(event, "delta"))
        elif "response" in event:
            self._model = object_in(event, "response").get("model") or self._model

    def _open(self, event: dict[str, Any]) -> None:
        self._is_open = True
        self._index = event.get("output_index", self._index)
        if "item" in event:
            self._is_commentary = object_in(event, "item").get("phase") == "commentary"

    def _check(self, event: dict[str, Any]) -> None:
        if event.get("output_index", self._index) != self._index:
            raise StreamBroken("a part of an output item that has not begun")
        if not self._is_open:
            raise StreamBroken("a part of an output item after its end")

    def body(self) -> dict[str, Any]:
        body = {key: self._last.get(key) for key in ("status", "incomplete_details", "usage")}
        body |= {"model": self._model, "output": self._last.get("output") or self._output()}
        return body if self.error is None else {**body, "error": self.error}

    def _output(self) -> list[dict[str, Any]]:
        output = _thoughts_of(self.thoughts)
        if self._refusal:
            output.append(_message({"type": "refusal", "refusal": self._refusal}))
        if self._has_message:
            output.append(_message({"type": "output_text", "text": self.text}))
        return output


class ResponsesProgress(Progress):
    """What the events of one response tell."""

    def take(self, event: dict[str, Any], name: str) -> None:
        kind = event.get("type") or name
        response = event.get("response")
        response = response if isinstance(response, dict) else {}
        self.model = response.get("model") or self.model
        self.add_usage(response.get("usage"))
        if kind == "response.failed":
            self.error = words_of(response.get("error") or {})
        elif kind in ("response.completed", "response.incomplete"):
            self.begun = self.whole = self.ended = True
        elif kind not in ("response.created", "response.queued", "response.in_progress"):
            self.begun = True


def _thoughts_of(thoughts: str) -> list[dict[str, Any]]:
    return [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": thoughts}]}] if thoughts else []


def _message(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [part]}


_INCOMPLETE = {"max_output_tokens": "length", "content_filter": "content_filter"}
"""Why a response is incomplete, in the words of chat completions."""


class ResponsesAnswer(Answer):
    """One HTTP reply to a responses request."""

    __slots__ = ()

    def usage_in(self, content: Any) -> Usage | None:
        return _usage(content.get("usage")) if isinstance(content, dict) else None

    def read_content(self, body: Mapping[str, Any]) -> Reply | QRewardError:
        output = body.get("output")
        if not isinstance(output, list):
            return self.unreadable("no output", self.http.body)
        ended = _ended(body)
        if ended is None:
            return self.unreadable(f"a response that is not finished (status {name_of(body.get('status'))!r})")
        text, refusal, thinking, is_answered = _read(output)
        if refusal and not text:
            return InvalidReply(f"source {self.name!r} refused to judge: {self.redactor.of(refusal)}")
        if not is_answered and ended == "stop":
            return self.unreadable("reasoning and no answer" if thinking else "no message in its output")
        return Reply(
            text=text,
            thinking=thinking,
            usage=_usage(body.get("usage")),
            model=name_of(body.get("model")),
            finish_reason=ended,
            announced=announced_limits(self.http.headers),
        )


def _usage(stated: Any) -> Usage | None:
    return usage_of(stated, prompt="input_tokens", completion="output_tokens")


def _ended(body: Mapping[str, Any]) -> str | None:
    """Return the finish reason in the words of chat completions; None for a response that is not finished."""
    status = body.get("status")
    if status == "completed":
        return "stop"
    if status != "incomplete":
        return None
    details = body.get("incomplete_details")
    reason = name_of(details.get("reason")) if isinstance(details, Mapping) else ""
    # A reason that is not known must not count as an end.
    return _INCOMPLETE.get(reason, "incomplete")


def _read(output: list[Any]) -> tuple[str, str, str, bool]:
    """Return the answer, the refusal and the thoughts in an output, and whether it has a message with an answer."""
    answers: list[str] = []
    refusals: list[str] = []
    thoughts: list[str] = []
    for item in output:
        if not isinstance(item, Mapping):
            continue
        if item.get("type") == "reasoning":
            for part in (*_list(item.get("content")), *_list(item.get("summary"))):
                thoughts.append(name_or_text(part, "text"))
        if item.get("type") != "message":
            continue
        for part in _list(item.get("content")):
            if part.get("type") == "output_text" and isinstance(part.get("text"), str):
                # A commentary is what some models write on the way to their answer.
                (thoughts if item.get("phase") == "commentary" else answers).append(part["text"])
            elif part.get("type") == "refusal":
                refusals.append(name_or_text(part, "refusal"))
    return "".join(answers), "".join(refusals), "\n".join(filter(None, thoughts)), bool(answers)


def name_or_text(part: Mapping[str, Any], key: str) -> str:
    """Return a text in a part; "" for a value that is not a text."""
    value = part.get(key)
    return value if isinstance(value, str) else ""


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [part for part in value if isinstance(part, Mapping)] if isinstance(value, list) else []


class Responses(Dialect):
    """OpenAI's responses."""

    name = "responses"
    title = "OpenAI responses"
    path = "/responses"
    answer = ResponsesAnswer
    stream = ResponseStream
    progress = ResponsesProgress
    bound: ClassVar[tuple[str, ...]] = ("max_output_tokens",)
    prompt_keys: ClassVar[tuple[str, ...]] = ("input", "instructions")
    answers_in = "output"
    containers: ClassVar[tuple[str, ...]] = ("text",)
    foreign: ClassVar[Mapping[str, str]] = {
        "messages": "Leave it out; the judge writes the prompt.",
        "max_tokens": "Write max_output_tokens.",
        "max_completion_tokens": "Write max_output_tokens.",
        "reasoning_effort": "Write reasoning: {effort: ...}.",
        "response_format": "Write text: {format: ...}.",
        "n": "Leave it out; a response has one answer.",
        "logprobs": "Leave it out.",
        "generationConfig": "That is a key of the dialect gemini.",
        "thinking": "Write reasoning: {effort: ...}.",
    }
    sends_temperature = False
    lacks: ClassVar[Mapping[str, tuple[str, ...]]] = {"seed": (), "logprobs": ()}

    def body(self, model: str, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
        parameters.pop("temperature", None)
        system, turns = system_and_turns(request.messages)
        # A provider would keep the prompts for 30 days otherwise.
        body: dict[str, Any] = {"model": model, "input": list(map(_turn, turns)), "store": False}
        if system:
            body["instructions"] = system
        if "max_tokens" in parameters:
            body["max_output_tokens"] = parameters.pop("max_tokens")
        asked = parameters.pop("response_format", None)
        if isinstance(asked, Mapping):
            named = asked.get("json_schema")
            flat = {"type": asked.get("type"), **named} if isinstance(named, Mapping) else dict(asked)
            body["text"] = {"format": flat}
        return {**body, **parameters}

    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        return prompt_in(body.pop("input", ()), body.pop("instructions", None), blocks="content")

    def thinks(self, parameters: Mapping[str, Any]) -> bool:
        return "reasoning" not in parameters or is_on(parameters["reasoning"])

    def refusals(self, parameters: Mapping[str, Any], headers: Mapping[str, str]) -> list[Refusal]:
        found = super().refusals(parameters, headers)
        if parameters.get("background"):
            found.append(Refusal("background", "the reply would come without an answer.", "Leave it out."))
        if parameters.get("reasoning") is not None and not isinstance(parameters["reasoning"], Mapping):
            found.append(Refusal("reasoning", "it is a mapping.", "Write reasoning: {effort: low}."))
        return found


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if isinstance(content, str) or role == "assistant":
        # The parts of an assistant's turn are of another type, which needs the ids of an earlier response.
        return {"role": role, "content": text_of(content)}
    parts: list[Any] = []
    for kind, value in parts_of(content):
        if kind == "text":
            parts.append({"type": "input_text", "text": value})
        elif kind == "image":
            parts.append({"type": "input_image", "image_url": value, "detail": "auto"})
        else:
            parts.append(value)
    return {"role": role, "content": parts}
