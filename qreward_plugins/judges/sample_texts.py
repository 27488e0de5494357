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

from ..errors import InputError
from ..sample_check import blamed, kind_of, plain_messages
from ..samples import Message, Sample
from ..sources.bodies import as_json, encoded

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ATTACHMENT = re.compile(r"image|video|audio|file")
_MOST_BITS = 4096


@dataclass(frozen=True, slots=True)
class SampleTexts:
    """The texts of one sample, readable and uncapped. `reference` is None where there is no ground truth."""

    question: str
    response: str
    reference: str | None
    data_source: str

    @classmethod
    def of(cls, sample: Sample) -> SampleTexts:
        """Raises `InputError` for what has no readable form."""
        if not isinstance(sample.response, str):
            raise InputError(f"response is of type {kind_of(sample.response)}; write a text")
        if not len(sample.messages):
            raise InputError("messages is empty; write at least one message with role and content")
        return cls(
            question=question_text(sample.messages),
            response=readable(sample.response),
            reference=reference_text(sample.ground_truth),
            data_source=readable(str(sample.data_source)),
        )


def readable(text: str) -> str:
    """Replace lone surrogates, which no request body can carry, by U+FFFD."""
    return _LONE_SURROGATE.sub("\ufffd", text)


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
    if issubclass(type(ground_truth), str):
        return readable(str.__str__(ground_truth))
    return _json_text(ground_truth, "ground_truth")


def _checked(messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
    try:
        return plain_messages(messages)
    except InputError as error:
        raise InputError(blamed("messages", str(error))) from None
    except Exception as error:
        raise InputError(f"messages cannot be read ({kind_of(error)})") from None


def _turn_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    pieces: list[str] = []
    if isinstance(content, str):
        pieces.append(content)
    elif content is not None:
        pieces.extend(_part_text(part) for part in content)
    calls = message.get("tool_calls")
    if calls:
        pieces.append(f"[tool calls] {_json_text(calls, 'messages.tool_calls')}")
    return readable("\n".join(piece for piece in pieces if piece))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        text = part.get("text")
        if isinstance(text, str):
            return text
        said = [part["type"]] if isinstance(part.get("type"), str) else [key for key in part if isinstance(key, str)]
        kind = next(filter(None, map(_ATTACHMENT.search, said)), None)
        if kind is None and "type" not in part:
            raise InputError("messages holds a part of a content without text and without type")
        return f"[{kind.group()}]" if kind else "[attachment]"
    raise InputError(f"messages holds a part of a content of type {kind_of(part)}; write text or a mapping with type")


def _json_text(value: Any, name: str) -> str:
    if issubclass(type(value), int) and type(value) is not bool:
        # Alone it stands in no JSON, so that it may have any length that can be read.
        exact = int.__add__(value, 0)
        if exact.bit_length() <= _MOST_BITS:
            return f"{exact}"
    plain = as_json(value, name, sets=True)
    return readable(plain) if isinstance(plain, str) else encoded(plain).decode()
