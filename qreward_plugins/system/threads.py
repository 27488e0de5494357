"""Between threads and event loops: a blocking call that a task awaits, and an event that a thread sets.

`sources/threads.py` runs the functions of users, and counts those that hang.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

CANCEL_AGAIN_S = 1.0
"""Seconds after which a running task is cancelled again: some code suppresses one cancellation by mistake."""
AT_ONCE = 16
"""Items that `taken_in_thread` takes at a time; an item may hold images."""


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], *, within_s: float) -> list[asyncio.Task[Any]]:
    """Cancel `tasks` and wait until they have ended, for `within_s` seconds at most.

    Tasks that still run then are abandoned, and returned: `asyncio.run` does not wait for them, and their exceptions
    are not reported. Exceptions of the tasks are not raised. If this call is cancelled, it stops waiting; the tasks
    stay cancelled.
    """
    left = [task for task in tasks if not task.done()]
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while left and loop.time() < until:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=min(CANCEL_AGAIN_S, until - loop.time()))
        left = [task for task in left if not task.done()]
    for task in left:
        _abandon(task)
    return left


async def cancel_futures(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel futures and wait until they have ended. Their exceptions are not raised."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


def _abandon(task: asyncio.Task[Any]) -> None:
    task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    # `asyncio.run` waits without a limit for all tasks that are registered with its loop.
    asyncio._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]


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
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a future that runs cannot be cancelled

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="qreward-thread", daemon=True).start()
    return asyncio.wrap_future(result)


async def taken_in_thread(items: Iterator[T]) -> AsyncIterator[T]:
    """Yield `items`, which are taken in another thread, `AT_ONCE` at a time: a file system may hang."""
    while part := await in_thread(lambda: list(islice(items, AT_ONCE))):
        for item in part:
            yield item


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
