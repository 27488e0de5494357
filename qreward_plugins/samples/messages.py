"""Reads prompts and responses as frameworks give them: messages in any form, texts of chat templates, and responses of
several turns. `check` reads the messages of a `Sample`, which are a list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .check import plain_messages, text_of
from .images import is_image_part
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
