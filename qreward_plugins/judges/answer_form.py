"""The form of a judge's answer: as a text in the prompt, and as a JSON schema for servers with structured output."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..config.judge_models import Interval
from .verdicts import RATIONALE_FORM

NONCE = "{nonce}"
"""Stands in texts of the prompt for the nonce of the attempt."""

_FORM = """\
Answer with exactly one JSON object in this form, and with nothing before or after it:
{form}"""


def answer_form(score_range: Interval, criteria: Collection[str]) -> str:
    """The form of the answer for the prompt, with the word `NONCE` instead of the nonce."""
    low, high = map(plain, score_range)
    number = f"<number from {low} to {high}>"
    fields = [f'"id": "{NONCE}"', f'"rationale": "{RATIONALE_FORM}"']
    if criteria:
        fields.append('"components": {' + ", ".join(f'"{name}": {number}' for name in criteria) + "}")
    fields.append(f'"score": {number}')
    return _FORM.format(form="{" + ", ".join(fields) + "}")


def answer_schema(score_range: Interval, criteria: Collection[str]) -> dict[str, Any]:
    """The JSON schema of the answer."""
    low, high = score_range
    number = {"type": "number", "minimum": plain(low), "maximum": plain(high)}
    # The rationale comes before the numbers: servers keep this order, and models score better after giving a reason.
    properties: dict[str, Any] = {"id": {"type": "string"}, "rationale": {"type": "string"}}
    if criteria:
        properties["components"] = _closed({name: dict(number) for name in criteria})
    properties["score"] = number
    return _closed(properties)


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def plain(number: float) -> float | int:
    """Convert 10.0 to 10, for schemas and prompts."""
    return int(number) if number.is_integer() and abs(number) < 1e15 else number
