"""Between threads and event loops: a blocking call that a task awaits, and an event that a thread sets.

`sources/threads.py` runs the functions of users, and counts those that hang.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class LoopsEvent:
    """An event that any thread sets, once. Tasks of any event loop wait for it."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    async def wait(self, within_s: float) -> bool:
        """Wait, at most `within_s` seconds. Return whether it is set."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.is_set:
                return True
            self._waiting.append((loop, future))
        await asyncio.wait([future], timeout=within_s)
        return future.done()

    def set(self) -> None:
        """Let all tasks that wait go on. Idempotent; any thread may call it."""
        with self._lock:
            self.is_set = True
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_wake, future)


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run `function` in its own daemon thread. Return a future of the running event loop with its result or error.

    A function that hangs keeps neither the process nor the event loop from ending. Cancelling the future ends only the
    wait.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=run, name="qreward-thread", daemon=True).start()
    return result


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
