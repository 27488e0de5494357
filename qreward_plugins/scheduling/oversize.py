"""Oversize jobs: those estimated to take more tokens than a whole window of any of their sources allows.

An estimate is no reason to refuse a sample. So each of these jobs is sent, but only once and alone, because its source
needs an empty window for it. It goes when nothing else waits for its sources, whatever its priority, or when half of
its time is over. Estimates fall with the first answers, and limits change: then it goes as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .jobs import Job
from .queue import ReadyQueue
from .upstream import Upstream

PATIENCE = 0.5
"""Part of the time to its deadline after which an oversize job goes before the others."""
WINDOWS_BEFORE_DEADLINE = 3
"""Number of its sources' longest windows that must be left before its deadline when it goes."""


class Oversize:
    """The oversize jobs of an event loop. Times are seconds of its clock.

    Thousands may wait, and every pump asks for them. So what is oversize, and when a job is due, is computed again only
    when estimates or limits have changed.
    """

    def __init__(self, upstreams: Mapping[str, Upstream], queue: ReadyQueue) -> None:
        self._upstreams = upstreams
        self._queue = queue
        self._jobs: dict[Job, float] = {}
        """Each job with the time at which it goes before the others."""
        self._bounds: list[Any] = []
        """What `take_fitting` depended on."""

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def add(self, job: Job) -> None:
        """Keep `job` until `queue_next` queues it."""
        job.last_problem = job.last_problem or "it may take more tokens than a whole window allows, so it goes last"
        self._jobs[job] = self._due_at(job)

    def discard(self, job: Job) -> None:
        """Forget `job`, if it is oversize."""
        self._jobs.pop(job, None)

    def take_fitting(self, now: float) -> list[Job]:
        """Remove and return the jobs that are not oversize any more, for a source that they may go to now."""
        if not self._jobs:
            return []
        bounds = [upstream.oversize_bounds for upstream in self._upstreams.values()]
        if bounds == self._bounds:
            return []
        self._bounds = bounds
        fitting = [
            job
            for job in self._jobs
            if not all(self._upstreams[name].oversize(job.request) for name in job.eligible(now))
        ]
        for job in fitting:
            del self._jobs[job]
        for job in self._jobs:
            self._jobs[job] = self._due_at(job)
        return fitting

    def queue_next(self, now: float) -> bool:
        """Queue the first job that may go now; return whether there was one."""
        if not self._jobs:
            return False
        idle = {name for name in self._upstreams if self._queue.first(name) is None}
        if not idle and min(self._jobs.values()) > now:
            return False
        for job, due_at in self._jobs.items():
            eligible = job.eligible(now)
            if eligible and (now >= due_at or eligible.issubset(idle)):
                del self._jobs[job]
                self._queue.push(job, eligible)
                return True
        return False

    def next_due_at(self, now: float) -> float:
        """The next time at which a job goes before the others; infinity if there is none."""
        return min((due_at for due_at in self._jobs.values() if due_at > now), default=math.inf)

    def _due_at(self, job: Job) -> float:
        windows_s = max((self._upstreams[name].quota.per_window()[1] for name in job.call.sources), default=0.0)
        half = job.submitted_at + PATIENCE * (job.deadline_at - job.submitted_at)
        return max(job.submitted_at, min(half, job.deadline_at - WINDOWS_BEFORE_DEADLINE * windows_s))
