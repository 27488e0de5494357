"""What a journal tells people: its steps, its sources, and single verdicts. It is read, never changed.

A row of the journal is the outcome of one judge for one sample; a sum has a row for each of its parts.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ..errors import JournalError
from ..journal.database import reading
from ..journal.entries import COLUMNS

LATEST = 200_000
"""Only this many rows are read, the latest ones."""
_SEED = 0

_FIELDS = (
    *("step", "split", "judge", "source", "score", "outcome", "detail", "rationale", "attempts", "latency_s"),
    *("service_s", "prompt_tokens", "completion_tokens", "cost_usd", "cached", "sample_id", "key", "process_id"),
    "run_id",
)
_KINDS = {name: kind.removesuffix(" NOT NULL") for name, kind in COLUMNS}


@dataclass(frozen=True)
class Row:
    """The outcome of one judge for one sample."""

    step: int | None
    split: str | None
    judge: str
    source: str
    score: float | None
    outcome: str
    detail: str | None
    rationale: str | None
    attempts: int
    latency_s: float
    service_s: float | None
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    cached: int
    sample_id: str | None
    key: str | None
    process_id: int
    run_id: str | None

    @property
    def failed(self) -> bool:
        return self.outcome != "scored"

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
    last.
    """

    run_id: str | None
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

    Raises `JournalError` if there is no such journal, or if it cannot be read.
    """
    if step is not None and not -(2**63) <= step < 2**63:
        return []  # SQLite has no such integers
    if not os.path.isfile(path):
        raise JournalError(f"there is no journal at {path}; engine.journal.path names the one of a configuration")
    with reading(path) as connection:
        # SQLite keeps a value of any type in a column, and other programs may have written to this one.
        wanted = ", ".join(f"CAST({name} AS {_KINDS[name]})" for name in _FIELDS)
        where, values = ("WHERE step = ?", [step]) if step is not None else ("", [])
        select = f"SELECT {wanted} FROM outcomes {where} ORDER BY id DESC LIMIT {LATEST}"
        return [Row(*row) for row in connection.execute(select, values)][::-1]


def steps_of(rows: Sequence[Row]) -> list[StepReport]:
    """Sum up rows by run, step and judge, in the order in which they began.

    A resumed run repeats the step in which the earlier one ended. Each of them has its own report of it.
    """
    groups: dict[tuple[str | None, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.run_id, row.label, row.judge), []).append(row)
    return [
        _step(run_id, label, judge, _once(found) if run_id is None else found)
        for (run_id, label, judge), found in groups.items()
    ]


def _once(rows: Sequence[Row]) -> list[Row]:
    """Leave out the rows of samples that another process has judged, too, in the same step. For rows without a run.

    Frameworks may give a sample another id after a resume; its question, the key, stays the same. Within a process,
    equal answers of siblings are samples of their own: so the rows of the process with most of them are kept.
    """
    repeated = {row.key for row in rows if row.cached and row.key is not None}
    counts: dict[str, dict[int, int]] = {}
    for row in rows:
        if row.key is not None and row.key in repeated:
            by_process = counts.setdefault(row.key, {})
            by_process[row.process_id] = by_process.get(row.process_id, 0) + 1
    kept = {key: max(by_process, key=by_process.__getitem__) for key, by_process in counts.items()}
    return [row for row in rows if row.key not in kept or kept[row.key] == row.process_id]


def _step(run_id: str | None, label: str, judge: str, rows: Sequence[Row]) -> StepReport:
    scores = [row.score for row in rows if not row.failed and row.score is not None]
    return StepReport(
        run_id=run_id,
        label=label,
        judge=judge,
        rows=len(rows),
        failed=sum(row.failed for row in rows),
        score=fmean(scores) if scores else None,
        median_s=median(row.latency_s for row in rows),
        slowest=max(rows, key=lambda row: row.latency_s),
    )


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
