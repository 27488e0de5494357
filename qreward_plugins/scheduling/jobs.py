"""A job: one sample on its way to its outcome, and the order in which jobs are served.

Jobs that were tried before come first, because the batch waits for its last reward and they are already late; then the
longest expected first, because a long job started last is what a batch waits for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from ..judges.base import Judge
from ..samples import Outcome, Sample, Usage
from ..sources.base import Request


@dataclass(eq=False, slots=True)
class Job:
    """One sample on its way to its outcome. Times are seconds of the event loop's clock."""

    sample: Sample
    judge: Judge
    future: asyncio.Future[Outcome]
    submitted_at: float
    deadline_at: float
    request: Request
    sequence: int
    size: int

    attempts: int = 0
    failures: int = 0
    invalid: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float = 0.0
    barred: set[str] = field(default_factory=set)
    """Sources that will never answer this sample."""
    rested_at: dict[str, float] = field(default_factory=dict)
    """Sources that failed this sample, and when they may be asked again; other sources may at once."""
    invalid_at: set[str] = field(default_factory=set)
    """Sources that gave an invalid verdict."""
    last_problem: str = ""
    last_source: str = ""
    entry: int = 0
    """The job's live entry in the queue; 0: it is not queued."""
    deadline_timer: asyncio.TimerHandle | None = None
    rest_timer: asyncio.TimerHandle | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        return (0 if self.attempts else 1, -self.size, self.sequence)

    def eligible(self, now: float) -> frozenset[str]:
        """The sources that this job may go to now, as far as its own history says."""
        return frozenset(
            name for name in self.judge.sources if name not in self.barred and self.rested_at.get(name, now) <= now
        )


class ReadyQueue:
    """Jobs that wait for a source, in order, whatever sources each of them may go to.

    Jobs with the same set of eligible sources share a heap, so that finding the first job that some open source may
    serve looks at one head per set and never scans the jobs that cannot go anywhere now.
    """

    def __init__(self) -> None:
        self._heaps: dict[frozenset[str], list[tuple[tuple[int, int, int], int, Job]]] = {}
        self._entries = itertools.count(1)
        self._live = 0
        self._stale = 0

    def __len__(self) -> int:
        return self._live

    def push(self, job: Job, eligible: frozenset[str]) -> None:
        """Queue `job` for the sources of `eligible`; an entry it had before no longer counts."""
        self.discard(job)
        job.entry = next(self._entries)
        self._live += 1
        heapq.heappush(self._heaps.setdefault(eligible, []), (job.order, job.entry, job))

    def discard(self, job: Job) -> None:
        """Take `job` out of the queue, if it is in."""
        if job.entry:
            job.entry = 0
            self._live -= 1
            self._stale += 1
            if self._stale > 64 and self._stale > self._live:
                self._compact()

    def pop(self, open_sources: Collection[str]) -> tuple[Job, frozenset[str]] | None:
        """Take the first job that a source of `open_sources` may serve, with the set it was queued for."""
        best: frozenset[str] | None = None
        for eligible in self._heads():
            heap = self._heaps[eligible]
            if not eligible.isdisjoint(open_sources) and (best is None or heap[0][0] < self._heaps[best][0][0]):
                best = eligible
        if best is None:
            return None
        job = heapq.heappop(self._heaps[best])[2]
        job.entry = 0
        self._live -= 1
        return job, best

    def waiting_for(self, source: str) -> Job | None:
        """The first job that `source` may serve, left in the queue."""
        heads = [self._heaps[eligible][0] for eligible in self._heads() if source in eligible]
        return min(heads)[2] if heads else None

    def _heads(self) -> list[frozenset[str]]:
        """The sets that have jobs, with each head being a live entry."""
        occupied = []
        for eligible, heap in list(self._heaps.items()):
            while heap and heap[0][2].entry != heap[0][1]:
                heapq.heappop(heap)
                self._stale -= 1
            if heap:
                occupied.append(eligible)
            else:
                del self._heaps[eligible]
        return occupied

    def _compact(self) -> None:
        for eligible, heap in list(self._heaps.items()):
            heap[:] = [item for item in heap if item[2].entry == item[1]]
            heapq.heapify(heap)
            if not heap:
                del self._heaps[eligible]
        self._stale = 0
