"""A mistake on its way to the user, and the words that messages have in common.

A message may show a name that is near an allowed one, a number or a boolean, and never another text: any text may be a
key in the wrong place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple, TypeAlias

Path: TypeAlias = tuple[str | int, ...]

SHOWN_CHARS = 60
"""Longest name in a message, in characters."""

_LONGEST_KEY_CHARS = 40
_LONGEST_KEY_WITH_DIGITS = 16
"""A longer name with digits may be an API key in the wrong place."""
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Finding(NamedTuple):
    """One mistake at `path`. `problem` has no full stop at its end; `remedy` is a sentence."""

    path: Path
    problem: str
    remedy: str = ""


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
    if len(key) > _LONGEST_KEY_WITH_DIGITS and any(map(str.isdigit, key)):
        return False
    return len(key) <= _LONGEST_KEY_CHARS and _PLAIN_KEY.fullmatch(key.replace(" ", "_")) is not None


def cut(text: str) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


def listed(names: Iterable[str]) -> str:
    """Write names for a message, ten at most."""
    shown = [f"`{cut(name)}`" for name in names]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of `words` that `word` is probably a misspelling of; None if there is none."""
    by_letters = {letters(candidate): candidate for candidate in words}
    own = letters(word)
    if close := get_close_matches(own, by_letters, n=1):
        return by_letters[close[0]]
    holding = [candidate for key, candidate in by_letters.items() if len(own) >= 3 and own in key]
    return holding[0] if len(holding) == 1 else None


def letters(word: str) -> str:
    """Return a word in lower case, without underscores and signs."""
    return re.sub(r"[\W_]", "", word).lower() or word


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest of `words`, with a space after it; "" if none is near."""
    near = nearest(word, words)
    return f"Did you mean `{cut(near)}`? " if near is not None else ""
