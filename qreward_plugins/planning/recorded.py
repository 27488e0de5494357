"""What a journal tells of the sources: how long their verdicts took, and how many tokens.

An entry holds the time from handing a sample in to its outcome, waiting included, and a plan needs the time without the
waiting. Entries of one batch were handed in together, so the first verdicts of a source are those of the requests that
it was sent at once. The middle one of these first requests is the (half)th verdict to come; later verdicts have waited.
A batch that is no larger than what its sources take at once waited for nothing, and its median says it all.

A plan neither makes nor changes a journal. (SQLite's `mode=ro` is not used, for it leaves the files of the WAL behind.)
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import quote

from ..errors import JournalError
from ..journal.database import explained
from ..quotas import UNDECLARED_CONCURRENCY

LATEST = 50_000
"""Entries that are looked at, the latest ones."""
FEWEST = 20
"""Verdicts that a source must have for its numbers to be taken."""
_TOGETHER_S = 0.25

_SELECT = (
    "SELECT source, recorded_at, latency_s, prompt_tokens, completion_tokens FROM outcomes "
    "WHERE outcome = 'scored' AND cached = 0 AND attempts = 1 ORDER BY id DESC LIMIT ?"
)


@dataclass(frozen=True)
class Recorded:
    """What a journal tells of one source."""

    verdicts: int
    latency_s: float
    """Median of the requests that had not to wait."""
    completion_tokens: float
    prompt_tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    submitted_s: float
    latency_s: float
    prompt_tokens: int
    completion_tokens: int


def read_recorded(path: str, places: Mapping[str, int | None]) -> dict[str, Recorded]:
    """What the journal at `path` tells of the sources named in `places`, those with enough verdicts.

    `places` are the requests that a source works on at once; None: not declared. Empty where there is no such file yet.
    Raises `JournalError` for a file that cannot be read as a journal.
    """
    if not os.path.exists(path):
        return {}
    by_source: dict[str, list[_Entry]] = {name: [] for name in places}
    try:
        uri = f"file:{quote(str(Path(path).absolute()))}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as connection:
            connection.execute("PRAGMA query_only = ON")
            for source, recorded_at, latency_s, prompt, completion in connection.execute(_SELECT, (LATEST,)):
                if source in by_source:
                    by_source[source].append(_Entry(recorded_at - latency_s, latency_s, prompt, completion))
    except sqlite3.Error as error:
        raise JournalError(explained(error, path)) from None
    return {
        name: _recorded(entries, places[name] or UNDECLARED_CONCURRENCY)
        for name, entries in by_source.items()
        if len(entries) >= FEWEST
    }


def _recorded(entries: list[_Entry], places: int) -> Recorded:
    middles: list[tuple[float, int]] = []
    for batch in _batches(entries):
        latencies = sorted(entry.latency_s for entry in batch)
        at_once = min(places, len(latencies))
        middles.append((latencies[(at_once - 1) // 2], at_once))
    return Recorded(
        verdicts=len(entries),
        latency_s=_weighted_median(middles),
        completion_tokens=sum(entry.completion_tokens for entry in entries) / len(entries),
        prompt_tokens=tuple(entry.prompt_tokens for entry in entries if entry.prompt_tokens),
    )


def _batches(entries: Iterable[_Entry]) -> Iterable[list[_Entry]]:
    batch: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.submitted_s):
        if batch and entry.submitted_s - batch[-1].submitted_s > _TOGETHER_S:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _weighted_median(values: list[tuple[float, int]]) -> float:
    return median(value for value, weight in values for _ in range(weight))
