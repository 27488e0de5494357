"""What a journal tells people: its steps, its sources, and single verdicts. It is read, never changed.

A row of the journal is the outcome of one judge for one sample. A judge that asks others has one beside those of its
parts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median

from ..journal.database import reading
from ..samples import SCREENED

LATEST = 200_000
"""Only this many rows are read, the latest ones."""
_SEED = 0


@dataclass(frozen=True)
class Row:
    """The outcome of one judge for one sample. Its fields are columns of the journal."""

    id: int
    run_id: str
    sample_id: str | None
    step: int | None
    split: str | None
    judge: str
    source: str
    score: float | None
    outcome: str
    floor: float | None
    cause: str | None
    reason: str | None
    detail: str | None
    rationale: str | None
    attempts: int
    latency_s: float
    service_s: float | None
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    cached: int

    @property
    def reward(self) -> float | None:
        """The score, or the floor that stands for it."""
        return self.score if self.outcome == "scored" else self.floor

    @property
    def failed(self) -> bool:
        """Whether it has no reward, and no monitor took it out."""
        return self.reward is None and f"{self.cause}/{self.reason}" != SCREENED

    @property
    def waited_s(self) -> float | None:
        """Seconds before its last attempt: in the queue, for a limit, or in attempts that failed. None if unknown."""
        return None if self.service_s is None else max(0.0, self.latency_s - self.service_s)

    @property
    def label(self) -> str:
        """The step and, unless it is of the training, the split: "12", "12 val", "-"."""
        step = "-" if self.step is None else str(self.step)
        return step if self.split in (None, "", "train") else f"{step} {self.split}"


@dataclass(frozen=True)
class StepReport:
    """The rows of one judge in one step of one run. `score` is their mean, None if all failed; `slowest` is who ended
    last. A resumed run repeats the step in which the earlier one ended, and each has its own report of it.
    """

    run_id: str
    label: str
    judge: str
    rows: int
    failed: int
    score: float | None
    median_s: float
    slowest: Row


@dataclass(frozen=True)
class SourceReport:
    """The rows that one source answered. Times are of the answered attempts alone, None if unknown."""

    source: str
    rows: int
    cached: int
    retries: int
    median_s: float | None
    slowest_s: float | None
    tokens: int
    cost_usd: float


def read_rows(path: str, step: int | None = None) -> list[Row]:
    """Read the latest rows of the journal at `path`, of one step if `step` is given, in the order of writing.

    Raises `JournalError` if it cannot be read.
    """
    if step is not None and not -(2**63) <= step < 2**63:
        return []  # SQLite has no such integers
    with reading(path) as connection:
        names = ", ".join(field.name for field in fields(Row))
        where, values = ("WHERE step = ?", [step]) if step is not None else ("", [])
        select = f"SELECT {names} FROM outcomes {where} ORDER BY id DESC LIMIT {LATEST}"
        return [Row(*row) for row in connection.execute(select, values)][::-1]


def steps_of(rows: Sequence[Row]) -> list[StepReport]:
    """Sum up rows by run, step and judge: the runs in the order in which they began, and each by its steps."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.run_id, row.label, row.judge), []).append(row)
    reports = []
    for (run_id, label, judge), found in groups.items():
        scores = [row.reward for row in found if row.reward is not None]
        reports.append(
            StepReport(
                run_id=run_id,
                label=label,
                judge=judge,
                rows=len(found),
                failed=len([row for row in found if row.failed]),
                score=fmean(scores) if scores else None,
                median_s=median(row.latency_s for row in found),
                slowest=max(found, key=lambda row: row.latency_s),
            )
        )
    runs = list(dict.fromkeys(row.run_id for row in rows))
    # Rows of several files and of steps that overlap are mixed.
    return sorted(reports, key=lambda each: (runs.index(each.run_id), each.slowest.step or 0))


def sources_of(rows: Sequence[Row]) -> Iterator[SourceReport]:
    """Sum up rows by the source that answered, the busiest first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.source:
            groups.setdefault(row.source, []).append(row)
    for source, found in sorted(groups.items(), key=lambda item: -len(item[1])):
        times = [row.service_s for row in found if row.service_s and not row.cached]
        yield SourceReport(
            source=source,
            rows=len(found),
            cached=sum(bool(row.cached) for row in found),
            retries=sum(max(0, row.attempts - 1) for row in found),
            median_s=median(times) if times else None,
            slowest_s=max(times, default=None),
            tokens=sum(row.prompt_tokens + row.completion_tokens for row in found),
            cost_usd=sum(row.cost_usd for row in found),
        )


def drawn(rows: Sequence[Row], count: int) -> list[Row]:
    """Draw rows over the whole journal, the same at every call, in the order of writing."""
    picked = random.Random(_SEED).sample(range(len(rows)), min(count, len(rows)))
    return [rows[number] for number in sorted(picked)]


def slowest(rows: Sequence[Row], count: int) -> list[Row]:
    """The rows that took longest, the slowest first."""
    return sorted(rows, key=lambda row: -row.latency_s)[:count]
