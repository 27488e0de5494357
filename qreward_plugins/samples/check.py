"""Checks every sample before it is scored, so that a broken one fails alone.

Data sets contain values that the types of `Sample` forbid: a response that is None, a ground truth that raises when it
is printed, a row that is a dict. This check reads each field once. A wrong value rejects the sample and names the
field. A valid value of another type (numpy numbers and texts, tuples, arrays of messages) becomes plain Python. Code
after this check can rely on the types. `plain_messages` checks the messages of a prompt and the turns of a response.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ..errors import InputError, kind_of
from .images import Image
from .json_values import json_text
from .sample import Message, Sample

_LARGEST = 2**63
_ATTACHMENT = re.compile(r"image|video|audio|file")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Replaces a value of a `Sample` that could not be read. `problem` says why ("has no column x").

    Adapters use it, so that a broken row fails its own sample and not the batch.
    """

    problem: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A sample that cannot be scored.

    `problem` names the field and says why. `sample` holds those of the identifying fields (data source, group, step,
    split, id) that could be read.
    """

    sample: Sample
    problem: str


def read_or_unreadable(read: Callable[[], T]) -> T:
    """Return the result of `read`, or an `Unreadable` if it raises. Raises nothing.

    The return type hides the `Unreadable`, because it goes into a field of that type, where `read_sample` finds it.
    """
    try:
        return read()
    except InputError as error:
        return Unreadable(str(error))  # type: ignore[return-value]
    except Exception as error:
        return Unreadable(f"cannot be read ({kind_of(error)})")  # type: ignore[return-value]


def pictured(read: Callable[[], tuple[list[Message], Sequence[Any]]]) -> dict[str, Any]:
    """The fields `messages` and `response_images` of a `Sample`. `read` returns the messages of the prompt, and the
    images that the prompt has no place for (`attach`): they came with the response. What raises is an `Unreadable`.
    """
    shown = read_or_unreadable(read)
    messages, images = (shown, ()) if isinstance(shown, Unreadable) else shown
    return {"messages": messages, "response_images": read_or_unreadable(lambda: [Image.of(each) for each in images])}


def mapping_or_unreadable(value: Any) -> Mapping[str, Any]:
    """Copy the mapping of a column to a dict; empty for None, an `Unreadable` for any other value."""
    return read_or_unreadable(lambda: dict(_mapping({} if value is None else value)))


def name_or_unreadable(value: Any) -> str:
    """Return the name in a column, a text or an integer, as text; "" for None, an `Unreadable` for any other value."""
    return read_or_unreadable(lambda: "" if value is None else str(_name(value)))


def read_sample(sample: Any) -> Sample | Rejected:
    """Return the sample with all fields of the declared types, or the first problem as a `Rejected`, which may be given
    in place of a sample that could not be made.

    Raises nothing. Values inside `ground_truth`, `prompt` and `extras` are not checked: the judge fails the sample if
    it cannot render them.
    """
    if _is_usual(sample) or type(sample) is Rejected:
        return sample  # type: ignore[no-any-return]
    if not issubclass(type(sample), Sample):
        return Rejected(_UNNAMED, f"the sample is of type {kind_of(sample)}; convert it to a Sample")
    values: dict[str, Any] = {}
    problem, changed = "", False
    for name, (_, check) in _CHECKS.items():
        try:
            value = getattr(sample, name)
            if type(value) is Unreadable:
                raise InputError(value.problem)
            values[name] = checked = check(value)
            changed = changed or checked is not value
        except InputError as error:
            problem = problem or blamed(name, str(error))
        except Exception as error:
            problem = problem or f"{name} cannot be read ({kind_of(error)})"
    if not problem and not values["messages"] and values["prompt"] is None:
        problem = "messages is empty; write at least one message with role and content"
    if problem:
        naming = {name: values[name] for name in _NAMING if name in values}
        return Rejected(Sample(messages=(), response="", **naming), problem)
    if not changed:
        return sample  # type: ignore[no-any-return]
    return Sample(**values)


def _is_usual(sample: Any) -> bool:
    """Whether a sample is one that needs no other check, as nearly all are: all fields have their usual types."""
    if type(sample) is not Sample:
        return False
    try:
        values = _VALUES(sample)
        usual = tuple(map(type, values)) in _USUAL and not (values[-1] or values[-2])
        return usual and bool(values[0]) and plain_messages(values[0]) is values[0]
    except Exception:
        return False


def named(sample: Sample | Rejected) -> Sample:
    """Return the sample, or for a rejected one the fields that identify it."""
    return sample if isinstance(sample, Sample) else sample.sample


def blamed(field: str, problem: str) -> str:
    """Join a field's name and a problem. The problem may begin with an index into the field ("[0] needs a role")."""
    return f"{field}{problem}" if problem.startswith("[") else f"{field} {problem}"


def plain_messages(value: Any) -> Sequence[Mapping[str, Any]]:
    """Convert messages to a list or tuple of mappings with `role` and `content`; return valid ones unchanged.

    Raises `InputError`, whose text is the second argument of `blamed`.
    """
    messages = value if type(value) in (list, tuple) else _listed(value)
    for message in messages:
        # Nearly all are plain: no function is called for them.
        role = message.get("role") if type(message) is dict else None
        if type(role) is not str or not role or type(message.get("content")) is not str:
            break
    else:
        return messages
    plain = [_message(message, number) for number, message in enumerate(messages)]
    return messages if all(map(operator.is_, plain, messages)) else plain


def _listed(value: Any) -> Sequence[Any]:
    if _is_array(value) or (isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))):
        return list(value)
    raise InputError(f"is of type {kind_of(value)}; write a list of mappings with role and content")


def _message(message: Any, number: int) -> Mapping[str, Any]:
    if type(message) is not dict and not isinstance(message, Mapping):
        raise InputError(f"[{number}] is of type {kind_of(message)}; write a mapping with role and content")
    plain = message if type(message) is dict else dict(message)
    role, content = plain.get("role"), plain.get("content")
    if not isinstance(role, str) or not role:
        raise InputError(f"[{number}] needs a role that is a text")
    checked = _content(plain, content, number)
    if type(role) is not str or checked is not content:
        plain = {**plain, "role": str.__str__(role), "content": checked}
    return plain


def _content(message: Mapping[str, Any], content: Any, number: int) -> Any:
    if isinstance(content, str):
        return str.__str__(content)
    if content is None:
        # An assistant's message may hold only tool calls, or reasoning that was removed.
        if "content" in message and message.get("role") == "assistant":
            return None
        if message.get("tool_calls") or message.get("function_call"):
            return None
        raise InputError(f"[{number}] needs a content: a text, or a list of parts")
    parts = content.tolist() if _is_array(content) else content
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, (list, tuple)):
        raise InputError(f"[{number}].content is of type {kind_of(content)}; write a text or a list of parts")
    for place, part in enumerate(parts):
        if not isinstance(part, (str, Mapping)):
            raise InputError(
                f"[{number}].content[{place}] is of type {kind_of(part)}; write a text or a mapping with type"
            )
    return parts


def _is_array(value: Any) -> bool:
    """Return whether `value` is an array or a tensor, without importing its library."""
    return hasattr(value, "tolist") and hasattr(value, "shape")


def text_of(content: Any, calls: Any = None) -> str:
    """The text of a message: of a content in parts, their texts, and the kind of every other one in brackets. Calls of
    tools follow as JSON.

    Raises `InputError` for what is no part, and for calls that JSON cannot hold.
    """
    pieces = [content] if isinstance(content, str) else [_part_text(part) for part in content or ()]
    if calls:
        pieces.append(f"[tool calls] {json_text(calls, 'messages.tool_calls')}")
    return "\n".join(filter(None, pieces))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InputError(f"messages has a content part of type {kind_of(part)}; write text or a mapping with type")
    text = part.get("text")
    if isinstance(text, (str, int, float)):
        return str(text)
    types = [part["type"]] if isinstance(part.get("type"), str) else [key for key in part if isinstance(key, str)]
    kind = next(filter(None, map(_ATTACHMENT.search, types)), None)
    return f"[{kind.group()}]" if kind else "[attachment]"


def _text(value: Any) -> str:
    if isinstance(value, str):
        # A subclass, such as numpy's, may override methods. A plain text is returned as it is.
        return str.__str__(value)
    raise InputError(f"is of type {kind_of(value)}; write a text")


def _name(value: Any) -> str | int | None:
    """Check a name: a text, an integer of at most 64 bits, or None."""
    if value is None or type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    return _integer(value, "a text")


def _step(value: Any) -> int | None:
    return None if value is None else _integer(value, "an integer")


def _integer(value: Any, wanted: str) -> int:
    """Convert an integer of any type, of at most 64 bits. `wanted` is the usual type, for messages."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"is of type {kind_of(value)}; write {wanted}, or None")
    number = operator.index(value)
    if not -_LARGEST <= number < _LARGEST:
        raise InputError("is an integer of more than 64 bits" + ("; write a text" if wanted == "a text" else ""))
    return number


def _split(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or str.__str__(value) not in ("train", "val"):
        raise InputError("must be 'train', 'val' or None")
    return str.__str__(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    if type(value) is dict:
        return value
    if isinstance(value, Mapping):
        return dict(value)
    raise InputError(f"is of type {kind_of(value)}; write a mapping")


def _turns(value: Any) -> Sequence[Any]:
    if value is None or (type(value) is tuple and not value):
        return ()
    turns, before = [dict(turn) for turn in plain_messages(value)], 0
    for number, turn in enumerate(turns):
        end: Any = turn.get("end")
        if not hasattr(end, "__index__") or operator.index(end) < before:
            problem = "where the turn ends in the response, in characters"
            raise InputError(f"[{number}] needs an `end`: {problem}, not before {before}")
        turn["end"] = before = operator.index(end)
        turn["content"] = text_of(turn.get("content"), turn.get("tool_calls"))
    if turns and all(turn["role"] != "assistant" for turn in turns):
        raise InputError("has no turn of the role assistant, which is the policy")
    return turns


def _images(value: Any) -> Sequence[Image]:
    if value is None or (type(value) is tuple and not value):
        return ()
    if not isinstance(value, (list, tuple)):
        raise InputError(f"is of type {kind_of(value)}; write a list of images")
    images: list[Image] = []
    for number, image in enumerate(value):
        try:
            images.append(Image.of(image))
        except InputError as error:
            raise InputError(f"[{number}] {error}") from None
    return images


def _anything(value: Any) -> Any:
    return value


_TEXT: frozenset[type] = frozenset({str})
_NONE: frozenset[type] = frozenset({type(None)})
_TEXT_OR_NONE = _TEXT | _NONE
_CHECKS: dict[str, tuple[frozenset[type], Callable[[Any], Any]]] = {
    "messages": (frozenset(), plain_messages),
    "response": (_TEXT, _text),
    "ground_truth": (_TEXT_OR_NONE, _anything),
    "data_source": (_TEXT, _text),
    "group_id": (_TEXT_OR_NONE, _name),
    "step": (_NONE, _step),
    "split": (_NONE, _split),
    "extras": (frozenset({dict}), _mapping),
    "id": (_TEXT_OR_NONE, _name),
    "prompt": (_TEXT_OR_NONE, _anything),
    "response_images": (frozenset(), _images),
    "turns": (frozenset(), _turns),
}
"""The usual types of each field, and the check of a value, which returns one of a usual type as it is."""
assert list(_CHECKS) == [field.name for field in fields(Sample)]

_VALUES = operator.attrgetter(*_CHECKS)
_USUAL = frozenset(
    itertools.product((list, tuple), *(types or (tuple,) for name, (types, _) in _CHECKS.items() if name != "messages"))
)
"""The usual types of all fields together. Images and turns are seldom there, so only empty ones are usual."""

_NAMING = ("data_source", "group_id", "step", "split", "id")
_UNNAMED = Sample(messages=(), response="")
