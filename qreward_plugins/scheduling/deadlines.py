"""Deadlines: one timer for all jobs that have the same deadline, as those of a batch mostly have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .jobs import Job


class Deadlines:
    """The deadlines of the jobs of an event loop. `on_due` is called with each job at its deadline, and must not
    raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[Job], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._due: dict[float, tuple[asyncio.TimerHandle, dict[Job, None]]] = {}

    def add(self, job: Job) -> None:
        """Watch a job until it is discarded."""
        due = self._due.get(job.deadline_at)
        if due is None:
            timer = self._loop.call_at(job.deadline_at, self._expire, job.deadline_at)
            due = self._due[job.deadline_at] = (timer, {})
        due[1][job] = None

    def discard(self, job: Job) -> None:
        """Forget a job that was added. It may have been told already."""
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
