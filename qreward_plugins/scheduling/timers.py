"""The timers of a dispatcher: its pump, the deadlines of its jobs, and the time limits of its attempts.

All are few timers for many jobs: a batch of thousands mostly needs one pump and has one deadline. A timer of the event
loop costs as much as all that the scheduler learns from an answer.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .jobs import Job

if TYPE_CHECKING:
    from .attempts import Attempt

SHORTEST_WAKE_S = 1e-4
"""Shortest delay of a timer for the next pump, in seconds."""
STALL_S = 0.1
"""Delay of a timer, in seconds, from which the event loop counts as blocked."""
_LEAST_COMPACTED = 64
"""Shortest list of time limits from which those of ended attempts are removed."""


class Pump:
    """Calls `step` with the time soon after it was asked for, and at the time that the last step returned; infinity:
    not again. All that ask in one iteration of the event loop share a step.

    If the event loop was blocked when that time came, `on_stall` is called first, with the time and now, and the
    answers that have arrived are read before the step.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        step: Callable[[float], float],
        *,
        on_stall: Callable[[float, float], None],
    ) -> None:
        self._loop = loop
        self._step = step
        self._on_stall = on_stall
        self._asked = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        """Ask for a step. Nothing happens after `close`."""
        if not (self._asked or self._closed or self._loop.is_closed()):
            self._asked = True
            self._loop.call_soon(self._run)

    def close(self) -> None:
        """No further steps."""
        self._closed = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._asked = False
        if self._closed:
            return
        now = self._loop.time()
        self._cancel_timer()
        due_at = self._step(now)
        if due_at < float("inf") and not self._closed:
            wake_at = max(due_at, now + SHORTEST_WAKE_S)
            self._timer = self._loop.call_at(wake_at, self._woken, wake_at)

    def _woken(self, due_at: float) -> None:
        now = self._loop.time()
        if now - due_at > STALL_S:
            self._on_stall(due_at, now)
            self._timer = self._loop.call_later(SHORTEST_WAKE_S, self.ask)
        else:
            self.ask()


class Deadlines:
    """The deadlines of the jobs of an event loop, one timer for all jobs with the same deadline. `on_due` is called
    with each job at its deadline, and must not raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[Job], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._due: dict[float, tuple[asyncio.TimerHandle, dict[Job, None]]] = {}

    def add(self, job: Job) -> None:
        """Watch a job until it is discarded. One whose deadline is infinity needs no watching."""
        if job.deadline_at == math.inf:
            return
        due = self._due.get(job.deadline_at)
        if due is None:
            timer = self._loop.call_at(job.deadline_at, self._expire, job.deadline_at)
            due = self._due[job.deadline_at] = (timer, {})
        due[1][job] = None

    def discard(self, job: Job) -> None:
        """Forget a job that was added. It may have been told already."""
        if job.deadline_at == math.inf:
            return
        timer, due = self._due.get(job.deadline_at, (None, {}))
        due.pop(job, None)
        if timer is not None and not due:
            timer.cancel()
            del self._due[job.deadline_at]

    def _expire(self, deadline_at: float) -> None:
        # Event loops run timers up to a nanosecond early, and a caller may start another job with this deadline then.
        # That one needs a timer that has not run yet.
        _, due = self._due.pop(deadline_at)
        for job in due:
            self._on_due(job)


class TimeLimit:
    """The time limit of one attempt. `attempt` is None once it has ended: the limit must not keep it, because it refers
    to its sample.
    """

    __slots__ = ("attempt",)

    def __init__(self, attempt: Attempt) -> None:
        self.attempt: Attempt | None = attempt


class TimeLimits:
    """The time limits of the attempts of an event loop. One timer, for the next of them, serves all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._coming: list[tuple[float, int, TimeLimit]] = []
        self._compact_at = _LEAST_COMPACTED
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def watch(self, attempt: Attempt, at: float) -> TimeLimit:
        """Check the time limit of an attempt at this time."""
        limit, coming = TimeLimit(attempt), self._coming
        heapq.heappush(coming, (at, next(self._numbers), limit))
        if len(coming) > self._compact_at:
            # Most attempts end long before their time limits.
            self._coming = coming = [item for item in coming if item[2].attempt is not None]
            heapq.heapify(coming)
            self._compact_at = max(_LEAST_COMPACTED, 2 * len(coming))
        if at < self._timer_at:
            self._set_timer(at)
        return limit

    def clear(self) -> None:
        """Forget every attempt."""
        self._coming.clear()
        self._set_timer(math.inf)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._wake) if at < math.inf else None
        self._timer_at = at

    def _wake(self) -> None:
        now = self._loop.time()
        try:
            while self._coming and (self._coming[0][0] <= now or self._coming[0][2].attempt is None):
                limit = heapq.heappop(self._coming)[2]
                if limit.attempt is not None:
                    again_at = limit.attempt.expire(now)
                    if again_at < math.inf:
                        heapq.heappush(self._coming, (again_at, next(self._numbers), limit))
        finally:
            # A bug at the end of one attempt must not leave the others without a limit.
            self._set_timer(self._coming[0][0] if self._coming else math.inf)
