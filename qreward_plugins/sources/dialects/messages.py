"""Anthropic's messages: `POST /messages`.

Requests and replies: `anthropic.types` of Anthropic's package for Python, and the provider's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...errors import InvalidReply, QRewardError
from ...samples.spent import Usage
from ..base import Reply, Request
from ..rate_limit_headers import announced_limits
from ..replies import Answer, Problem, counted, name_of
from ..stream_passing import Progress
from ..streams import StreamBroken, StreamReader, object_in, text_in
from .base import Dialect, Refusal, image_data, is_on, parts_of, prompt_in, schema_in, system_and_turns, text_of

_PARTS = {"text_delta": "text", "thinking_delta": "thinking"}
"""Kinds of parts: the type of their block, which is the key of their text, too."""


class MessageStream(StreamReader):
    """The events of one message. The answer is its text.

    A server may leave out `message_stop`, but not the `stop_reason`. A part of a block that is not open, and any part
    after the `stop_reason`, are refused: then it is unknown what the answer is. Events and parts of unknown types are
    ignored, as the API reference demands.
    """

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None
        self._usage: dict[str, Any] = {}
        self._stop: dict[str, Any] = {}
        self._begun = 0
        self._kind = ""
        """The type of the open block; "" if none is open, "other" for one that is not read."""
        self._has_text = False

    def take(self, event: dict[str, Any], name: str) -> None:
        kind = event.get("type") or name
        if kind == "error":
            self.fail(event.get("error") or event)
        elif kind == "message_start":
            message = object_in(event, "message")
            self._model = message.get("model")
            self._take_usage(object_in(message, "usage"))
        elif kind == "content_block_start":
            self._start(event.get("index"), object_in(event, "content_block"))
        elif kind == "content_block_delta":
            self._take_part(event.get("index"), object_in(event, "delta"))
        elif kind == "content_block_stop":
            self._kind = ""
        elif kind == "message_delta":
            self._take_usage(object_in(event, "usage"))
            delta = object_in(event, "delta")
            if delta.get("stop_reason"):
                self._stop = delta
                self.whole = True
        elif kind == "message_stop":
            self.ended = True

    def _take_usage(self, stated: dict[str, Any]) -> None:
        self._usage.update((key, value) for key, value in stated.items() if value is not None)

    def _start(self, index: Any, block: dict[str, Any]) -> None:
        if self._stop:
            raise StreamBroken("a content block after the stop_reason")
        if self._kind or index != self._begun:
            raise StreamBroken("a content block that begins out of order")
        self._begun += 1
        kind = block.get("type")
        self._kind = "other"
        if kind == "text":
            self._kind, self._has_text = "text", True
            self.add(text_in(block, "text"))
        elif kind == "thinking":
            self._kind = "thinking"
            self.add(thoughts=text_in(block, "thinking"))
        elif kind == "redacted_thinking":
            self.add(thoughts="...")

    def _take_part(self, index: Any, part: dict[str, Any]) -> None:
        if self._stop:
            raise StreamBroken("a part of a content block after the stop_reason")
        if not self._kind or index != self._begun - 1:
            raise StreamBroken("a part of a content block that is not open")
        key = _PARTS.get(str(part.get("type")), "")
        if not key or self._kind == "other":
            return
        if self._kind != key:
            raise StreamBroken("a part of a content block of another type")
        text = text_in(part, key)
        self.add(*(("", text) if key == "thinking" else (text, "")))

    def body(self) -> dict[str, Any]:
        if self.error is not None:
            return {"type": "error", "error": self.error}
        content: list[dict[str, Any]] = []
        if self.thoughts:
            content.append({"type": "thinking", "thinking": self.thoughts})
        if self._has_text:
            content.append({"type": "text", "text": self.text})
        body = {"type": "message", "model": self._model, "content": content, **self._stop}
        return {**body, "usage": self._known_usage()}

    def _known_usage(self) -> dict[str, Any] | None:
        # `message_start` states the tokens of the beginning only.
        return self._usage if self.whole else None


class MessagesProgress(Progress):
    """What the events of one message tell."""

    def take(self, event: dict[str, Any], name: str) -> None:
        kind = event.get("type") or name
        message = event.get("message")
        if kind == "message_start" and isinstance(message, dict):
            self.model = message.get("model")
            self.add_usage(message.get("usage"))
        elif kind == "message_stop":
            self.whole = self.ended = True
        elif kind != "ping":
            self.add_usage(event.get("usage"))
            self.begun = True


VERSION_HEADER = "anthropic-version"
_WITHOUT_SAMPLING = "2026-10-21"
"""The API version from which on sampling parameters are refused."""
_SAMPLING = ("temperature", "top_p", "top_k")
_SMALLEST_BUDGET = 1024
_ENDS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
_BROKEN_OFF = ("pause_turn", "error", "abort", "aborted", "cancelled")
_CACHED = {"cache_control": {"type": "ephemeral"}}


class MessagesAnswer(Answer):
    """One HTTP reply to a messages request."""

    __slots__ = ()

    def usage_in(self, content: Any) -> Usage | None:
        return _usage(content.get("usage")) if isinstance(content, dict) else None

    def read_content(self, body: Mapping[str, Any]) -> Reply | QRewardError:
        if body.get("type") == "error":
            return self.error_of(Problem.of(body))
        content = body.get("content")
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            return self.unreadable("no content blocks", self.http.body)
        stop = name_of(body.get("stop_reason"))
        if stop.lower() in _BROKEN_OFF:
            return self.unreadable(f"a reply that the provider broke off (stop_reason {stop!r})")
        text, thinking, is_answered = _text_and_thoughts(content)
        if stop == "refusal":
            details = body.get("stop_details")
            reason = name_of(details.get("explanation")) if isinstance(details, dict) else ""
            return InvalidReply(f"source {self.name!r} refused to judge: {self.redactor.of(reason or text) or stop}")
        ended = _ENDS.get(stop, stop)
        if not is_answered and ended in ("stop", ""):
            what = "thinking and no answer" if thinking else "no text"
            return self.unreadable(f"{what} (stop_reason {stop or 'null'!r})")
        return Reply(
            text=text,
            thinking=thinking,
            usage=_usage(body.get("usage")),
            model=name_of(body.get("model")),
            finish_reason=ended,
            announced=announced_limits(self.http.headers),
        )


def _text_and_thoughts(content: list[Any]) -> tuple[str, str, bool]:
    """Return the answer and the thoughts in content blocks, and whether there is an answer."""
    texts: list[str] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"] or "...")
        elif kind == "redacted_thinking":
            thoughts.append("...")
    return "".join(texts), "\n".join(thoughts), bool(texts)


def _usage(stated: Any) -> Usage | None:
    if not isinstance(stated, Mapping):
        return None
    details = stated.get("output_tokens_details")
    # `input_tokens` counts only what was neither read from the cache nor written to it.
    return counted(
        stated.get("input_tokens"),
        stated.get("output_tokens"),
        further_prompt=(stated.get("cache_creation_input_tokens"), stated.get("cache_read_input_tokens")),
        cached=stated.get("cache_read_input_tokens"),
        thinking=details.get("thinking_tokens") if isinstance(details, Mapping) else 0,
    )


class Messages(Dialect):
    """Anthropic's messages."""

    name = "anthropic"
    title = "Anthropic messages"
    path = "/messages"
    key_header: ClassVar[tuple[str, str]] = ("x-api-key", "")
    headers: ClassVar[Mapping[str, str]] = {VERSION_HEADER: "2023-06-01"}
    answer = MessagesAnswer
    stream = MessageStream
    progress = MessagesProgress
    bound: ClassVar[tuple[str, ...]] = ("max_tokens",)
    prompt_keys: ClassVar[tuple[str, ...]] = ("messages", "system")
    answers_in = "content"
    containers: ClassVar[tuple[str, ...]] = ("output_config",)
    foreign: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "Write max_tokens.",
        "max_output_tokens": "Write max_tokens.",
        "reasoning_effort": "Write output_config: {effort: ...}.",
        "reasoning": "Write thinking: {...}, or output_config: {effort: ...}.",
        "response_format": "Write output_config: {format: ...}.",
        "output_format": "Write output_config: {format: ...}.",
        "n": "Leave it out; a message has one answer.",
        "stop": "Write stop_sequences.",
        "logprobs": "Leave it out.",
        "top_logprobs": "Leave it out.",
        "stream_options": "Leave it out.",
        "generationConfig": "That is a key of the dialect gemini.",
    }
    sends_temperature = False
    lacks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "seed": (),
        "logprobs": (),
        "top_logprobs": (),
        "json_object": ("output_config",),
    }

    def body(self, model: str, request: Request, parameters: dict[str, Any]) -> dict[str, Any]:
        for key in ("temperature", "seed", "logprobs", "top_logprobs"):
            parameters.pop(key, None)
        schema = schema_in(parameters.pop("response_format", None))
        system, turns = system_and_turns(request.messages)
        body: dict[str, Any] = {"model": model, "max_tokens": parameters.pop("max_tokens", 8192)}
        written = [_turn(turn) for turn in turns]
        is_cached = _mark_prefix(written, [nonce for nonce in (request.shared_nonce, request.nonce) if nonce])
        if system:
            body["system"] = [{"type": "text", "text": system, **({} if is_cached else _CACHED)}]
        body["messages"] = written
        if "stop" in parameters:
            stop = parameters.pop("stop")
            body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
        if schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": plain(schema)}}
        return {**body, **parameters}

    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        return prompt_in(body.pop("messages", ()), body.pop("system", None), blocks="content")

    def thinks(self, parameters: Mapping[str, Any]) -> bool:
        return "thinking" not in parameters or is_on(parameters["thinking"])

    def longest_thoughts(self, parameters: Mapping[str, Any]) -> int:
        thinking = parameters.get("thinking")
        budget = thinking.get("budget_tokens") if isinstance(thinking, Mapping) and is_on(thinking) else 0
        return budget if isinstance(budget, int) and not isinstance(budget, bool) else 0

    def refusals(self, parameters: Mapping[str, Any], headers: Mapping[str, str]) -> list[Refusal]:
        found = super().refusals(parameters, headers)
        if "max_tokens" in parameters and parameters["max_tokens"] is None:
            found.append(Refusal("max_tokens", "Anthropic's messages need it.", "Write a number, or leave it out."))
        if headers.get(VERSION_HEADER, "") >= _WITHOUT_SAMPLING:
            problem = f"{VERSION_HEADER} {_WITHOUT_SAMPLING} and later refuse it."
            found += [Refusal(key, problem, "Leave it out.") for key in _SAMPLING if parameters.get(key) is not None]
        thinking = parameters.get("thinking")
        if thinking is not None:
            found += _thinking_refusals(thinking, parameters)
        return found


def _thinking_refusals(thinking: Any, parameters: Mapping[str, Any]) -> list[Refusal]:
    if not isinstance(thinking, Mapping) or not isinstance(thinking.get("type"), str):
        form = "Write {type: adaptive}, {type: enabled, budget_tokens: 4096} or {type: disabled}."
        return [Refusal("thinking", "it is a mapping with a type.", form)]
    found: list[Refusal] = []
    if thinking["type"] == "enabled":
        budget, bound = thinking.get("budget_tokens"), parameters.get("max_tokens")
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < _SMALLEST_BUDGET:
            problem = f"it is a whole number of tokens from {_SMALLEST_BUDGET} on."
            found.append(Refusal("thinking.budget_tokens", problem))
        elif isinstance(bound, (int, float)) and bound <= budget:
            problem = f"{budget:,} is not less than max_tokens, {bound:,}, which counts the thoughts, too."
            found.append(Refusal("thinking.budget_tokens", problem, "Lower it, or raise max_tokens."))
    if not is_on(thinking):
        return found
    if parameters.get("temperature", 1) not in (1, None):
        found.append(Refusal("temperature", "with thinking it must be 1.", "Leave it out."))
    if parameters.get("top_k") is not None:
        found.append(Refusal("top_k", "it cannot be combined with thinking.", "Leave it out."))
    choice = parameters.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") in ("any", "tool"):
        found.append(Refusal("tool_choice", "a tool cannot be forced with thinking.", "Leave it out."))
    return found


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": content}
    if message["role"] == "assistant":
        return {"role": "assistant", "content": text_of(content)}
    blocks: list[Any] = []
    for kind, value in parts_of(content):
        if kind == "text":
            blocks.append({"type": "text", "text": value})
        elif kind == "image":
            blocks.append({"type": "image", "source": _image(value)})
        else:
            blocks.append(value)
    return {"role": message["role"], "content": blocks}


def _image(url: Any) -> dict[str, Any]:
    found = image_data(url)
    if found is None:
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": found[0], "data": found[1]}


def _mark_prefix(turns: list[dict[str, Any]], nonces: Sequence[str]) -> bool:
    """Mark the end of the prefix that all requests of a judge share, so that the server caches it.

    The texts of a sample stand in fences that carry one of the nonces, so what is before the first of them comes from
    the judge's instructions. Returns whether there is such a prefix.
    """
    for turn in turns:
        content = turn["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for at, block in enumerate(blocks):
            text = block.get("text", "") if isinstance(block, dict) else ""
            places = [place for nonce in nonces if (place := text.find(nonce)) >= 0]
            if not places:
                continue
            found = min(places)
            end = text.rfind("\n", 0, found) + 1
            if not text[:end].strip():
                return False
            split = [{"type": "text", "text": text[:end], **_CACHED}, {"type": "text", "text": text[end:]}]
            turn["content"] = [*blocks[:at], *split, *blocks[at + 1 :]]
            return True
    return False


def plain(schema: Any) -> Any:
    """Copy a JSON schema without the bounds of numbers, which Anthropic's grammar refuses. They become descriptions, as
    Anthropic's own package does it.
    """
    if isinstance(schema, list):
        return [plain(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("type") not in ("number", "integer"):
        return {key: plain(value) for key, value in schema.items()}
    bounds = {key: schema[key] for key in ("minimum", "maximum") if key in schema}
    copy = {key: value for key, value in schema.items() if key not in bounds}
    if bounds:
        listed = ", ".join(f"{key}: {value}" for key, value in bounds.items())
        copy["description"] = f"{copy['description']}\n\n{{{listed}}}" if "description" in copy else f"{{{listed}}}"
    return copy
