"""Cancels tasks within a time limit: a task may ignore its cancellation, and closing must not wait for it forever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

CANCEL_AGAIN_S = 1.0
"""Seconds after which a running task is cancelled again: some code suppresses one cancellation by mistake."""


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], *, within_s: float) -> list[asyncio.Task[Any]]:
    """Cancel `tasks` and wait until they have ended, for `within_s` seconds at most.

    Returns the tasks that still run. Exceptions of the tasks are not raised. If this call is cancelled, it stops
    waiting; the tasks stay cancelled.
    """
    left = [task for task in tasks if not task.done()]
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while left and loop.time() < until:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=min(CANCEL_AGAIN_S, until - loop.time()))
        left = [task for task in left if not task.done()]
    return left


async def cancel_futures(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel futures and wait until they have ended. Their exceptions are not raised."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


def abandon(task: asyncio.Task[Any]) -> None:
    """Abandon a task that does not end: `asyncio.run` does not wait for it, and its exception is not reported."""
    task.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    # `asyncio.run` waits without a limit for all tasks that are registered with its loop.
    asyncio._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
