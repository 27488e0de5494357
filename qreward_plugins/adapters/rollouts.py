"""Rollouts of several frameworks: prompts with images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..samples import Message
from ..samples.check import Unreadable, read_or_unreadable
from ..samples.images import Image


def pictured(read: Callable[[], tuple[list[Message], Sequence[Any]]]) -> dict[str, Any]:
    """The fields `messages` and `response_images` of a `Sample`. `read` returns the messages of the prompt, and the
    images that the prompt has no place for (`attach`): they came with the response. What raises is an `Unreadable`.
    """
    shown = read_or_unreadable(read)
    messages, images = (shown, ()) if isinstance(shown, Unreadable) else shown
    return {"messages": messages, "response_images": read_or_unreadable(lambda: [Image.of(each) for each in images])}
