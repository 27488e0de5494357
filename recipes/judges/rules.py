"""Rewards by rule for two_judges.yaml."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_LAST_CHARS = 2_000
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right_answer(data_source: str, solution_str: str, ground_truth: Any, **_: Any) -> float:
    """1.0 if the last number of the response is the reference answer, or the last line is, if that is no number."""
    wanted, end = str(ground_truth).strip(), solution_str.strip()[-_LAST_CHARS:]
    if _NUMBER.fullmatch(wanted):
        numbers = _NUMBER.findall(end)
        return float(bool(numbers) and _value(numbers[-1]) == _value(wanted))
    last = end.rpartition("\n")[2].removeprefix("The answer is").strip(" .*")
    return float(last.casefold() == wanted.strip(" .*").casefold())


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
