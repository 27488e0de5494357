"""Reads messages of prompts and responses: lists of them in any form, texts of chat templates, and responses of several
turns.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, kind_of
from .images import is_image_part
from .json_values import json_text
from .sample import Message, ResponseTurn

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


_ATTACHMENT = re.compile(r"image|video|audio|file")


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


def _joined(content: Any) -> Any:
    """The text of a message's content; parts with images stay as they are."""
    if isinstance(content, (list, tuple)) and any(map(is_image_part, content)):
        return list(content)
    return text_of(content)


def dialogue(messages: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ResponseTurn, ...]]:
    """Return the messages of a response as one text and its turns. In the text, each turn is `role: content`. A single
    message is the text alone, without turns. Calls of tools are written as JSON.
    """
    texts = [text_of(message.get("content"), message.get("tool_calls")) for message in messages]
    if len(texts) == 1:
        return texts[0], ()
    response = ""
    turns: list[ResponseTurn] = []
    for message, text in zip(messages, texts, strict=True):
        response += f"{chr(10) * 2 if turns else ''}{message['role']}: {text}"
        turns.append(ResponseTurn(role=message["role"], content=text, end=len(response)))
    return response, tuple(turns)


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
        plain = {**plain, "role": str.__str__(role), "content": checked}
    return plain


def _content(message: Mapping[str, Any], content: Any, number: int) -> Any:
    if type(content) is str:
        return content
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
