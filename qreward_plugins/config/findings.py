"""Defines `Finding`: a mistake that a check found, with the wrong value apart from the sentence about it.

Some values must not be shown: those of `api_key`, `api_keys` and `headers`, and those below a misspelt key. This is
decided after all checks, when the meaning of every key is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

from ..errors import Mistake
from ..secrets import names_secret

Path: TypeAlias = tuple[str | int, ...]

SHOWN_CHARS = 60
"""Longest excerpt of a value in a message, in characters."""

_SECRET_KEYS = frozenset({"api_key", "api_keys", "api_key_env", "headers", "parameters", "body", "kwargs"})
"""Values below these keys are never shown, because users put keys of providers into all of them."""

_LONGEST_KEY_CHARS = 40
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Finding:
    """One mistake at `path`. `excerpt` is the wrong value; it is written after `problem` if it may be shown."""

    path: Path
    problem: str
    remedy: str = ""
    excerpt: str = ""

    def as_mistake(self, *, hidden: bool) -> Mistake:
        """Convert it to a `Mistake`; with `hidden`, without the value."""
        excerpt = "" if hidden or is_secret(self.path) else self.excerpt
        return Mistake(path_text(self.path), f"{self.problem}{excerpt}.", self.remedy)


def is_secret(path: Path) -> bool:
    """Whether values at this path are kept out of messages."""
    # The first two keys of a path, such as `sources` and the name of a source, are not keys of the source itself.
    return not _SECRET_KEYS.isdisjoint(path) or any(names_secret(key) for key in path[2:] if isinstance(key, str))


def path_text(path: Path) -> str:
    """Write a path as in `sources.fast.base_url[1]` or `routes["math/*"]`."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif _PLAIN_KEY.fullmatch(key):
            text += f".{cut(key)}" if text else cut(key)
        else:
            text += f"[{json.dumps(cut(key), ensure_ascii=False)}]"
    return text


def is_plain_key(key: str) -> bool:
    """Whether an unknown key looks like a misspelt key and may be shown. Any other text may be a line of another file,
    with secrets in it.
    """
    return len(key) <= _LONGEST_KEY_CHARS and _PLAIN_KEY.fullmatch(key.replace(" ", "_")) is not None


def cut(text: str) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


def scalar_text(value: Any) -> str:
    """Write a value as YAML would, shortened; of a container only its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return cut(repr(str(value)))
    if isinstance(value, int) and value.bit_length() > 1000:
        # Python refuses to write integers of more than 4,300 digits.
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return cut(f"{value!r}")
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "an empty list"
    return f"a value of type {type(value).__name__}"


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of `words` that `word` is probably a misspelling of; None if there is none."""
    by_letters = {_letters(candidate): candidate for candidate in words}
    letters = _letters(word)
    if close := get_close_matches(letters, by_letters, n=1):
        return by_letters[close[0]]
    holding = [candidate for key, candidate in by_letters.items() if len(letters) >= 3 and letters in key]
    return holding[0] if len(holding) == 1 else None


def _letters(word: str) -> str:
    return re.sub(r"[\W_]", "", word).lower() or word


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest of `words`, with a space after it; "" if none is near."""
    near = nearest(word, words)
    return f"Did you mean `{cut(near)}`? " if near is not None else ""
