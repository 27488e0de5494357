"""The attempts under way in an event loop, each with its task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..ending import end, forget
from .attempts import Attempt, Ending


class Running:
    """Runs attempts. `on_ended` is called with each attempt and its end, unless its task was cancelled. Then
    `on_settled` is called with each attempt and its finished task, unless the attempt was abandoned.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_ended: Callable[[Attempt, Ending], None],
        on_settled: Callable[[Attempt, asyncio.Task[None]], None],
    ) -> None:
        self._loop = loop
        self._on_ended = on_ended
        self._on_settled = on_settled
        self._tasks: dict[asyncio.Task[None], Attempt] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, attempt: Attempt) -> None:
        """Run `attempt` in a task."""
        task = attempt.start(self._loop, self._on_ended)
        self._tasks[task] = attempt
        task.add_done_callback(self._settled)

    async def aclose(self, *, within_s: float) -> list[Attempt]:
        """Cancel all attempts and wait until they have ended. Return those that swallowed their cancellation: they are
        abandoned after `within_s` seconds.
        """
        for attempt in list(self._tasks.values()):
            attempt.cancel()
        await asyncio.sleep(0)
        abandoned = []
        for task in await end(list(self._tasks), within_s=within_s):
            forget(task)
            attempt = self._tasks.pop(task)
            attempt.abandon(self._loop.time())
            abandoned.append(attempt)
        return abandoned

    def _settled(self, task: asyncio.Task[None]) -> None:
        attempt = self._tasks.pop(task, None)
        if attempt is not None:
            self._on_settled(attempt, task)
