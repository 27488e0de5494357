"""The processes of a simulated cluster. Each has its own clock. A stopped process does nothing until it resumes, and
then everything at once, in any order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..sharing.keeper import Keeper
from ..sharing.messages import Answer, Report
from .cluster_plan import SharedSource
from .strict_limits import RequestBucket, Window

if TYPE_CHECKING:
    from .cluster import Cluster


class RecordingServer:
    """One source's server. Times are true seconds."""

    def __init__(self, source: SharedSource, rng: random.Random) -> None:
        limits = source.declared()
        self.broken: list[str] = []
        self.came = 0
        """Requests that arrived."""
        self.came_from: dict[str, int] = {}
        self._source = source
        self._counts_at = rng.choice((0.0, 0.5, 1.0))
        self._window: Window | None = None
        self._bucket: RequestBucket | None = None
        if limits.requests_per_minute is not None and limits.window == "bucket":
            self._bucket = RequestBucket(limits.requests_per_minute, limits.burst)
        elif limits.requests_per_minute is not None:
            per_window, window_s = limits.requests_per_minute * limits.window_s / 60.0, limits.window_s
            if per_window < 1:
                per_window, window_s = 1.0, 60.0 / limits.requests_per_minute
            self._window = Window(math.floor(per_window + 1e-9), window_s)
        self._tokens: Window | None = None
        if limits.tokens_per_minute is not None:
            self._tokens = Window(math.floor(limits.tokens_per_minute * limits.window_s / 60.0 + 1e-9), limits.window_s)
        self._concurrency = limits.concurrency or math.inf
        self._in_flight: set[object] = set()

    def counts_completion_at(self, came_at: float, ends_at: float) -> float:
        """When the completion of a request counts."""
        return came_at + self._counts_at * (ends_at - came_at)

    def come(self, request: object, worker: str, prompt_tokens: float, now: float) -> None:
        """A request arrives."""
        self.came += 1
        self.came_from[worker] = self.came_from.get(worker, 0) + 1
        if self._window is not None:
            self._window.enter(1, now)
            used = self._window.used(now)
            if used > self._window.limit:
                self._break(f"{used} requests in {self._window.window_s:g} s, {self._window.limit} allowed", now)
        if self._bucket is not None:
            if self._bucket.wait_s(1, now) > 0:
                self._break(f"the bucket is empty for {self._bucket.wait_s(1, now):.4f} s more", now)
            self._bucket.enter(1, now)
        self.spend(prompt_tokens, now)
        self._in_flight.add(request)
        if len(self._in_flight) > self._concurrency:
            self._break(f"{len(self._in_flight)} in flight, {self._concurrency:g} allowed", now)

    def spend(self, tokens: float, now: float) -> None:
        """Count tokens."""
        if self._tokens is not None and tokens > 0:
            self._tokens.enter(math.ceil(tokens), now)
            used = self._tokens.used(now)
            if used > self._tokens.limit:
                self._break(f"{used} tokens in {self._tokens.window_s:g} s, {self._tokens.limit} allowed", now)

    def end(self, request: object) -> None:
        """A request ends, or its connection does."""
        self._in_flight.discard(request)

    def works_on(self, request: object) -> bool:
        """Whether a request is in flight here."""
        return request in self._in_flight

    def _break(self, what: str, now: float) -> None:
        self.broken.append(f"{self._source.key} at {now:.4f}: {what}")


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
