"""Computes in other processes what takes seconds: the audit, and the comparison of two judges, or two runs, on the
samples that both have scored.

In a thread it would slow every other view by seconds, because only one thread of a process runs Python at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

from markupsafe import Markup

from ..errors import InputError, JournalError
from ..journal.audit import AuditFinding, audit
from ..journal.comparison import Judged, JudgedPair, figures, pairs_of
from ..system.processes import process_pool, terminate
from . import charts

T = TypeVar("T")

PROCESSES = 2
"""So that a comparison does not wait for the audit."""
WAIT_S = 0.1
"""Longest time that a view waits for a result, in seconds."""
REST = 10.0
"""A result is computed again once it is so many times as old as it took. So a run that writes keeps no core busy."""


@dataclass
class _Figure:
    """A result, and the entries that it was made of. `value` is None before the first."""

    value: Any = None
    entries: int = -1
    again_at: float = 0.0
    doing: asyncio.Future[Any] | None = None
    error: BaseException | None = None
    """Of the last try; raised once."""


class Figures:
    """Results of functions of a journal's entries. One event loop uses it, and calls `aclose` at the end."""

    def __init__(self) -> None:
        self._pool = process_pool(PROCESSES)
        self._figures: dict[tuple[Any, ...], _Figure] = {}

    async def of(self, entries: int, function: Callable[..., T], *arguments: Any) -> tuple[T | None, bool]:
        """Return the last result of a function, None before the first, and whether it is being computed now. `entries`
        is how many there are. The function and its arguments must pickle, and the arguments have a hash.

        Raises what the function raised, and `JournalError` if its process died.
        """
        figure = self._started(entries, function, *arguments)
        if figure.doing is not None:
            await asyncio.wait([figure.doing], timeout=WAIT_S)
        error, figure.error = figure.error, None
        if isinstance(error, BrokenProcessPool):
            raise JournalError("the process that computes this died, maybe for lack of memory") from None
        if error is not None:
            raise error
        return figure.value, figure.doing is not None

    def last(self, entries: int, function: Callable[..., T], *arguments: Any) -> T | None:
        """As `of`, without waiting and without errors."""
        value: T | None = self._started(entries, function, *arguments).value
        return value

    def _started(self, entries: int, function: Callable[..., T], *arguments: Any) -> _Figure:
        figure = self._figures.setdefault((function, *arguments), _Figure())
        loop = asyncio.get_running_loop()
        began = loop.time()

        def done(doing: asyncio.Future[T]) -> None:
            figure.doing = None
            if doing.cancelled():
                return
            figure.error = doing.exception()
            if figure.error is None:
                figure.value, figure.entries = doing.result(), entries
                figure.again_at = loop.time() + REST * (loop.time() - began)
            elif isinstance(figure.error, BrokenProcessPool):
                self._pool = process_pool(PROCESSES)

        if figure.doing is None and entries != figure.entries and began >= figure.again_at:
            figure.doing = loop.run_in_executor(self._pool, function, *arguments)
            figure.doing.add_done_callback(done)
        return figure

    async def aclose(self) -> None:
        """End the processes, whatever they compute. Idempotent."""
        terminate(self._pool)
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)


def audited(*paths: str) -> dict[str, Any]:
    """Return what the audit of journals shows. It takes seconds. Raises `JournalError`."""
    findings, problem, run = list[AuditFinding](), "", ""
    try:
        run, findings = audit(paths)
    except InputError as error:
        problem = str(error)
    return {"findings": findings, "problem": problem, "audited_run": run}


CELLS = 20
"""Cells of the grid along each side."""
MOST_COMPARED = 30_000
"""Most samples of each judge that the page compares, the latest."""
SHOWN = 50
"""Most changes that are shown, the largest first."""


def choice(judges: Sequence[tuple[str, str]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return what the form of the page shows. `query` has `a` and `b`, as `name_of` names a judge of a run, and `at`,
    the reward from which on a sample is good. By default, the first two of `judges` (pairs of run and judge); `b` is ""
    if there is one only.
    """
    names = [name_of(run, judge) for run, judge in judges]
    a = query.get("a", "") if query.get("a") in names else next(iter(names), "")
    others = [name for name in names if name != a]
    b = query.get("b", "") if query.get("b") in others else next(iter(others), "")
    try:
        at = float(query.get("at", "0.5"))
    except ValueError:
        at = 0.5
    return {"names": names, "a": a, "b": b, "at": at if math.isfinite(at) else 0.5}


def comparison(paths: Sequence[str], a: tuple[str, str], b: tuple[str, str], at: float) -> dict[str, Any]:
    """Return the figures of the page for two judges, each with its run. It takes seconds. Raises `JournalError`."""
    one, other = (Judged.read(paths, *each, most=MOST_COMPARED) for each in (a, b))
    try:
        pairs = pairs_of(one, other)
    except InputError as error:
        return {"problem": f"{error}."}
    changed = sorted((pair for pair in pairs if pair.a != pair.b), key=lambda pair: -abs(pair.b - pair.a))
    return {
        "problem": "",
        "count": len(pairs),
        "most": MOST_COMPARED if len(one.samples) >= MOST_COMPARED else 0,
        "others": sum(not pair.same for pair in pairs),
        "failed": (one.failed, other.failed),
        "figures": figures(pairs, at),
        "down": sum(pair.a >= at > pair.b for pair in pairs),
        "up": sum(pair.b >= at > pair.a for pair in pairs),
        "grid": _grid(pairs),
        "changes": [(pair, *map("/sample/{0.journal}/{0.row}".format, pair.places)) for pair in changed[:SHOWN]],
        "changed": len(changed),
    }


def name_of(run: str, judge: str) -> str:
    """The name of a judge in a run, for a choice and a URL."""
    return f"{judge} in {run}"


def _grid(pairs: Sequence[JudgedPair]) -> Markup:
    low = min(min(pair.a, pair.b) for pair in pairs)
    high = max(max(pair.a, pair.b) for pair in pairs)
    width = (high - low) / CELLS or 1.0
    counts: dict[tuple[int, int], int] = {}
    for pair in pairs:
        x, y = (min(CELLS - 1, int((value - low) / width)) for value in (pair.a, pair.b))
        counts[x, y] = counts.get((x, y), 0) + 1
    return charts.grid(counts, CELLS, low, high if high > low else low + 1.0)
