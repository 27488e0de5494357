"""Computes the audit in another process, because it takes seconds.

In a thread it would slow every other view by seconds, because only one thread of a process runs Python at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ..errors import InputError, JournalError
from ..journal.audit import AuditFinding, audit
from ..system.processes import process_pool, terminate

WAIT_S = 0.1
"""Longest time that a view waits for a result, in seconds."""
REST = 10.0
"""The audit is done again once it is so many times as old as it took. So a run that writes keeps no core busy."""


class AuditFigures:
    """The last audit of the journals at `paths`. One event loop uses it, and calls `aclose` at the end."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._pool = process_pool(1)
        self._found: dict[str, Any] | None = None
        self._entries = -1
        """How many entries there were for that."""
        self._again_at = 0.0
        self._doing: asyncio.Future[dict[str, Any]] | None = None
        self._error: BaseException | None = None
        """Of the last try; raised once."""

    async def current(self, entries: int) -> tuple[dict[str, Any] | None, bool]:
        """Return what the last audit shows, None before the first, and whether one is being done now. `entries` is how
        many there are.

        Raises `JournalError`, also if the process died.
        """
        self.last(entries)
        if self._doing is not None:
            await asyncio.wait([self._doing], timeout=WAIT_S)
        error, self._error = self._error, None
        if isinstance(error, BrokenProcessPool):
            raise JournalError("the process that computes this died, maybe for lack of memory") from None
        if error is not None:
            raise error
        return self._found, self._doing is not None

    def last(self, entries: int) -> dict[str, Any] | None:
        """As `current`, without waiting and without errors."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        def done(doing: asyncio.Future[dict[str, Any]]) -> None:
            self._doing = None
            if doing.cancelled():
                return
            self._error = doing.exception()
            if self._error is None:
                self._found, self._entries = doing.result(), entries
                self._again_at = loop.time() + REST * (loop.time() - began)
            elif isinstance(self._error, BrokenProcessPool):
                self._pool = process_pool(1)

        if self._doing is None and entries != self._entries and began >= self._again_at:
            self._doing = loop.run_in_executor(self._pool, audited, *self._paths)
            self._doing.add_done_callback(done)
        return self._found

    async def aclose(self) -> None:
        """End the process, whatever it computes. Idempotent."""
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
