"""Anthropic's messages: `POST /messages`.

Requests and replies: `anthropic.types` of Anthropic's package for Python, and the provider's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...errors import QRewardError
from ...samples.images import EncodedImage
from ...samples.spent import Usage
from ..base import Reply, Request
from ..replies import Answer, counted, name_of
from ..streams import StreamBroken, StreamReader, object_in, text_in
from .base import Dialect, image_data, is_on, prompt_in, schema_in, system_and_turns, text_of, written_parts


class MessageStream(StreamReader):
    """The events of one message. The answer is its text.

    A server may leave out `message_stop`, but not the `stop_reason`. A part after it, or of a block that is not the
    open one, is refused: then it is unknown what the answer is. Events and parts of unknown types are ignored, as the
    API reference demands.
    """

    def __init__(self) -> None:
        super().__init__()
        self._model: Any = None
        self._usage: dict[str, Any] = {}
        self._stop: dict[str, Any] = {}
        self._has_text = False
        self._open: Any = None
        """The index of the open block."""

    def take_event(self, event: dict[str, Any], kind: Any) -> None:
        if kind == "message_start":
            message = object_in(event, "message")
            self._model = message.get("model")
            self._take_usage(object_in(message, "usage"))
        elif kind == "content_block_start":
            self._open = event.get("index")
            self._take_part(event, "content_block")
        elif kind == "content_block_delta":
            self._take_part(event, "delta")
        elif kind == "content_block_stop":
            self._open = None
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

    def _take_part(self, event: dict[str, Any], key: str) -> None:
        """Take in a block, or a further part of one: their texts have the same keys."""
        if self._stop or self._open is None or event.get("index") != self._open:
            raise StreamBroken("a part of a content block that is not open")
        part = object_in(event, key)
        kind = str(part.get("type")).removesuffix("_delta")
        if kind == "text":
            self._has_text = True
            self.add(text_in(part, "text"))
        elif kind == "thinking":
            self.add(thoughts=text_in(part, "thinking"))
        elif kind == "redacted_thinking":
            self.add(thoughts="...")

    def answer(self) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if self.thoughts:
            content.append({"type": "thinking", "thinking": self.thoughts})
        if self._has_text:
            content.append({"type": "text", "text": self.text})
        return {"type": "message", "model": self._model, "content": content, **self._stop, "usage": self._usage}


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
        stated = content.get("usage") if isinstance(content, Mapping) else None
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

    def read_content(self, body: Mapping[str, Any]) -> Reply | QRewardError:
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
            return self.refused(reason or text or stop)
        ended = _ENDS.get(stop, stop)
        if not is_answered and ended in ("stop", ""):
            what = "thinking and no answer" if thinking else "no text"
            return self.unreadable(f"{what} (stop_reason {stop or 'null'!r})")
        return self.replied(body, text=text, thinking=thinking, finish_reason=ended)


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


class Messages(Dialect):
    """Anthropic's messages."""

    name = "anthropic"
    path = "/messages"
    key_header: ClassVar[tuple[str, str]] = ("x-api-key", "")
    headers: ClassVar[Mapping[str, str]] = {"anthropic-version": "2023-06-01"}
    answer = MessagesAnswer
    stream = MessageStream
    bound: ClassVar[tuple[str, ...]] = ("max_tokens",)
    prompt_keys: ClassVar[tuple[str, ...]] = ("messages", "system")
    answers_in = "content"
    containers: ClassVar[tuple[str, ...]] = ("output_config",)
    sends_temperature = False
    lacks = ("seed", "logprobs", "top_logprobs", "json_object")

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


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": content}
    if message["role"] == "assistant":
        return {"role": "assistant", "content": text_of(content)}
    blocks = written_parts(
        content,
        lambda text: {"type": "text", "text": text},
        lambda image: {"type": "image", "source": _image(image)},
    )
    return {"role": message["role"], "content": blocks}


def _image(url: str | EncodedImage) -> dict[str, Any]:
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
