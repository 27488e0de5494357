"""Converts a sample to the plain texts that a judge reads: the question, the conversation, the reference.

Data sets contain values that the types do not allow: content as a list of parts, tool calls with an empty content,
ground truths that are numbers, arrays or nested mappings. This module writes them as text. For a value that cannot be
written it raises an `InputError`, which names types and never quotes the sample. The texts are not fenced; the caller
fences them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, kind_of
from ..samples import Message, Sample
from ..samples.check import blamed, plain_messages, text_of
from ..samples.json_values import as_json, encoded, json_text

TURN = "\udc1e"
"""Stands before and after the role of a turn, until the id of its fence is known (`Page.show`). A lone surrogate, which
`readable` leaves in no text of a sample.
"""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_LONGEST_ROLE_CHARS = 32
_USUAL = {"role", "content"}


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True)
class SampleTexts:
    """The texts of one sample, not truncated. `reference` is None if there is no ground truth."""

    question: str
    response: str
    reference: str | None

    @classmethod
    def of(cls, sample: Sample) -> SampleTexts:
        """Read the texts of `sample`. Raises `InputError` for a value that cannot be written as text."""
        if not isinstance(sample.response, str):
            raise InputError(f"response is of type {kind_of(sample.response)}; write a text")
        if not len(sample.messages):
            raise InputError("messages is empty; write at least one message with role and content")
        return cls(
            question=question_text(sample.messages),
            response=readable(sample.response),
            reference=reference_text(sample.ground_truth),
        )


def readable(text: str) -> str:
    """Replace lone surrogates by U+FFFD, because UTF-8 cannot encode them."""
    # Most texts are ASCII, which Python knows without looking at every character.
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def question_text(messages: Sequence[Message]) -> str:
    """Return the prompt as text: its one turn, or the whole conversation with roles if there are several turns.

    A system message is not a turn: it is left out if there is one turn, and part of the conversation otherwise. Without
    messages the text is "". Raises `InputError` for messages that cannot be written as text.
    """
    if type(messages) in (list, tuple) and len(messages) == 1:
        only: Any = messages[0]
        # The usual form, which needs no check.
        if type(only) is dict and only.keys() == _USUAL and only["role"] == "user" and type(only["content"]) is str:
            return readable(only["content"])
    turns = [message for message in checked_turns(messages) if message.get("role") not in ("system", "developer")]
    return _turn_text(turns[0]) if len(turns) == 1 else conversation_text(messages)


def conversation_text(messages: Sequence[Message]) -> str:
    """Return all messages of the prompt, each below its role: `[user]`, a line break, the text. If the policy wrote one
    of them, the roles are between `TURN`, because it could forge turns of tools and users otherwise.

    Raises `InputError` for messages that cannot be written as text.
    """
    turns = [(_role(message), _turn_text(message)) for message in checked_turns(messages)]
    if all(role != "assistant" for role, _ in turns):
        return "\n\n".join(f"[{role}]\n{text}" for role, text in turns)
    return "\n\n".join(f"{TURN}{role}{TURN}\n{text}" for role, text in turns)


def conversation_turns(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of the prompt as pairs of role and text. Raises `InputError` for messages that cannot be
    written as text.
    """
    return [{"role": _role(message), "content": _turn_text(message)} for message in checked_turns(messages)]


def reference_text(ground_truth: Any) -> str | None:
    """Return the ground truth as text: a string unchanged, any other value as JSON; None if there is none.

    Raises `InputError` for values that JSON cannot hold.
    """
    if ground_truth is None:
        return None
    if issubclass(type(ground_truth), str):
        return readable(str.__str__(ground_truth))
    return readable(json_text(ground_truth, "ground_truth"))


def column_of(sample: Sample, column: str) -> Any:
    """Return the value of a column of the data set: a key of the extras, or the way to one, joined by dots. Raises
    `InputError` if there is none.
    """
    value: Any = sample.extras
    for key in column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            there = ", ".join(sorted(map(str, value))[:20]) if isinstance(value, Mapping) else ""
            raise InputError(f"the sample has no column {column}; it has {there or 'none'}")
        value = value[key]
    return value


def json_column(sample: Sample, column: str | None, where: str) -> Any:
    """Return a value that a column of the data set holds, or JSON text of it; None: the ground truth. `where` begins
    the message of an error. Raises `InputError`.
    """
    value = sample.ground_truth if column is None else column_of(sample, column)
    value = as_json(value, where)
    if not isinstance(value, str):
        return json.loads(encoded(value))  # arrays become lists
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InputError(f"{where} is a text that is no JSON") from None


def checked_turns(messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
    """Return the messages as mappings with role and content. Raises `InputError` for what is no message."""
    try:
        return plain_messages(messages)
    except InputError as error:
        raise InputError(blamed("messages", str(error))) from None
    except Exception as error:
        raise InputError(f"messages cannot be read ({kind_of(error)})") from None


def _role(message: Mapping[str, Any]) -> str:
    return readable(" ".join(str(message.get("role", "user")).split())[:_LONGEST_ROLE_CHARS])


def _turn_text(message: Mapping[str, Any]) -> str:
    return readable(text_of(message.get("content"), message.get("tool_calls")))
