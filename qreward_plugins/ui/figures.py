"""Computes in other processes what takes seconds: the audit, and the comparison of two judges.

In a thread it would slow every other view by seconds, because only one thread of a process runs Python at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import InputError, JournalError
from ..journal.audit import AuditFinding, audit
from ..system.processes import process_pool, terminate

T = TypeVar("T")

PROCESSES = 2
"""So that a comparison does not wait for the audit."""
WAIT_S = 0.1
"""Longest time that a view waits for a result, in seconds."""
REST = 10.0
"""A result is computed again once it is so many times as old as it took. So a run that writes keeps no core busy."""
MOST = 64
"""Most results that are kept."""


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
        self._figures: OrderedDict[tuple[Any, ...], _Figure] = OrderedDict()

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
        self._figures.move_to_end((function, *arguments))
        if len(self._figures) > MOST:
            self._figures.popitem(last=False)
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
