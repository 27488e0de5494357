"""Parses JSON strictly by RFC 8259, with bounded work, for untrusted text that becomes a reward.

Python's own parser accepts NaN, Infinity and duplicate keys, converts numbers of any length, and recurses without a
limit of its own. With a duplicate key, two parsers can read two different scores from the same reply.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

MAX_NESTING = 100
"""Deepest nesting of lists and objects that is accepted."""

_MAX_DIGITS = 64
_BRACKET = re.compile(r"[\[\]{}]")


def too_deep(text: str) -> bool:
    """Whether lists and objects may be nested more than `MAX_NESTING` deep in any part of `text`.

    Brackets in strings count, too, so the answer may be true for a shallow text. It takes at most three passes.
    """
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return False
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = depth + 1 if bracket.group() in "[{" else max(0, depth - 1)
        if depth > MAX_NESTING:
            return True
    return False


def strict_decoder(flaws: list[str]) -> json.JSONDecoder:
    """Return a decoder that appends to `flaws` what Python's decoder accepts but RFC 8259 does not.

    A flaw is a phrase that continues a sentence: "the value" + " has a duplicate key".
    """
    return _decoder(flaws.append)


def raw_decode(text: str, start: int, flaws: list[str]) -> tuple[Any, int]:
    """Call `raw_decode` of a strict decoder. To make one for each text would take as long as the parsing."""
    try:
        return _FLAWLESS.raw_decode(text, start)
    except _FlawError:
        return strict_decoder(flaws).raw_decode(text, start)


class _FlawError(Exception):
    pass


def _refuse(flaw: str) -> None:
    raise _FlawError(flaw)


def _decoder(on_flaw: Callable[[str], None]) -> json.JSONDecoder:
    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            on_flaw("has a duplicate key")
        return made

    def constant(name: str) -> float:
        on_flaw(f"holds {name}, which is not JSON")
        return math.nan

    def integer(digits: str) -> int | float:
        # The conversion takes quadratic time, and Python refuses it above 4,300 digits. No score is that large.
        return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)

    return json.JSONDecoder(object_pairs_hook=mapping, parse_constant=constant, parse_int=integer)


_FLAWLESS = _decoder(_refuse)
"""Raises `_FlawError` for a flaw. It has no state, so all threads share it."""
