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
    """A change, and what a step takes and costs with it. Dollars; None: no prices.

    `now_s` and `now_usd` are what the plan says of the step as it is. A change is tried over some of the plan's seeds,
    and the ratio to the same seeds without it is applied to these numbers.
    """

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
    tried: Sequence[tuple[Variation, Sequence[Run]]], now: Sequence[Run], *, step_s: float, cost_usd: float | None
) -> tuple[Advice, ...]:
    """The changes that matter to a step that takes `step_s` and costs `cost_usd`, those that save most seconds first.

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
                step_s=_changed(step_s, [run.makespan_s for run in runs], [run.makespan_s for run in before]),
                now_s=step_s,
                cost_usd=None
                if cost_usd is None
                else _changed(cost_usd, [run.cost_usd for run in runs], [run.cost_usd for run in before]),
                now_usd=cost_usd,
            )
        )
    return tuple(sorted(filter(_matters, found), key=lambda advice: -advice.saved_s))


def _changed(now: float, after: Sequence[float], before: Sequence[float]) -> float:
    """`now`, changed by as much as the same seeds changed."""
    return now * fmean(after) / fmean(before) if fmean(before) else fmean(after)


def _matters(advice: Advice) -> bool:
    if advice.saved_s >= max(MATTERS * advice.now_s, 0.05):
        return True
    no_slower = advice.saved_s >= -MATTERS / 2 * advice.now_s
    return no_slower and advice.saved_usd > MATTERS * (advice.now_usd or 0.0) > 0
