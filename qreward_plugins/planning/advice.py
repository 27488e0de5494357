"""Ranks the rehearsed changes: it compares each with the same seeds without the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from .rehearsal import Run
from .variations import ChangeKind, Variation

MATTERS = 0.04
"""The smallest saving that matters, as a share of the step's duration or cost."""


@dataclass(frozen=True)
class Advice:
    """A change, and the duration and cost of a step with it. Costs are US dollars; None without prices.

    `now_s` and `now_usd` are the values without the change. A change is tried over some of the plan's seeds; the ratio
    to the same seeds without it is applied to these values.
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
    """Return the changes that matter for a step of `step_s` seconds and `cost_usd` dollars, largest saving first.

    A change matters if it saves time, or if it saves money without costing time.
    """
    by_seed = {run.seed: run for run in now}
    found = []
    for variation, runs in tried:
        # A change with which fewer samples are scored is not an improvement, even if it is faster.
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
    """Scale `now` by the ratio of the means `after` and `before`."""
    return now * fmean(after) / fmean(before) if fmean(before) else fmean(after)


def _matters(advice: Advice) -> bool:
    if advice.saved_s >= max(MATTERS * advice.now_s, 0.05):
        return True
    no_slower = advice.saved_s >= -MATTERS / 2 * advice.now_s
    return no_slower and advice.saved_usd > MATTERS * (advice.now_usd or 0.0) > 0
