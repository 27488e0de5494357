"""An asyncio event loop in virtual time: it runs until nothing is ready, and then jumps to the next timer.

Tests of timing rules are exact and instant: a batch that waits for three one-minute windows takes milliseconds, and
always the same steps. The production code needs no change, because it takes time only from `loop.time()`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_ASK_EVERY = 64
_EARLY_S = 2e-9


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and the main coroutine has not finished: in real time it would hang."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that never waits: it moves the loop's clock to the next timer instead."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: VirtualTimeLoop | None = None
        self._unasked = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The system call is most of a step's cost. A loop without sockets has only its own wake-up pipe there, whose
        # callbacks are queued before anything is written to it.
        self._unasked += 1
        ready: list[tuple[selectors.SelectorKey, int]] = []
        if self._unasked >= _ASK_EVERY or timeout is None or len(self.get_map()) > 1:
            self._unasked = 0
            ready = super().select(0)
        if self.loop is not None and timeout == 0:
            self.loop.catch_up()
        if ready or self.loop is None or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("deadlock: nothing is ready, and the main coroutine still waits")
        self.loop.jump()
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` starts at 0 and advances only when nothing is ready."""

    is_simulated = True
    """Engines in this loop share no limits with real processes."""
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._now = 0.0
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self._now

    def jump(self) -> None:
        """Move the clock to the next timer."""
        # The base class drops cancelled timers from the head of its heap before it selects, so the head is the next
        # one.
        if self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())

    def catch_up(self) -> None:
        """Move the clock to a timer that is about to run.

        The base class runs timers up to a nanosecond early. A callback that sets the same timer again, because it is
        too early, would do so for ever while the time stands still.
        """
        if self._scheduled and self._scheduled[0].when() - self._now <= _EARLY_S:
            self.jump()


def run(main: Coroutine[Any, Any, T], *, loop: VirtualTimeLoop | None = None) -> T:
    """Run `main` in a new virtual-time loop, or in `loop`, as `asyncio.run` does in real time. The loop is closed
    after.

    Raises `Deadlock`.
    """
    loop = loop or VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        finish(loop)


def finish(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks of a loop that does not run, and close it, as `asyncio.run` does at its end."""
    try:
        leftover = asyncio.all_tasks(loop)
        for task in leftover:
            task.cancel()
        if leftover:
            loop.run_until_complete(asyncio.gather(*leftover, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
