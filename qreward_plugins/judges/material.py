"""What a judge is shown of a sample, as plain text: the question, the conversation, the reference.

Data sets hold more shapes than the types promise: content as a list of parts, tool calls beside an empty content,
ground truths that are numbers, arrays or nested mappings. They are made readable here, once; what has no readable form
is an `InputError` that names types and never quotes the sample. Texts come back unfenced; who shows them fences them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ..errors import InputError
from ..samples import Message, Sample
from .fence import without_control_tokens

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ATTACHMENT = re.compile(r"image|video|audio|file")
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


@dataclass(frozen=True, slots=True)
class Material:
    """The texts of one sample, readable and uncapped. `reference` is None where there is no ground truth."""

    question: str
    response: str
    reference: str | None
    data_source: str

    @classmethod
    def of(cls, sample: Sample) -> Material:
        """Raises `InputError` for what has no readable form."""
        if not isinstance(sample.response, str):
            raise InputError(f"the response is a {type(sample.response).__name__}, not text")
        return cls(
            question=question_text(sample.messages),
            response=readable(sample.response),
            reference=reference_text(sample.ground_truth),
            data_source=readable(str(sample.data_source)),
        )


def readable(text: str) -> str:
    """Replace lone surrogates, which no request body can carry, by U+FFFD."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def is_blank(text: str) -> bool:
    """Whether nothing of `text` can be seen: white space, invisible characters and control tokens of chat templates."""
    return not any(character.isprintable() and not character.isspace() for character in without_control_tokens(text))


def question_text(messages: Sequence[Message]) -> str:
    """The prompt as the judge reads it: its one turn, or the whole conversation with roles where there are several.

    A system message is no turn: it is left out beside a single one, and part of a conversation. "" without messages.
    Raises `InputError` for messages that have no readable form.
    """
    turns = [message for message in _checked(messages) if message.get("role") not in ("system", "developer")]
    return _turn_text(turns[0]) if len(turns) == 1 else conversation_text(messages)


def conversation_text(messages: Sequence[Message]) -> str:
    """All messages of the prompt, each under its role: `[user]`, a line break, the text.

    Raises `InputError` for messages that have no readable form.
    """
    return "\n\n".join(
        f"[{' '.join(str(message.get('role', 'user')).split())[:32]}]\n{_turn_text(message)}"
        for message in _checked(messages)
    )


def reference_text(ground_truth: Any) -> str | None:
    """The ground truth as text: strings as they are, anything else as JSON; None where there is none.

    Raises `InputError` for values that JSON cannot hold.
    """
    if ground_truth is None:
        return None
    if isinstance(ground_truth, str):
        return readable(str(ground_truth))
    return _json_text(ground_truth, "ground_truth")


def _checked(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    checked: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{index}] is a {type(message).__name__}; write a mapping with role and content")
        checked.append(message)
    return checked


def _turn_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    pieces: list[str] = []
    if isinstance(content, str):
        pieces.append(content)
    elif content is not None:
        parts = _plain(content)
        if not isinstance(parts, (list, tuple)):
            raise InputError(f"the content of a message is a {type(content).__name__}; write text or a list of parts")
        pieces.extend(_part_text(part) for part in parts)
    calls = message.get("tool_calls")
    if calls:
        pieces.append(f"[tool calls] {_json_text(calls, 'tool_calls')}")
    return readable("\n".join(piece for piece in pieces if piece))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        text = part.get("text")
        if isinstance(text, str):
            return text
        kind = _ATTACHMENT.search(str(part.get("type", "")))
        return f"[{kind.group()}]" if kind else "[attachment]"
    raise InputError(f"a part of a message's content is a {type(part).__name__}; write text or a mapping with type")


def _json_text(value: Any, name: str) -> str:
    value = _plain(value)
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= 4096:
        return str(value)
    try:
        return orjson.dumps(value, default=_plain_or_refuse, option=_JSON_OPTIONS).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name} of type {type(value).__name__} cannot be shown to a judge: {error}") from None


def _plain_or_refuse(value: Any) -> Any:
    plain = _plain(value)
    if plain is not value:
        return plain
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        # The order of a set changes from process to process, and the prompt must not.
        return sorted(value, key=repr)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _plain(value: Any) -> Any:
    """Turn arrays, tensors and their scalars into plain Python without importing what they come from."""
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.tolist()
    return value
