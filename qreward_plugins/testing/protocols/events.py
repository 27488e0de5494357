"""The replies of a judge server as server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

_CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class Events:
    """A reply as server-sent events, and what faults put between them. An event ends with a blank line."""

    good: Sequence[bytes]
    """The events up to the last part of the answer."""
    end: Sequence[bytes]
    """The events after that. With the first, no part of the answer may follow any more."""
    whole: int
    """How many events of `end` a client needs."""
    part: Callable[[str], bytes]
    """Makes an event with a further part of the answer."""
    second: bytes
    """An event with a part of a second answer."""
    error: bytes
    """An error in the middle of the answer."""
    ping: bytes = b": keep-alive\n\n"
    """What keeps the connection alive."""


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return one event with this data; `name` "" leaves the name out."""
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + orjson.dumps(data) + b"\n\n"


def tokens_of(text: str) -> list[str]:
    """Split a text into the texts of its tokens."""
    return [text[at : at + _CHARS_PER_TOKEN] for at in range(0, len(text), _CHARS_PER_TOKEN)]
