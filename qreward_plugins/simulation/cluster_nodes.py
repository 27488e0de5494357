"""The processes of a simulated cluster. Each has its own clock. A stopped process does nothing until it resumes, and
then everything at once, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..sharing.keeper import MARGIN_S, TTL_S, Keeper
from ..sharing.messages import Answer, Report

if TYPE_CHECKING:
    from .cluster import Cluster

STAMP_EVERY_S = 1.0
"""As in `sharing.keeper_lock`, which exists on Unix only."""


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
        self.stamped_at = -math.inf
        """The last sign of life that it recorded, on the keepers' clock."""
        self._wake_at = math.inf

    def take_in(self, report: Report) -> None:
        """Receive a report."""
        now = self.now()
        if self.keeper is None:
            self.keeper = self._begin(now)
        self.calls += 1
        self.keeper.report(report, now)
        self._answer()

    def _begin(self, now: float) -> Keeper:
        if self.cluster.plan.protocol == "ray":
            return Keeper(now, boot=str(self.number), first=self.number == 0)
        before = [one for one in self.cluster.keepers[: self.number] if one.stamped_at > -math.inf]
        if not before:
            return Keeper(now, boot=str(self.number), first=True)
        unheard = self.cluster.holders() if self.cluster.plan.proves_deaths else None
        number, charged, expired_at = self.cluster.left
        if number == before[-1].number:
            return Keeper(
                now, boot=str(self.number), first=False, charged=charged, expired_at=expired_at, unheard=unheard
            )
        expired_at = min(now, before[-1].stamped_at + STAMP_EVERY_S) + TTL_S + MARGIN_S
        return Keeper(now, boot=str(self.number), first=False, expired_at=expired_at, unheard=unheard)

    def dead(self, worker: str) -> None:
        """Learn that a worker is dead."""
        if self.keeper is not None:
            self.keeper.died(worker, self.now())
            self._answer()

    def _answer(self) -> None:
        assert self.keeper is not None
        now = self.now()
        machine = self.cluster.plan.protocol == "machine"
        if machine and self.number != len(self.cluster.keepers) - 1:
            self.cluster.replaced(self)
            return
        if now - self.stamped_at >= STAMP_EVERY_S:
            self.stamped_at = now
        for due in self.keeper.due(now):
            if due.answer is not None and machine:
                # It may be stopped between its decision and the sending.
                later_s = self.cluster.rng.choice((0.0, 0.001, 0.2))
                self.at(now + later_s, self._send, due.worker, due.answer)
            elif due.answer is not None:
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
