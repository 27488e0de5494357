"""Adds up the entries of journals by run, judge, data source and step, as they come.

A run may have a million entries, and a page must not wait for their sums. So each entry is read once, and what pages
show of a step is computed when the step has changed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from ..journal.database import reading
from ..observers.batch_report import percentile

_AT_ONCE = 50_000
"""Entries that are read at once."""

_SELECT = (
    "SELECT id, run_id, recorded_at, step, coalesce(split, 'train'), judge, data_source, source, outcome, "
    "coalesce(score, floor), cause, floor IS NOT NULL, group_id, latency_s, cost_usd, weight_version "
    "FROM outcomes WHERE id > ? ORDER BY id LIMIT ?"
)


class Place(NamedTuple):
    """What entries are added up by. `step` is None for samples without one."""

    run: str
    split: str
    judge: str
    data_source: str
    step: int | None


@dataclass(slots=True)
class _Sums:
    samples: int = 0
    floors: int = 0
    cost_usd: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    rewards: array[float] = field(default_factory=lambda: array("d"))
    latencies: array[float] = field(default_factory=lambda: array("d"))
    groups: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Of each group with a reward: the lowest, the highest, and how many."""
    weights: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class StepSummary:
    """What a page shows of a step. Quantiles and shares are None where nothing has them."""

    step: int | None
    samples: int
    failed: int
    causes: dict[str, int]
    """Failed samples by cause."""
    floors: int
    mean: float | None
    p10: float | None
    p50: float | None
    p90: float | None
    flat_rate: float | None
    latency_p50_s: float
    latency_p95_s: float
    cost_usd: float
    weights: frozenset[str]
    """The versions of the judges' weights that answered."""


class Totals:
    """The sums of the journals at `paths`. Call `refresh` before reading; one thread at a time."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.entries = 0
        """How many entries there are."""
        self._paths = list(paths)
        self._read_up_to = dict.fromkeys(paths, 0)
        self._sums: dict[Place, _Sums] = {}
        self._runs: dict[str, float] = {}
        self._wholes: set[tuple[str, str]] = set()
        """Runs and judges that sum up what other judges said."""
        self._known: dict[tuple[Place, ...], tuple[int, StepSummary]] = {}

    def refresh(self) -> bool:
        """Read the entries that have come since the last call; return whether there are any. Raises `JournalError`."""
        before = self.entries
        for path in self._paths:
            with reading(path) as connection:
                while rows := connection.execute(_SELECT, (self._read_up_to[path], _AT_ONCE)).fetchall():
                    for row in rows:
                        self._add(row[1:])
                    self._read_up_to[path] = rows[-1][0]
                    self.entries += len(rows)
        return self.entries > before

    def runs(self) -> list[str]:
        """The runs, the latest first."""
        return sorted(self._runs, key=lambda run: -self._runs[run])

    def splits(self, run: str) -> list[str]:
        return sorted({place.split for place in self._sums if place.run == run})

    def judges(self, run: str) -> list[str]:
        """The judges of a run: those that sum up others first, then by their names."""
        judges = {place.judge for place in self._sums if place.run == run}
        return sorted(judges, key=lambda judge: ((run, judge) not in self._wholes, judge))

    def data_sources(self, run: str) -> list[str]:
        return sorted({place.data_source for place in self._sums if place.run == run})

    def trend(self, run: str, split: str, judge: str, data_source: str | None = None) -> list[StepSummary]:
        """Each step of a run, in order; `data_source` None: of all."""
        by_step: dict[int | None, list[Place]] = {}
        for place in self._sums:
            if place[:3] == (run, split, judge) and data_source in (None, place.data_source):
                by_step.setdefault(place.step, []).append(place)
        steps = sorted(by_step, key=lambda step: (step is not None, step or 0))
        return [self._summary(step, tuple(by_step[step])) for step in steps]

    def _summary(self, step: int | None, places: tuple[Place, ...]) -> StepSummary:
        parts = [self._sums[place] for place in places]
        count, (known_count, summary) = sum(part.samples for part in parts), self._known.get(places, (0, None))
        if summary is None or count != known_count:
            summary = _summed(step, parts)
            self._known[places] = count, summary
        return summary

    def _add(self, row: tuple[Any, ...]) -> None:
        run, at, step, split, judge, data_source, source, outcome = row[:8]
        reward, cause, floor, group, took_s, cost, weights = row[8:]
        self._runs[run] = max(at, self._runs.get(run, at))
        if outcome == "scored" and not source:
            self._wholes.add((run, judge))
        sums = self._sums.setdefault(Place(run, split, judge, data_source, step), _Sums())
        sums.samples += 1
        sums.floors += floor
        sums.cost_usd += cost
        if weights:
            sums.weights.update(weights.split("+"))
        sums.latencies.append(took_s)
        if reward is None:
            sums.causes[cause or "infra"] += 1
            return
        sums.rewards.append(reward)
        if group is not None:
            low, high, count = sums.groups.get(group, (reward, reward, 0))
            sums.groups[group] = (min(low, reward), max(high, reward), count + 1)


def _summed(step: int | None, parts: Sequence[_Sums]) -> StepSummary:
    rewards = sorted(reward for part in parts for reward in part.rewards)
    latencies = sorted(latency for part in parts for latency in part.latencies)
    causes = sum((part.causes for part in parts), Counter[str]())
    flat = [low == high for part in parts for low, high, count in part.groups.values() if count > 1]
    p10, p50, p90 = (percentile(rewards, share) if rewards else None for share in (0.1, 0.5, 0.9))
    return StepSummary(
        step,
        sum(part.samples for part in parts),
        causes.total(),
        dict(causes),
        sum(part.floors for part in parts),
        fmean(rewards) if rewards else None,
        p10,
        p50,
        p90,
        fmean(flat) if flat else None,
        percentile(latencies, 0.5),
        percentile(latencies, 0.95),
        sum(part.cost_usd for part in parts),
        frozenset().union(*(part.weights for part in parts)),
    )
