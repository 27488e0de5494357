"""Runs a keeper on an event loop: a report waits until its answer is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from .keeper import Keeper
from .messages import Answer, Report


class KeeperLoop:
    """Runs `keeper` on the running event loop, whose clock is the keeper's.

    `may_answer` is called before each round of answers; False if another keeper has replaced this one.
    """

    def __init__(self, keeper: Keeper, *, may_answer: Callable[[], bool] = lambda: True) -> None:
        self.keeper = keeper
        self.reports = 0
        """Number of reports received."""
        self._may_answer = may_answer
        self._stopped = False
        self._calls: dict[tuple[str, int], asyncio.Future[Answer | None]] = {}
        self._wake: asyncio.TimerHandle | None = None

    async def exchange(self, report: Report) -> Answer | None:
        """Hand a report to the keeper and wait for the answer; None if a newer report of its worker came."""
        loop = asyncio.get_running_loop()
        self.reports += 1
        call = report.worker, report.number
        if call in self._calls:
            return None  # a duplicate: the first call returns the answer
        answered: asyncio.Future[Answer | None] = loop.create_future()
        self._calls[call] = answered
        self.keeper.report(report, loop.time())
        self._pump()
        return await answered

    def died(self, workers: Iterable[str]) -> None:
        """Tell the keeper that the processes of workers are dead."""
        now = asyncio.get_running_loop().time()
        for worker in workers:
            self.keeper.died(worker, now)
        self._pump()

    def stop(self) -> None:
        """Give no more answers; reports wait until their callers give up."""
        self._stopped = True
        if self._wake is not None:
            self._wake.cancel()

    def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        # The time comes first: if the process is stopped after the check, the answers are old, and workers ignore them.
        now = loop.time()
        if self._stopped or not self._may_answer():
            return
        for due in self.keeper.due(now):
            answered = self._calls.pop((due.worker, due.number), None)
            if answered is not None and not answered.done():
                answered.set_result(due.answer)
        if self._wake is not None:
            self._wake.cancel()
        self._wake = loop.call_at(max(self.keeper.wake_at(now), now + 1e-3), self._pump)
