"""What a journal tells of the sources: how long their answers took, and how many tokens.

A plan needs what an average request takes without any waiting. So it takes `service_s`, the time of the attempt that
was answered, and not `latency_s`, which runs from handing the sample in and includes waiting, retries and other
attempts. Stragglers are left out of the mean, because a plan adds its own. Journals of schema version 1 have no service
times: they tell how many tokens requests take, and nothing of latencies.

A plan neither makes nor changes a journal. (SQLite's `mode=ro` is not used, for it leaves the files of the WAL behind.)
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev, quantiles
from urllib.parse import quote

from ..errors import JournalError
from ..journal.database import explained

LATEST = 50_000
"""Entries that are looked at, the latest ones."""
FEWEST = 20
"""Verdicts that a source must have for its numbers to be taken."""
_STRAGGLER_FROM = 5.0
"""Multiple of the median from which on an answer is a straggler."""
_STRAGGLER_SIGMAS = 3.5
"""The same in standard deviations, for sources whose times differ much anyhow."""
_QUARTILES_SIGMAS = 1.349
"""Standard deviations between the quartiles of a normal distribution."""

_SELECT = (
    "SELECT source, {service_s}, attempts, prompt_tokens, completion_tokens FROM outcomes "
    "WHERE outcome = 'scored' AND cached = 0 ORDER BY id DESC LIMIT ?"
)


@dataclass(frozen=True)
class Recorded:
    """What a journal tells of one source. `None`: too few verdicts tell it."""

    verdicts: int
    """How many `latency_s` is made from."""
    latency_s: float | None
    """Mean time of an attempt that was answered, in seconds, stragglers left out."""
    deviation: float
    """Standard deviation of the logarithm of these times, stragglers left out; 0 where `latency_s` is None."""
    completion_tokens: float | None
    """Mean of a verdict."""
    prompt_tokens: tuple[int, ...]
    timed: tuple[tuple[int, float], ...] = ()
    """Tokens of the request and seconds of the attempt, for verdicts of one attempt, stragglers left out."""


@dataclass
class _Rows:
    service_s: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    timed: list[tuple[int, float]] = field(default_factory=list)


def read_recorded(path: str, names: Collection[str]) -> dict[str, Recorded]:
    """What the journal at `path` tells of the sources `names`, those with enough verdicts.

    Empty where there is no such file yet. Raises `JournalError` for a file that cannot be read as a journal.
    """
    if not os.path.exists(path):
        return {}
    found = {name: _Rows() for name in names}
    try:
        uri = f"file:{quote(str(Path(path).absolute()))}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as connection:
            connection.execute("PRAGMA query_only = ON")
            columns = {row[1] for row in connection.execute("PRAGMA table_info(outcomes)")}
            select = _SELECT.format(service_s="service_s" if "service_s" in columns else "NULL")
            for source, service_s, attempts, prompt, completion in connection.execute(select, (LATEST,)):
                if source in found:
                    _take(found[source], service_s, attempts, prompt, completion)
    except sqlite3.Error as error:
        raise JournalError(explained(error, path)) from None
    told = {name: _recorded(rows) for name, rows in found.items()}
    return {name: one for name, one in told.items() if one.latency_s is not None or one.completion_tokens is not None}


def _take(rows: _Rows, service_s: float | None, attempts: int, prompt: int, completion: int) -> None:
    if service_s:
        rows.service_s.append(service_s)
    # The usage of several attempts stands in one sum.
    if attempts == 1:
        rows.completion_tokens.append(completion)
        if prompt:
            rows.prompt_tokens.append(prompt)
            if service_s:
                rows.timed.append((prompt, service_s))


def _recorded(rows: _Rows) -> Recorded:
    enough = len(rows.completion_tokens) >= FEWEST
    usual = _usual(rows.service_s) if len(rows.service_s) >= FEWEST else []
    return Recorded(
        verdicts=len(rows.service_s),
        latency_s=fmean(usual) if usual else None,
        deviation=pstdev(map(math.log, usual)) if usual else 0.0,
        completion_tokens=fmean(rows.completion_tokens) if enough else None,
        prompt_tokens=tuple(rows.prompt_tokens) if enough else (),
        timed=tuple(pair for pair in rows.timed if pair[1] <= max(usual, default=0.0)),
    )


def _usual(seconds: list[float]) -> list[float]:
    """All but the stragglers: five times the median, or further out where times differ much anyhow."""
    logs = [math.log(one) for one in seconds]
    first, middle, third = quantiles(logs, n=4)
    most = middle + max(math.log(_STRAGGLER_FROM), _STRAGGLER_SIGMAS * (third - first) / _QUARTILES_SIGMAS)
    return [one for one, log in zip(seconds, logs, strict=True) if log <= most]
