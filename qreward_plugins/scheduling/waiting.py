"""The jobs that wait for a source: in the queue, for the end of a backoff, or as oversize jobs.

A job may wait in two of these at once: queued for one source, and backing off from another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from .backoff import Backoff
from .jobs import NOWHERE, Job
from .oversize import Oversize
from .queue import ReadyQueue
from .upstream import Upstream


class Waiting:
    """The waiting jobs of an event loop.

    `on_queued` is called when jobs were queued. `on_barred` is called with a job that no source can ever take.
    `on_bug` is called with a job whose timer failed, and the error.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        upstreams: Mapping[str, Upstream],
        queue: ReadyQueue,
        backoff: Backoff,
        *,
        on_queued: Callable[[], None],
        on_barred: Callable[[Job], None],
        on_bug: Callable[[Job, Exception], None],
    ) -> None:
        self._loop = loop
        self._upstreams = upstreams
        self._queue = queue
        self._backoff = backoff
        self._oversize = Oversize(upstreams, queue)
        self._on_queued = on_queued
        self._on_barred = on_barred
        self._on_bug = on_bug

    def __contains__(self, job: Job) -> bool:
        return bool(job.entry) or job.backoff_timer is not None or job in self._oversize

    def stuck(self, job: Job, now: float) -> bool:
        """Whether nothing will ever start a job that has no attempt under way: a bug."""
        timer = job.backoff_timer
        due = timer is not None and timer.when() >= now
        return not (job.entry or due or job in self._oversize)

    def enqueue(self, job: Job) -> None:
        """Queue a job for the sources that it may go to now, and again when it may go to the next one. Nothing happens
        to a job that has ended.
        """
        if job.ended:
            return
        now = self._loop.time()
        if job in self:
            self.discard(job)
        for name in job.call.sources:
            if self._upstreams[name].too_large(job.request):
                job.barred |= {name}
        if not job.call.sources or (job.barred and job.barred.issuperset(job.call.sources)):
            self._on_barred(job)
            return
        job.oversize_at = NOWHERE
        self._backoff.reconsider(job, now)
        eligible = job.eligible(now)
        if eligible:
            self._push(job, eligible, now)
            self._on_queued()
        again_at = [at for at in (job.next_backoff_end(now), job.reconsider_at) if at is not None]
        if again_at:
            job.backoff_timer = self._loop.call_at(min(again_at), self._backoff_over, job)

    def started(self, job: Job) -> None:
        """Note that an attempt of a job starts that was taken from the queue."""
        if job.backoff_timer is not None:
            job.backoff_timer.cancel()
            job.backoff_timer = None

    def discard(self, job: Job) -> None:
        """Let a job wait no longer."""
        self._queue.discard(job)
        self._oversize.discard(job)
        if job.backoff_timer is not None:
            job.backoff_timer.cancel()
            job.backoff_timer = None

    def queue_fitting(self, now: float) -> None:
        """Queue the jobs that are not oversize any more."""
        for job in self._oversize.take_fitting(now):
            self._push(job, job.eligible(now), now)

    def queue_oversize(self, now: float) -> None:
        """Queue an oversize job if one may go now."""
        if self._oversize.queue_next(now):
            self._on_queued()

    def next_due_at(self, now: float) -> float:
        """The next time at which an oversize job goes before the others; infinity if there is none."""
        return self._oversize.next_due_at(now)

    def _push(self, job: Job, eligible: frozenset[str], now: float) -> None:
        """Queue a job for the sources whose windows its estimated tokens fit. If there is none, it is oversize."""
        fitting = frozenset([name for name in eligible if not self._upstreams[name].oversize(job.request)])
        if fitting:
            if fitting != eligible and any(self._upstreams[name].up(now) for name in fitting):
                job.oversize_at, eligible = eligible - fitting, fitting
            self._queue.push(job, eligible)
        else:
            self._oversize.add(job)

    def _backoff_over(self, job: Job) -> None:
        job.backoff_timer = None
        if not (job.live or job.undecided):
            try:
                self._backoff.renew(job, self._loop.time())
                self.enqueue(job)
            except Exception as error:
                self._on_bug(job, error)
