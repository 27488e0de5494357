"""Finds the samples of a step for its table: filtered, sorted, and by pages. SQLite does the work."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..journal.database import rows_of

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
"""What a table may be sorted by, and its column."""

_REWARD = "coalesce(score, floor)"
_ADVANTAGE = (
    "(SELECT advantage FROM trained WHERE trained.run_id = outcomes.run_id AND trained.sample_id = outcomes.sample_id "
    "AND (trained.step IS NULL OR trained.step = outcomes.step) AND outcomes.split IS NOT 'val' "
    "ORDER BY trained.recorded_at DESC LIMIT 1)"
)
_PLAIN = ("id", "sample_id", "data_source", "source", "cause", "reason", "attempts", "latency_s", "cost_usd")
_COLUMNS = {name: name for name in _PLAIN} | {
    "reward": _REWARD,
    "said": "coalesce(rationale, detail, '')",
    "tokens": "prompt_tokens + completion_tokens",
    "advantage": _ADVANTAGE,
}
"""The columns of the table, and their expressions."""


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
            parts.append((f"({_REWARD} IS NULL) = ?", 1))
        elif self.cause == "floor":
            parts.append(("(floor IS NOT NULL) = ?", 1))
        elif self.cause:
            parts += [("cause = ?", self.cause), ("(floor IS NULL) = ?", 1)]
        parts += [(f"{_REWARD} >= ?", self.low)] if self.low is not None else []
        parts += [(f"{_REWARD} < ?", self.high)] if self.high is not None else []
        values = [value for _, value in parts]
        where = " AND ".join(condition for condition, _ in parts)
        if self.text:
            where += " AND (instr(coalesce(sample_id, ''), ?) OR instr(coalesce(rationale, detail, ''), ?))"
            values += [self.text, self.text]
        return where, values


@dataclass(frozen=True)
class Bin:
    """A bar of a histogram: the rewards from `low` to below `high`, and how many."""

    low: float
    high: float
    count: int


def page_of(paths: Sequence[str], wanted: SampleFilter, page: int) -> tuple[list[Mapping[str, Any]], int]:
    """Return a page (from 0) of the table, and how many rows there are. A row has the values of `_COLUMNS`, and the
    number of its `journal`. Raises `JournalError`.
    """
    where, values = wanted.condition()
    order = SORTS.get(wanted.sort, "reward")
    columns = ", ".join(f"{expression} AS {name}" for name, expression in _COLUMNS.items())
    by = f"{order} IS NOT NULL, {order} {'DESC' if wanted.down else 'ASC'}, id"
    last = (page + 1) * PAGE
    query = f"SELECT {columns} FROM outcomes WHERE {where} ORDER BY {by} LIMIT {last}"
    rows: list[Mapping[str, Any]] = [
        dict(zip(("journal", *_COLUMNS), row, strict=True)) for row in rows_of(paths, query, values)
    ]

    def key(row: Mapping[str, Any]) -> tuple[bool, float]:
        value = row[order]
        return value is not None, (-value if wanted.down else value) if value is not None else 0.0

    # Those of each journal are sorted, and the order of equal ones stays.
    count: int = sum(count for _, count in rows_of(paths, f"SELECT count(*) FROM outcomes WHERE {where}", values))
    return sorted(rows, key=key)[page * PAGE : last], count


def histogram(paths: Sequence[str], wanted: SampleFilter) -> list[Bin]:
    """Return the bars of the rewards of a step, whichever is chosen; empty without rewards. Raises `JournalError`."""
    where, values = replace(wanted, low=None, high=None).condition()
    query = f"SELECT {_REWARD} FROM outcomes WHERE {where} AND {_REWARD} IS NOT NULL"
    rewards = [reward for _, reward in rows_of(paths, query, values)]
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
    query = f"SELECT min(recorded_at - latency_s) FROM outcomes WHERE {where}"
    began = min((first for _, first in rows_of(paths, query, values) if first is not None), default=0.0)
    columns = "id, coalesce(sample_id, ''), recorded_at, latency_s, history"
    query = f"SELECT {columns} FROM outcomes WHERE {where} ORDER BY recorded_at DESC LIMIT {LAST}"
    rows = sorted(rows_of(paths, query, values), key=lambda row: -row[3])
    return [
        SampleWait(number, row, name, at - took - began, at - began, json.loads(history or "[]"))
        for number, row, name, at, took, history in rows[:LAST]
    ]


def sources_of(paths: Sequence[str], wanted: SampleFilter) -> list[str]:
    """Return the sources that have answered in a step. Raises `JournalError`."""
    where, values = SampleFilter(wanted.run, wanted.step, wanted.split, wanted.judge).condition()
    query = f"SELECT DISTINCT source FROM outcomes WHERE {where} AND source != ''"
    return sorted({source for _, source in rows_of(paths, query, values)})
