"""The runner starts the attempts of an event loop, each in a task, and cleans up after them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..errors import TransientError
from ..observers import AttemptStarted, Observers
from ..system.threads import cancel_all
from .attempts import Attempt, AttemptError, report_end
from .jobs import Job
from .timers import Alarms
from .upstream import Upstream

_log = logging.getLogger("qreward_plugins.scheduling")

CLOSE_WITHIN_S = 5.0
"""Longest time, in seconds, for which closing waits for attempts that were cancelled."""


class Runner:
    """Runs attempts, and tells `observers` of their starts.

    `on_ended` is called with each attempt and its end, unless its task was cancelled. Then `on_settled` is called with
    each attempt, unless it was abandoned, and with its task if that was cancelled or broke.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        observers: Observers,
        *,
        on_ended: Callable[[Attempt, AttemptError | None], None],
        on_settled: Callable[[Attempt, asyncio.Task[None] | None], None],
    ) -> None:
        self._loop = loop
        self._observers = observers
        self._on_ended = on_ended
        self._on_settled = on_settled
        self._tasks: dict[asyncio.Task[None], Attempt] = {}
        self._limits = Alarms(loop, Attempt.expire)

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, job: Job, upstream: Upstream, now: float, *, expected_s: float, hedge: bool) -> Attempt:
        """Reserve the quota for the next attempt of `job`, and run it in a task."""
        if job.first_at is None:
            job.first_at = now
        batches = upstream.request_batches
        batch = batches.place(job, now) if batches is not None else None
        attempt = Attempt(
            job,
            upstream,
            job.request_to(upstream.name),
            upstream.reserve(job.request, now, shares_request=batch is not None),
            now,
            expected_s=expected_s,
            probe=not upstream.breaker.closed,
            hedge=hedge,
            uncalibrated=not upstream.speed.settled,
            number=job.attempts,
            request_batch=batch,
            set_aside=upstream.set_aside(job.request, now) if upstream.budgets else (),
        )
        if batch is not None:
            batch.join(attempt, upstream.tokens(job.request))
        job.attempts += 1
        job.last_source = upstream.name
        job.live.append(attempt)
        upstream.started(attempt)
        name, in_flight = upstream.name, upstream.quota.in_flight
        self._observers.statistics.attempt_started(name, hedge=hedge, in_flight=in_flight)
        if self._observers.watched:
            self._observers.emit(
                AttemptStarted(now, job.sequence, attempt.number, job.call.name, name, hedge, in_flight)
            )
        task = attempt.start(self._loop, now, self._limits, self._ended)
        self._tasks[task] = attempt
        task.add_done_callback(self._settle)
        if batches is not None and batch is not None:
            batches.joined(batch, now)
        return attempt

    async def aclose(self) -> None:
        """Cancel all attempts, and wait until they have ended.

        An attempt that swallows its cancellation is abandoned after `CLOSE_WITHIN_S`, with a warning that names its
        source. May be called again.
        """
        for attempt in list(self._tasks.values()):
            attempt.cancel()
        await asyncio.sleep(0)
        for task in await cancel_all(list(self._tasks), within_s=CLOSE_WITHIN_S):
            attempt = self._tasks.pop(task)
            now = self._loop.time()
            attempt.abandon(now)
            report_end(self._observers, attempt, "cancelled", now)
            _log.warning(
                "source %s: a call did not end within %g s of being cancelled, and is abandoned",
                attempt.upstream.name,
                CLOSE_WITHIN_S,
            )
        # The callbacks of the ended tasks run in the next step of the event loop.
        await asyncio.sleep(0)
        self._limits.clear()

    def _ended(self, attempt: Attempt, error: AttemptError | None) -> None:
        """Tell of the end of an attempt, and clean up after it: the last step of its task."""
        self._on_ended(attempt, error)
        if attempt.task is not None:
            # The callback would cost another step of the event loop.
            attempt.task.remove_done_callback(self._settle)
            self._settle(attempt.task, broke=False)

    def _settle(self, task: asyncio.Task[None], *, broke: bool = True) -> None:
        """Clean up after an attempt: nothing that it held may outlive its task. `broke`: its task was cancelled or
        raised.
        """
        attempt = self._tasks.pop(task, None)
        if attempt is None:
            return
        now = self._loop.time()
        try:
            self._limits.cancel(attempt, attempt.limit_at)
            attempt.settle(now, task if broke else None)
            if not self._tasks:
                self._limits.clear()
            if not attempt.reported:
                broken = TransientError("it broke the scheduler")
                report_end(self._observers, attempt, "cancelled" if task.cancelled() else broken, now)
        finally:
            self._on_settled(attempt, task if broke else None)
