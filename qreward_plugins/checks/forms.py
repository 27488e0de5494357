"""Checks of the form of a response: JSON, tags, length and repetition."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..judges.extraction import Extract, extracted

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n\s*```", re.DOTALL)


def json_schema(solution_str: str, *, schema: Mapping[str, Any], extract: Extract = "all", **_: Any) -> float:
    """1 if the answer is one JSON value that `schema` (JSON Schema) allows; else 0. A code fence around it does not
    count. Needs the package jsonschema. Raises its `SchemaError` for a schema that is none.
    """
    import jsonschema  # type: ignore[import-untyped]

    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    text = extracted(solution_str, extract)
    fenced = _FENCE.findall(text)
    try:
        value = json.loads(fenced[0] if len(fenced) == 1 else text)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator(schema).is_valid(value))


def tags(solution_str: str, *, names: Sequence[str] = ("think", "answer"), **_: Any) -> float:
    """1 if the response is these tags, each once and in this order, with white space between them only; else 0. An
    empty tag counts as missing.
    """
    place = 0
    for name in names:
        opens, ends = f"<{name}>", f"</{name}>"
        if solution_str.count(opens) != 1 or solution_str.count(ends) != 1:
            return 0.0
        start, end = solution_str.find(opens), solution_str.find(ends)
        inside = solution_str[start + len(opens) : end]
        if solution_str[place:start].strip() or end < start or not inside.strip():
            return 0.0
        place = end + len(ends)
    return float(not solution_str[place:].strip())


def length(solution_str: str, *, most: int, soft: int = 0, unit: str = "characters", **_: Any) -> float:
    """0 up to `most` - `soft`, -1 from `most` on, and linear between them, in `unit` (`characters` or `words`): the
    soft overlong punishment of DAPO (2503.14476, equation 13). Add it to another reward by a `sum`.
    """
    if unit not in ("characters", "words"):
        raise ValueError(f"unit must be characters or words, not {unit!r}")
    if not 0 <= soft <= most:
        raise ValueError(f"soft must be from 0 to most ({most:,}), not {soft:,}")
    count = len(solution_str) if unit == "characters" else len(solution_str.split())
    over = count - (most - soft)
    return 0.0 if over <= 0 else -1.0 if over >= soft else -over / soft


def repetition(solution_str: str, *, words: int = 4, **_: Any) -> float:
    """The share of repeated phrases of so many words, negated: 0 without any, near -1 for one phrase over and over."""
    if words < 1:
        raise ValueError(f"words must be at least 1, not {words}")
    written = solution_str.lower().split()
    phrases = list(zip(*(written[place:] for place in range(words)), strict=False))
    return len(set(phrases)) / len(phrases) - 1.0 if phrases else 0.0
