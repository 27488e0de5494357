"""A journal in memory, for virtual time, and journals that are written without an engine, with the sources of runs that
go on.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from qreward_plugins import Outcome, Scored, Verdict
from qreward_plugins.journal import Journal
from qreward_plugins.samples.spent import NOTHING


def record(path: Path, outcomes: Iterable[tuple[Any, ...]], **options: Any) -> None:
    """Write tuples of a sample, its outcome, its attempts (default: none) and its key (none) to a journal, with the
    `options` of `Journal`. An outcome that is None is the one that the journal has under the key.
    """

    async def main() -> None:
        book = Journal(path, **options)
        for given in outcomes:
            sample, outcome, attempts, key = (*given, (), None)[:4] if len(given) == 2 else (*given, None)[:4]
            if outcome is None:
                await book.flush()
                outcome = Scored(await book.get(key))
            await book.put(key, sample, outcome, attempts)
        await book.aclose()

    asyncio.run(main())


def write_live(path: Path, run_id: str, process: int, source: str, **told: Any) -> None:
    """Write what a process of a run that goes on says of a source. All its counts are 3."""
    counts = ("in_flight", "waiting", "requests", "answered", "throttled", "transient", "permanent", "invalid")
    said = {**dict.fromkeys(counts, 3), "state": "up", "problem": "", "by_program": False, "cost_usd": 0.5}
    said |= {"concurrency": 8, "requests_per_minute": None, "learned": "", "latency_p50_s": 1.5, "latency_p95_s": None}
    row = (run_id, process, source, time.time() + 60, json.dumps({**said, **told}))
    sql(path, "INSERT OR REPLACE INTO live VALUES (?, ?, ?, ?, ?)", *row)


def sql(path: Path, statement: str, *values: Any) -> list[Any]:
    """Run a statement in a journal, and return the rows that it finds."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).fetchall()


class MemoryJournal:
    """Keeps all outcomes, and the verdicts by their keys. Looking something up takes `seconds`."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.outcomes: list[Outcome] = []
        self.verdicts: dict[str, Verdict] = {}

    async def get(self, *keys: str) -> Verdict | None:
        await asyncio.sleep(self.seconds)
        known = next((self.verdicts[key] for key in keys if key in self.verdicts), None)
        return known and replace(known, cached=True, spent=NOTHING)

    async def put(self, key: str | None, sample: Any, outcome: Outcome, history: Any = ()) -> None:
        self.note(key, sample, outcome)

    def note(self, key: str | None, sample: Any, outcome: Outcome, history: Any = ()) -> None:
        self.outcomes.append(outcome)
        if key is not None and isinstance(outcome, Scored):
            self.verdicts[key] = outcome.verdict

    async def aclose(self) -> None:
        pass
