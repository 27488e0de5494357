"""JSON as RFC 8259 has it, for values that others wrote and that train: nothing is repaired, and no work is unbounded.

Python's own reader lets NaN, Infinity and keys that stand twice pass, converts numbers of any length, and recurses as
deep as it is told to. Whoever reads a verdict has to know of all that: two readers that take another one of two equal
keys see two different scores in the same reply.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_NESTING = 100
"""Deepest nesting of lists and objects that is read."""

_MAX_DIGITS = 64
_BRACKET = re.compile(r"[\[\]{}]")


def too_deep(text: str) -> bool:
    """Whether lists and objects may be nested more than `MAX_NESTING` deep in any part of `text`.

    Brackets in strings count as well, so it is an upper bound, had in one pass.
    """
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = depth + 1 if bracket.group() in "[{" else max(0, depth - 1)
        if depth > MAX_NESTING:
            return True
    return False


def strict_decoder(flaws: list[str]) -> json.JSONDecoder:
    """A decoder that notes in `flaws`, after "the value ...", what Python's would let pass."""

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            flaws.append("has a key twice")
        return made

    def constant(name: str) -> float:
        flaws.append(f"holds {name}, which is not JSON")
        return math.nan

    def integer(digits: str) -> int | float:
        # Converting takes quadratic time, and from 4,300 digits on Python refuses; such a number is in no range.
        return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)

    return json.JSONDecoder(object_pairs_hook=mapping, parse_constant=constant, parse_int=integer)
