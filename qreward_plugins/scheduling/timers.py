"""The timers of a dispatcher: its pump, the deadlines of its jobs, and the time limits of its attempts.

All are few timers for many jobs: a batch of thousands mostly needs one pump and has one deadline. A timer of the event
loop costs as much as all that the scheduler learns from an answer.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHORTEST_WAKE_S = 1e-4
"""Shortest delay of a timer for the next pump, in seconds."""
STALL_S = 0.1
"""Delay of a timer, in seconds, from which the event loop counts as blocked."""
_LEAST_COMPACTED = 64
"""Times of alarms at which nothing happens any more, from which they are removed."""


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
        self._due_at = math.inf
        """When the timer is due. One that is due too early only causes a step; to set a timer takes as long."""

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
        self._due_at = math.inf

    def _run(self) -> None:
        self._asked = False
        if self._closed:
            return
        now = self._loop.time()
        due_at = max(self._step(now), now + SHORTEST_WAKE_S)
        if due_at == math.inf or self._closed:
            self._cancel_timer()
        elif not now < self._due_at <= due_at:
            self._cancel_timer()
            self._due_at = due_at
            self._timer = self._loop.call_at(due_at, self._woken, due_at)

    def _woken(self, due_at: float) -> None:
        now = self._loop.time()
        self._due_at = math.inf
        if now - due_at > STALL_S:
            self._on_stall(due_at, now)
            self._timer = self._loop.call_later(SHORTEST_WAKE_S, self.ask)
        else:
            self.ask()


class Alarms(Generic[T]):
    """The deadlines of jobs, or the time limits of attempts. One timer, for the next of them, serves all. `act` is
    called with whose time is up and the time, and returns when to call it again; infinity: not again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, act: Callable[[T, float], float]) -> None:
        self._loop = loop
        self._act = act
        self._due: dict[float, dict[T, None]] = {}
        """By time: whose time is up then. The jobs of a batch have one deadline, and attempts start together."""
        self._times: list[float] = []
        """A heap of these times, and of some at which nothing happens any more."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def set(self, whose: T, at: float) -> None:
        """Call `act` with `whose` at this time."""
        due = self._due.get(at)
        if due is None:
            due = self._due[at] = {}
            heapq.heappush(self._times, at)
            if len(self._times) > _LEAST_COMPACTED + 2 * len(self._due):
                # Most attempts and jobs end long before their time is up.
                self._times = sorted(self._due)
            if at < self._timer_at:
                self._set_timer(at)
        due[whose] = None

    def cancel(self, whose: T, at: float) -> None:
        """Let nothing happen to `whose` at the time that was set for it."""
        due = self._due.get(at)
        if due is not None:
            due.pop(whose, None)
            if not due:
                del self._due[at]

    def clear(self) -> None:
        """Forget all alarms."""
        self._due.clear()
        self._times.clear()
        self._set_timer(math.inf)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._wake) if at < math.inf else None
        self._timer_at = at

    def _wake(self) -> None:
        now = self._loop.time()
        try:
            while self._times and (self._times[0] <= now or self._times[0] not in self._due):
                due = self._due.get(self._times[0])
                if not due:
                    self._due.pop(heapq.heappop(self._times), None)
                    continue
                whose = next(iter(due))
                del due[whose]
                again_at = self._act(whose, now)
                if again_at < math.inf:
                    self.set(whose, again_at)
        finally:
            # A bug at the end of one attempt must not leave the others without a limit.
            self._set_timer(self._times[0] if self._times else math.inf)
