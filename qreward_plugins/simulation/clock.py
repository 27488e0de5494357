"""An asyncio event loop in virtual time: it runs until nothing is left to do now, and then jumps to the next timer.

Tests of timing rules become exact and instant: a batch that waits for three one-minute windows takes milliseconds and
always the same number of steps. The production code needs no change, because it takes time from `loop.time()` alone.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and the main coroutine has not finished: in real time it would hang for
    ever.
    """


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: where a real selector would block until a timer, it moves the loop's clock to that timer."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: VirtualTimeLoop | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or self.loop is None or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("nothing is left to do, and the main coroutine still waits")
        self.loop.jump()
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` starts at 0 and moves only when nothing else is left to do."""

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


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in a new virtual-time loop, as `asyncio.run` does in real time. Raises `Deadlock`."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            leftover = asyncio.all_tasks(loop)
            for task in leftover:
                task.cancel()
            if leftover:
                loop.run_until_complete(asyncio.gather(*leftover, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
