"""OpenAI's responses: `POST /responses`.

Requests and replies: `openai.types.responses` of OpenAI's package for Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...errors import QRewardError
from ...samples.spent import Usage
from ..base import Reply, Request
from ..replies import Answer, name_of, usage_of
from ..streams import StreamBroken, StreamReader, object_in, text_in
from .base import Dialect, is_on, prompt_in, system_and_turns, text_of, written_parts

_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_THOUGHTS = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")


class ResponseStream(StreamReader):
    """The events of one response. The last one has the whole response, and that is the body. Some gateways leave its
    output out; then the answer is the text of the events before it.

    Events of unknown types are ignored, because tools have theirs, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, Any] = {}
        self._is_commentary = False

    def take_event(self, event: dict[str, Any], kind: Any) -> None:
        if kind in _ENDS:
            self._last = object_in(event, "response")
            self.whole = self.ended = True
            if kind == "response.failed" and self._last.get("error"):
                self.error = self._last["error"]
            elif not self._last.get("output") and self.text:
                part = {"type": "output_text", "text": self.text}
                self._last = {**self._last, "output": [{"type": "message", "content": [part]}]}
            elif not _read(_list(self._last.get("output")))[0].startswith(self.text):
                raise StreamBroken("parts that are not those of the answer")
        elif kind == "response.output_item.added":
            self._is_commentary = object_in(event, "item").get("phase") == "commentary"
        elif kind == "response.output_text.delta":
            text = text_in(event, "delta")
            self.add(*(("", text) if self._is_commentary else (text, "")))
        elif kind in _THOUGHTS:
            self.add(thoughts=text_in(event, "delta"))

    def answer(self) -> dict[str, Any]:
        return self._last


_INCOMPLETE = {"max_output_tokens": "length", "content_filter": "content_filter"}
"""Why a response is incomplete, in the words of chat completions."""


class ResponsesAnswer(Answer):
    """One HTTP reply to a responses request."""

    __slots__ = ()

    def usage_in(self, content: Any) -> Usage | None:
        stated = content.get("usage") if isinstance(content, Mapping) else None
        return usage_of(stated, prompt="input_tokens", completion="output_tokens")

    def read_content(self, body: Mapping[str, Any]) -> Reply | QRewardError:
        output = body.get("output")
        if not isinstance(output, list):
            return self.unreadable("no output", self.http.body)
        ended = _ended(body)
        if ended is None:
            return self.unreadable(f"a response that is not finished (status {name_of(body.get('status'))!r})")
        text, refusal, thinking, is_answered = _read(output)
        if refusal and not text:
            return self.refused(refusal)
        if not is_answered and ended == "stop":
            return self.unreadable("reasoning and no answer" if thinking else "no message in its output")
        return self.replied(body, text=text, thinking=thinking, finish_reason=ended)


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


def _read(output: Sequence[Any]) -> tuple[str, str, str, bool]:
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
    path = "/responses"
    answer = ResponsesAnswer
    stream = ResponseStream
    bound: ClassVar[tuple[str, ...]] = ("max_output_tokens",)
    prompt_keys: ClassVar[tuple[str, ...]] = ("input", "instructions")
    answers_in = "output"
    containers: ClassVar[tuple[str, ...]] = ("text",)
    sends_temperature = False
    lacks = ("seed", "logprobs")

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


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if isinstance(content, str) or role == "assistant":
        # The parts of an assistant's turn are of another type, which needs the ids of an earlier response.
        return {"role": role, "content": text_of(content)}
    parts = written_parts(
        content,
        lambda text: {"type": "input_text", "text": text},
        lambda image: {"type": "input_image", "image_url": image, "detail": "auto"},
    )
    return {"role": role, "content": parts}
