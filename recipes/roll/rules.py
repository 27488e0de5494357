"""Rewards by rule for judges.yaml."""

from __future__ import annotations

from typing import Any


def states_its_answer(data_source: str, solution_str: str, **_: Any) -> float:
    """1.0 if the response states its answer in the form of the data set RLVR, once and at its end."""
    before, found, answer = solution_str.partition("Therefore, the answer is")
    return float(bool(found and before.strip() and answer.strip()) and "Therefore, the answer is" not in answer)
