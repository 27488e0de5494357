"""Turns prompts of any form into messages.

Frameworks apply the policy's chat template early, and often keep only the resulting text or tokens. A judge should see
the question and not the tokens of a template, so this module recovers the messages from the most common templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .check import plain_messages
from .images import is_image_part
from .sample import Message

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

    Raises `InputError` for anything else; its text is the second argument of `sample_check.blamed`.
    """
    if not isinstance(prompt, str):
        return [{"role": turn["role"], "content": _text(turn.get("content"))} for turn in plain_messages(prompt)]
    for template in _TEMPLATES:
        turns = [(found["role"], found["content"].strip()) for found in template.finditer(prompt)]
        if turns and turns[-1][0] == "assistant":
            turns.pop()  # the opening of the response
        if turns:
            return [{"role": role, "content": content} for role, content in turns]
    return [{"role": "user", "content": prompt}]


def _text(content: Any) -> Any:
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
