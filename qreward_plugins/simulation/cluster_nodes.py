"""The processes of a simulated cluster. Each has its own clock. A stopped process does nothing until it resumes, and
then everything at once, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..sharing.keeper import Keeper
from ..sharing.messages import Answer, Report

if TYPE_CHECKING:
    from .cluster import Cluster


class Node:
    """A process with a clock. Events during a stop happen when it resumes."""

    def __init__(self, cluster: Cluster, clock: tuple[float, float]) -> None:
        self.cluster = cluster
        self.alive = True
        self._stops = 0
        self._clock = clock
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def stopped(self) -> bool:
        """Whether it is stopped."""
        return self._stops > 0

    def now(self) -> float:
        """The time of its clock."""
        offset, rate = self._clock
        return offset + rate * self.cluster.now

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call at a time of its clock."""
        offset, rate = self._clock
        self.cluster.at((when - offset) / rate, self.happen, what, *arguments)

    def happen(self, what: Callable[..., None], *arguments: Any) -> None:
        """Deliver an event now, or on resumption."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append((what, arguments))
        else:
            what(*arguments)

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self._stops += 1

    def resume(self) -> None:
        """Resume it: all events since the stop happen at once, in any order."""
        self._stops -= 1
        if self._stops:
            return
        backlog, self._backlog = self._backlog, []
        self.cluster.rng.shuffle(backlog)
        for what, arguments in backlog:
            self.happen(what, *arguments)


class KeeperNode(Node):
    """The process of a keeper."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__(cluster, cluster.plan.keeper_clock)
        self.number = number
        self.slow_s = 0.0
        self.calls = 0
        self.keeper: Keeper | None = None
        self._wake_at = math.inf

    def take_in(self, report: Report) -> None:
        """Receive a report."""
        now = self.now()
        if self.keeper is None:
            self.keeper = Keeper(now, boot=str(self.number), first=self.number == 0)
        self.calls += 1
        self.keeper.report(report, now)
        self._answer()

    def _answer(self) -> None:
        assert self.keeper is not None
        now = self.now()
        for due in self.keeper.due(now):
            if due.answer is not None:
                self._send(due.worker, due.answer)
        wake_at = max(self.keeper.wake_at(now), now + 1e-3)
        if wake_at < self._wake_at - 1e-9 or self._wake_at <= now:
            self._wake_at = wake_at
            self.at(wake_at, self._wake, wake_at)

    def _send(self, worker: str, answer: Answer) -> None:
        self.cluster.send(worker, self.slow_s, self.cluster.workers[worker].answered, answer)

    def _wake(self, when: float) -> None:
        if when == self._wake_at:
            self._answer()
