"""Reads how the sources of a run are that goes on, and holds them: what `engine.held_sources` writes and reads.

Each engine of the run, mostly one in each process, has a row for each of its sources. A row that is not written again
says that its process has ended, or hangs.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ..config.names import configured_name
from ..errors import InputError, JournalError
from .database import explained, open_database, rows_of

STALE_S = 10.0
"""Seconds after which a process that has written nothing is not under way any more."""
_WORST = ("unusable", "down", "held", "paused", "degraded", "up")
"""States, the one that a reader should see first."""
_SUMMED = ("in_flight", "waiting", "requests", "answered", "throttled", "transient", "permanent", "invalid", "cost_usd")


@dataclass(frozen=True)
class LiveSource:
    """A source of a run that is under way, over its processes. Counts and limits are sums; times are the longest of the
    processes, in seconds, NaN before the first. Limits are infinity where there are none.
    """

    run_id: str
    name: str
    processes: int
    """A process with several engines counts for each."""
    state: str
    """The worst of the processes, as in `SourceGauges.state`."""
    held: bool
    """Whether it is held from outside: the processes follow within two seconds."""
    by_program: bool
    """Whether a process holds it by `RewardEngine.hold`, which only that process ends."""
    problem: str
    learned: str
    """A limit that a process has learned from 429s; "" if there is none."""
    in_flight: int
    waiting: int
    """Requests that wait for it; a call that several sources may take counts for each."""
    requests: int
    answered: int
    throttled: int
    transient: int
    permanent: int
    invalid: int
    cost_usd: float
    concurrency: float
    requests_per_minute: float
    latency_p50_s: float
    latency_p95_s: float


def live_sources(paths: Sequence[str], now: float) -> list[LiveSource]:
    """Return the sources of the runs that are under way, by run and name. `now`: seconds since 1970.

    Raises `JournalError`.
    """
    held = {tuple(place) for _, *place in rows_of(paths, "SELECT run_id, source FROM holds")}
    states: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    query = "SELECT run_id, source, state FROM live WHERE recorded_at >= ? ORDER BY 1, 2"
    for _, run_id, source, state in rows_of(paths, query, (now - STALE_S,)):
        states.setdefault((run_id, source), []).append(json.loads(state))
    return [_together(run_id, name, rows, (run_id, name) in held) for (run_id, name), rows in sorted(states.items())]


def hold_source(paths: Sequence[str], source: str, now: float, *, held: bool) -> None:
    """Hold a source in the runs that are under way, or release it. The runs follow within two seconds.

    Raises `JournalError`, and `InputError` if no run is under way, or none has this source.
    """
    live = live_sources(paths, now)
    names = sorted({each.name for each in live})
    if not names:
        raise InputError(f"no run is under way that writes to {' or '.join(paths)}, so there is nothing to hold")
    meant = [each for each in live if source in (each.name, configured_name(each.name))]
    if not meant:
        raise InputError(f"the run has no source {source!r}; sources: {', '.join(names)}")
    if not held and any(each.by_program for each in meant):
        raise InputError(f"the program itself holds {source!r} (RewardEngine.hold), so it has to release it")
    runs = [(each.run_id, each.name) for each in meant]
    change = (
        "INSERT OR IGNORE INTO holds VALUES (?, ?)" if held else "DELETE FROM holds WHERE (run_id, source) = (?, ?)"
    )
    for path in paths:
        try:
            with closing(open_database(path)) as connection:
                connection.executemany(change, runs)
        except sqlite3.Error as error:
            raise JournalError(explained(error, path)) from None


def _together(run_id: str, name: str, rows: Sequence[Mapping[str, Any]], held: bool) -> LiveSource:
    worst = min(rows, key=lambda row: _WORST.index(row["state"]) if row["state"] in _WORST else 0)
    numbers: dict[str, Any] = {key: sum(row[key] for row in rows) for key in _SUMMED}
    for key in ("concurrency", "requests_per_minute"):  # JSON has neither NaN nor infinity
        numbers[key] = math.fsum(math.inf if row[key] is None else row[key] for row in rows)
    for key in ("latency_p50_s", "latency_p95_s"):
        numbers[key] = max((row[key] for row in rows if row[key] is not None), default=math.nan)
    learned = next((row["learned"] for row in rows if row["learned"]), "")
    by_program = any(row["by_program"] for row in rows)
    return LiveSource(run_id, name, len(rows), worst["state"], held, by_program, worst["problem"], learned, **numbers)
