"""The result of a run, and means over runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CAP_S = 3000.0
"""A run that is not done by then counts as this, in virtual seconds."""


@dataclass(frozen=True)
class Run:
    """The result of one run. Times are virtual seconds."""

    policy: str
    scenario: str
    samples: int
    seed: int
    makespan_s: float
    bound_s: float
    given_up: int
    """Samples that the policy gave up at least once; they were submitted again."""
    unscored: int
    """Samples without a score when the run was stopped."""
    calls: int
    """Requests that the servers saw."""
    violations: int
    """Requests that the servers refused because of a limit that the user knew."""
    surprises: int
    """Requests that the servers refused because of a limit that the user did not know."""

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def mean(values: Iterable[float]) -> float:
    """The mean; not a number where there are none."""
    numbers = list(values)
    return statistics.fmean(numbers) if numbers else float("nan")


def ratio_to(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """Their makespan over ours: the mean over scenarios of the ratio of mean makespans."""
    names = {run.scenario for run in ours} & {run.scenario for run in theirs}
    return mean(
        mean(run.makespan_s for run in theirs if run.scenario == name)
        / mean(run.makespan_s for run in ours if run.scenario == name)
        for name in sorted(names)
    )


__all__ = ["CAP_S", "Run", "mean", "ratio_to"]
