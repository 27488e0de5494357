"""The grading rule of this recipe's judges: a response and a reference answer give a score from 0 to 10.

The rule replaces the language model behind a judge's endpoint. It grades as a model might: the right answer counts, and
a near miss scores slightly more than a wild guess.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qreward_plugins.testing import JudgeCall

MAX_RESPONSE_CHARS = 2_000
"""Longer responses are graded on their first characters only."""

_STATED_ANSWER = re.compile(r"answer is (-?\d{1,9})(?!\d)")
_NEAR = 8


def stated_answer(response: str) -> int | None:
    """The integer in the response's only "answer is N"; None if there is none, or more than one."""
    found = _STATED_ANSWER.findall(response[:MAX_RESPONSE_CHARS])
    return int(found[0]) if len(found) == 1 else None


def grade(response: str, reference: str) -> float:
    """Grade a response: 10 for the right answer, up to 3 for a wrong one by its distance, 0 for no answer.

    Raises ValueError if the reference is not an integer.
    """
    right, stated = int(reference), stated_answer(response)
    if stated is None:
        return 0.0
    if stated == right:
        return 10.0
    return 3.0 * max(0.0, 1.0 - abs(stated - right) / _NEAR)


def score(call: JudgeCall) -> dict[str, object]:
    """The verdict on one call to a judge server of the demo: the grade, and the reason in words."""
    response, reference = call.blocks["response"], call.blocks["reference"]
    stated = stated_answer(response)
    if stated is None:
        rationale = "It states no answer, or several."
    elif stated == int(reference):
        rationale = f"It states {stated}, which is right."
    else:
        rationale = f"It states {stated}, and {reference} is right."
    return {"score": grade(response, reference), "rationale": rationale}
