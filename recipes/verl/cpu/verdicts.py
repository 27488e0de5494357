"""Compares the verdicts of the language model with those of the rule, from the journal of a run."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

_PAIRS = """
SELECT llm.score, rule.score, llm.service_s FROM outcomes AS llm JOIN outcomes AS rule
ON llm.sample_id = rule.sample_id AND llm.judge = 'language_model' AND rule.judge = 'rule'
WHERE llm.score IS NOT NULL AND rule.score IS NOT NULL AND llm.cached = 0 AND rule.cached = 0
"""


SAYS_RIGHT = 0.54
"""Least score with which the language model calls a response right. On 240 made-up pairs of numbers, those that are
equal got 0.53 to 0.81, and others 0.28 to 0.61."""


@dataclass(frozen=True)
class Agreement:
    """How often the language model and the rule agree.

    `same` is the share of samples that both call right or both call wrong. `right` and `wrong` are the mean scores of
    the language model for responses that are right, and wrong, by the rule; None without one. `call_s` is the median
    time of a call to it in seconds.
    """

    samples: int
    same: float
    right: float | None
    wrong: float | None
    call_s: float | None

    @property
    def text(self) -> str:
        """One line for people."""
        if not self.samples:
            return "No sample was scored by both the language model and the rule."
        means = [f"{self.right:.2f} for right answers"] if self.right is not None else []
        means += [f"{self.wrong:.2f} for wrong ones"] if self.wrong is not None else []
        seconds = "" if self.call_s is None else f"; {self.call_s:.2f} s a call (median)"
        return (
            f"The language model agreed with the rule on {self.same:.0%} of {self.samples} samples; its mean score: "
            f"{', '.join(means)}{seconds}."
        )


def agreement(journal: Path) -> Agreement:
    """Compare the verdicts in a journal."""
    connection = sqlite3.connect(journal)
    try:
        pairs = connection.execute(_PAIRS).fetchall()
    finally:
        connection.close()
    right = [llm for llm, rule, _ in pairs if rule >= 1.0]
    wrong = [llm for llm, rule, _ in pairs if rule < 1.0]
    same = sum((llm >= SAYS_RIGHT) == (rule >= 1.0) for llm, rule, _ in pairs)
    times = sorted(seconds for _, _, seconds in pairs if seconds is not None and seconds > 0)
    return Agreement(
        len(pairs),
        same / len(pairs) if pairs else 0.0,
        sum(right) / len(right) if right else None,
        sum(wrong) / len(wrong) if wrong else None,
        times[len(times) // 2] if times else None,
    )
