"""Finds the samples of a step for its table: filtered, sorted, and by pages. SQLite does the work."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..journal.database import reading

PAGE = 200
"""Rows of a page of the table."""
NO_REWARD = "any, without a reward"
"""Stands for all causes of samples without a reward."""
LAST = 8
"""Samples on the time line of a step."""
BINS = 20
"""Bars of a histogram."""

SORTS: Mapping[str, str] = {
    "reward": "reward",
    "advantage": "advantage",
    "latency": "latency_s",
    "attempts": "attempts",
    "cost": "cost_usd",
    "tokens": "tokens",
    "row": "id",
}
"""What a table may be sorted by, and its expression."""

_COLUMNS = (
    "id, sample_id, data_source, group_id, source, outcome, coalesce(score, floor) AS reward, cause, reason, "
    "coalesce(rationale, detail, '') AS said, attempts, latency_s, cost_usd, "
    "prompt_tokens + completion_tokens AS tokens, "
    "(SELECT advantage FROM trained WHERE trained.run_id = outcomes.run_id AND trained.sample_id = outcomes.sample_id "
    "AND (trained.step IS NULL OR trained.step = outcomes.step) AND outcomes.split IS NOT 'val' "
    "ORDER BY trained.recorded_at DESC LIMIT 1) AS advantage"
)


@dataclass(frozen=True)
class SampleFilter:
    """Which entries of a step are wanted. None or "": all."""

    run: str
    step: int | None
    split: str
    judge: str
    data_source: str = ""
    source: str = ""
    cause: str = ""
    """A cause, "floor", or `NO_REWARD`."""
    text: str = ""
    """Part of a sample's id, or of what was said."""
    low: float | None = None
    high: float | None = None
    """Rewards from `low` to below `high`; to `high` itself if it is the highest reward of all."""
    sort: str = "reward"
    down: bool = False

    def condition(self) -> tuple[str, list[Any]]:
        """The condition in SQL, and its values."""
        parts: list[tuple[str, Any]] = [
            ("run_id = ?", self.run),
            ("step IS ?", self.step),
            ("coalesce(split, 'train') = ?", self.split),
            ("judge = ?", self.judge),
        ]
        parts += [("data_source = ?", self.data_source)] if self.data_source else []
        parts += [("source = ?", self.source)] if self.source else []
        if self.cause == NO_REWARD:
            parts.append(("(coalesce(score, floor) IS NULL) = ?", 1))
        elif self.cause == "floor":
            parts.append(("(floor IS NOT NULL) = ?", 1))
        elif self.cause:
            parts += [("cause = ?", self.cause), ("(floor IS NULL) = ?", 1)]
        parts += [("coalesce(score, floor) >= ?", self.low)] if self.low is not None else []
        parts += [("coalesce(score, floor) < ?", self.high)] if self.high is not None else []
        values = [value for _, value in parts]
        where = " AND ".join(condition for condition, _ in parts)
        if self.text:
            where += " AND (instr(coalesce(sample_id, ''), ?) OR instr(coalesce(rationale, detail, ''), ?))"
            values += [self.text, self.text]
        return where, values


@dataclass(frozen=True)
class SampleRow:
    """A row of the table. `journal` is the number of its file."""

    journal: int
    id: int
    sample_id: str | None
    data_source: str
    group_id: str | None
    source: str
    outcome: str
    reward: float | None
    cause: str | None
    reason: str | None
    said: str
    attempts: int
    latency_s: float
    cost_usd: float
    tokens: int
    advantage: float | None


@dataclass(frozen=True)
class Bin:
    """A bar of a histogram: the rewards from `low` to below `high`, and how many."""

    low: float
    high: float
    count: int


def rows_of(paths: Sequence[str], wanted: SampleFilter, page: int) -> tuple[list[SampleRow], int]:
    """Return a page (from 0) of the table, and how many rows there are. Raises `JournalError`."""
    where, values = wanted.condition()
    order = SORTS.get(wanted.sort, "reward")
    direction = "DESC" if wanted.down else "ASC"
    last = (page + 1) * PAGE
    query = (
        f"SELECT {_COLUMNS} FROM outcomes WHERE {where} ORDER BY {order} IS NOT NULL, {order} {direction}, id LIMIT ?"
    )
    parts: list[list[SampleRow]] = []
    count = 0
    for number, path in enumerate(paths):
        with reading(path) as connection:
            count += connection.execute(f"SELECT count(*) FROM outcomes WHERE {where}", values).fetchone()[0]
            parts.append([SampleRow(number, *row) for row in connection.execute(query, [*values, last])])

    def key(row: SampleRow) -> tuple[bool, float]:
        value: float | None = getattr(row, order)
        return value is not None, (-value if wanted.down else value) if value is not None else 0.0

    return list(heapq.merge(*parts, key=key))[page * PAGE : last], count


def histogram(paths: Sequence[str], wanted: SampleFilter) -> list[Bin]:
    """Return the bars of the rewards of a step, whichever is chosen; empty without rewards. Raises `JournalError`."""
    where, values = replace(wanted, low=None, high=None).condition()
    rewards = [reward for path in paths for reward in _rewards(path, where, values)]
    if not rewards:
        return []
    low, high = min(rewards), max(rewards)
    if low == high:
        return [Bin(low, math.nextafter(high, math.inf), len(rewards))]
    width = (high - low) / BINS
    counts = [0] * BINS
    for reward in rewards:
        counts[min(BINS - 1, int((reward - low) / width))] += 1
    edges = [low + number * width for number in range(BINS)] + [math.nextafter(high, math.inf)]
    return [Bin(edges[number], edges[number + 1], count) for number, count in enumerate(counts)]


@dataclass(frozen=True)
class SampleWait:
    """A sample on the time line of its step: when it was submitted and when it had its outcome, in seconds since the
    step's first submission. `attempts` are those of `entries.COLUMNS`, in seconds since the submission.
    """

    journal: int
    id: int
    name: str
    began_s: float
    ended_s: float
    attempts: Sequence[Mapping[str, Any]]


def waits(paths: Sequence[str], wanted: SampleFilter) -> list[SampleWait]:
    """Return the samples that ended last, of those that took time; the last one first. Raises `JournalError`."""
    where, values = wanted.condition()
    where += " AND NOT cached AND latency_s > 0"
    rows: list[tuple[Any, ...]] = []
    began = math.inf
    for number, path in enumerate(paths):
        with reading(path) as connection:
            query = f"SELECT min(recorded_at - latency_s) FROM outcomes WHERE {where}"
            first = connection.execute(query, values).fetchone()[0]
            began = min(began, first if first is not None else began)
            columns = "id, coalesce(sample_id, ''), recorded_at, latency_s, history"
            query = f"SELECT {columns} FROM outcomes WHERE {where} ORDER BY recorded_at DESC LIMIT {LAST}"
            rows += ((number, *row) for row in connection.execute(query, values))
    return [
        SampleWait(number, row, name, at - took - began, at - began, json.loads(history or "[]"))
        for number, row, name, at, took, history in sorted(rows, key=lambda row: -row[3])[:LAST]
    ]


def choices(paths: Sequence[str], wanted: SampleFilter, column: str) -> list[str]:
    """Return what a column (`data_source`, `source`) holds in a step. Raises `JournalError`."""
    bare = SampleFilter(wanted.run, wanted.step, wanted.split, wanted.judge)
    where, values = bare.condition()
    found: set[str] = set()
    for path in paths:
        with reading(path) as connection:
            found |= {
                row[0] for row in connection.execute(f"SELECT DISTINCT {column} FROM outcomes WHERE {where}", values)
            }
    return sorted(found - {""})


def _rewards(path: str, where: str, values: Sequence[Any]) -> Iterator[float]:
    with reading(path) as connection:
        query = f"SELECT coalesce(score, floor) FROM outcomes WHERE {where} AND coalesce(score, floor) IS NOT NULL"
        for (reward,) in connection.execute(query, values):
            yield reward
