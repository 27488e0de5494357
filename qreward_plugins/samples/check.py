"""Checks every sample before it is scored, so that a broken one fails alone.

Data sets contain values that the types of `Sample` forbid: a response that is None, a ground truth that raises when it
is printed, a row that is a dict. This check reads each field once. A wrong value rejects the sample and names the
field. A valid value of another type (numpy numbers and texts, tuples, arrays of messages) becomes plain Python. Code
after this check can rely on the types.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ..errors import InputError
from .images import Image, is_image_part
from .sample import Message, ResponseTurn, Sample

_TEMPLATES = (
    # A turn in ChatML (Qwen), Llama 3 and GLM. Each pattern stops where the next turn begins.
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<content>.*?)(?:<\|im_end\|>|(?=<\|im_start\|>)|\Z)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\s*(?P<content>.*?)"
        r"(?:<\|eot_id\|>|(?=<\|start_header_id\|>)|\Z)",
        re.DOTALL,
    ),
    re.compile(
        r"<\|(?P<role>system|user|assistant|observation)\|>\n?(?P<content>.*?)"
        r"(?=<\|(?:system|user|assistant|observation)\|>|\Z)",
        re.DOTALL,
    ),
)


def messages_of(prompt: Any) -> list[Message]:
    """The messages of a prompt: a list of messages, whose content may be in parts, or a text from a chat template. Any
    other text becomes one message of the user. The content is a text, or a list of parts if it has images.

    Raises `InputError` for anything else; its text is the second argument of `blamed`.
    """
    if not isinstance(prompt, str):
        return [{"role": turn["role"], "content": _joined(turn.get("content"))} for turn in plain_messages(prompt)]
    for template in _TEMPLATES:
        turns = [(found["role"], found["content"].strip()) for found in template.finditer(prompt)]
        if turns and turns[-1][0] == "assistant":
            turns.pop()  # the opening of the response
        if turns:
            return [{"role": role, "content": content} for role, content in turns]
    return [{"role": "user", "content": prompt}]


def dialogue(messages: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ResponseTurn, ...]]:
    """Return the messages of a response as one text and its turns. In the text, each turn is `role: content`. A single
    message is the text alone, without turns. Calls of tools are written as JSON.
    """
    texts = [_plain_text(message) for message in messages]
    if len(texts) == 1:
        return texts[0], ()
    response = ""
    turns: list[ResponseTurn] = []
    for message, text in zip(messages, texts, strict=True):
        response += f"{chr(10) * 2 if turns else ''}{message['role']}: {text}"
        turns.append(ResponseTurn(role=message["role"], content=text, end=len(response)))
    return response, tuple(turns)


def _plain_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    pieces = [content or ""]
    if isinstance(content, (list, tuple)):
        pieces = [
            str(part.get("text", f"[{part.get('type', 'attachment')}]")) if isinstance(part, Mapping) else str(part)
            for part in content
        ]
    if calls := message.get("tool_calls"):
        pieces.append(f"[tool calls] {json.dumps(calls, ensure_ascii=False, default=str)}")
    return "\n".join(filter(None, pieces))


def _joined(content: Any) -> Any:
    """A message's text. Of content in parts it joins the texts, with the kind of every other part in brackets; parts
    with images stay as they are.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)) and any(map(is_image_part, content)):
        return list(content)
    parts = content if isinstance(content, (list, tuple)) else ()
    return "\n".join(
        str(part["text"]) if "text" in part else f"[{part.get('type', 'attachment')}]"
        for part in parts
        if isinstance(part, Mapping)
    )


_LARGEST = 2**63
_SHOWN_CHARS = 60

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


def mapping_or_unreadable(value: Any) -> Mapping[str, Any]:
    """Copy the mapping of a column to a dict; empty for None, an `Unreadable` for any other value."""
    return read_or_unreadable(lambda: dict(_mapping({} if value is None else value)))


def name_or_unreadable(value: Any) -> str:
    """Return the name in a column, a text or an integer, as text; "" for None, an `Unreadable` for any other value."""
    return read_or_unreadable(lambda: "" if value is None else str(_name(value)))


def read_sample(sample: Any) -> Sample | Rejected:
    """Return the sample with all fields of the declared types, or the first problem as a `Rejected`.

    Raises nothing. Values inside `ground_truth`, `prompt` and `extras` are not checked: the judge fails the sample if
    it cannot render them.
    """
    if not issubclass(type(sample), Sample):
        return Rejected(_UNNAMED, f"the sample is of type {kind_of(sample)}; convert it to a Sample")
    if type(sample) is Sample and _is_plain(sample):
        return sample
    values: dict[str, Any] = {}
    problem = ""
    # A subclass may compute its fields, with another value each time. The values that are read here are used.
    changed = type(sample) is not Sample and not _keeps_fields(type(sample))
    for name, check in _CHECKS.items():
        try:
            value = getattr(sample, name)
            if type(value) is Unreadable:
                raise InputError(value.problem)
            values[name] = check(value)
            changed = changed or values[name] is not value
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


def _is_plain(sample: Any) -> bool:
    """Whether every field has the type that nearly all samples have. This runs for every sample, and the checks of the
    single fields take ten times as long.
    """
    try:
        return (
            type(sample.messages) in (list, tuple)
            and len(sample.messages) > 0
            and all(map(_is_text_message, sample.messages))
            and type(sample.response) is type(sample.data_source) is str
            and (sample.group_id is None or type(sample.group_id) is str)
            and (sample.id is None or type(sample.id) is str)
            and (sample.step is None or (type(sample.step) is int and 0 <= sample.step < _LARGEST))
            and (sample.split is None or (type(sample.split) is str and sample.split in ("train", "val")))
            and type(sample.extras) is dict
            and type(sample.response_images) is tuple
            and not sample.response_images
            and type(sample.turns) is tuple
            and not sample.turns
            and type(sample.ground_truth) is not Unreadable
            and type(sample.prompt) is not Unreadable
        )
    except Exception:  # a field that was never set, or a key that cannot be compared: the full check names it
        return False


def _is_text_message(message: Any) -> bool:
    """Whether a message is a dict with a role and a text."""
    return (
        type(message) is dict
        and type(message.get("role")) is type(message.get("content")) is str
        and bool(message["role"])
    )


def named(sample: Sample | Rejected) -> Sample:
    """Return the sample, or for a rejected one the fields that identify it."""
    return sample if isinstance(sample, Sample) else sample.sample


def blamed(field: str, problem: str) -> str:
    """Join a field's name and a problem. The problem may begin with an index into the field ("[0] needs a role")."""
    return f"{field}{problem}" if problem.startswith("[") else f"{field} {problem}"


def kind_of(value: Any) -> str:
    """Return the name of a value's type for messages: printable, at most 60 characters."""
    try:
        name = str.__str__(type(value).__name__)
    except Exception:
        return "object"
    return "".join(letter if letter.isprintable() else "?" for letter in name[:_SHOWN_CHARS])


def plain_messages(value: Any) -> Sequence[Mapping[str, Any]]:
    """Convert messages to a list or tuple of mappings with `role` and `content`; return valid ones unchanged.

    Raises `InputError`, whose text is the second argument of `blamed`.
    """
    messages = value if type(value) in (list, tuple) else _listed(value)
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
        plain = {**plain, "role": _text(role), "content": checked}
    return plain


def _content(message: Mapping[str, Any], content: Any, number: int) -> Any:
    if type(content) is str:
        return content
    if isinstance(content, str):
        return _text(content)
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


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    if isinstance(value, str):
        # A subclass, such as numpy's, may override methods.
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
        try:
            turn["end"] = _integer(turn.get("end"), "a number")
        except InputError:
            turn["end"] = -1
        if turn["end"] < 0:
            raise InputError(f"[{number}] needs an `end`: where the turn ends in the response, in characters")
        if turn["end"] < before:
            raise InputError(f"[{number}] ends at {turn['end']}, before the turn before it ({before})")
        turn["content"] = _plain_text(turn)
        before = turn["end"]
    if turns and all(turn["role"] != "assistant" for turn in turns):
        raise InputError("has no turn of the role assistant, which is the policy")
    return turns


def _images(value: Any) -> Sequence[Image]:
    if value is None or (type(value) is tuple and not value):
        return ()
    if type(value) in (tuple, list) and all(type(image) is Image for image in value):
        return value  # type: ignore[no-any-return]
    return [_image(image, number) for number, image in enumerate(_listed_images(value))]


def _listed_images(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    raise InputError(f"is of type {kind_of(value)}; write a list of images")


def _image(image: Any, number: int) -> Image:
    try:
        return Image.of(image)
    except InputError as error:
        raise InputError(f"[{number}] {error}") from None


def _anything(value: Any) -> Any:
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "messages": plain_messages,
    "response": _text,
    "ground_truth": _anything,
    "data_source": _text,
    "group_id": _name,
    "step": _step,
    "split": _split,
    "extras": _mapping,
    "id": _name,
    "prompt": _anything,
    "response_images": _images,
    "turns": _turns,
}
assert list(_CHECKS) == [field.name for field in fields(Sample)]

_NAMING = ("data_source", "group_id", "step", "split", "id")
_UNNAMED = Sample(messages=(), response="")


def _keeps_fields(kind: type) -> bool:
    """Return whether a subclass of `Sample` overrides no field, so that its instances need no copy."""
    between = kind.__mro__[: kind.__mro__.index(Sample)]
    own = {"__getattribute__", "__getattr__", *_CHECKS}
    return not any(own & vars(parent).keys() for parent in between)
