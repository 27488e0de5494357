"""What would help most: the variations that were rehearsed, against the same seeds as they are now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from .rehearsal import Run
from .variations import ChangeKind, Variation

MATTERS = 0.04
"""Part of the step, or of its cost, from which on a change matters."""


@dataclass(frozen=True)
class Advice:
    """A change, and what a step takes and costs with it, in the mean over the same seeds. Dollars; None: no prices."""

    kind: ChangeKind
    change: str
    step_s: float
    now_s: float
    cost_usd: float | None
    now_usd: float | None

    @property
    def saved_s(self) -> float:
        return self.now_s - self.step_s

    @property
    def saved_usd(self) -> float:
        return (self.now_usd or 0.0) - (self.cost_usd or 0.0)


def advice_of(
    tried: Sequence[tuple[Variation, Sequence[Run]]], now: Sequence[Run], *, priced: bool
) -> tuple[Advice, ...]:
    """The changes that matter, those that save most seconds first.

    A change is good for seconds, or leaves the time as it is and saves money.
    """
    by_seed = {run.seed: run for run in now}
    found = []
    for variation, runs in tried:
        # What fails to score more samples than now is no improvement, however quick it is.
        if not runs or sum(run.scored for run in runs) < sum(by_seed[run.seed].scored for run in runs):
            continue
        before = [by_seed[run.seed] for run in runs]
        found.append(
            Advice(
                kind=variation.kind,
                change=variation.change,
                step_s=fmean(run.makespan_s for run in runs),
                now_s=fmean(run.makespan_s for run in before),
                cost_usd=fmean(run.cost_usd for run in runs) if priced else None,
                now_usd=fmean(run.cost_usd for run in before) if priced else None,
            )
        )
    return tuple(sorted(filter(_matters, found), key=lambda advice: -advice.saved_s))


def _matters(advice: Advice) -> bool:
    if advice.saved_s >= max(MATTERS * advice.now_s, 0.05):
        return True
    no_slower = advice.saved_s >= -MATTERS / 2 * advice.now_s
    return no_slower and advice.saved_usd > MATTERS * (advice.now_usd or 0.0) > 0
