"""Arrivals: jobs that were submitted and are not queued yet.

The jobs of a batch are ordered together, so that the longest go first. So the first of them wait here until the journal
was searched for the whole batch: only then is it known which of its samples have to be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from .batches import Batch
from .jobs import Job
from .planner import Planner


class Arrivals:
    """The arrived jobs of an event loop.

    `enqueue` queues a job. `on_bug` is called with a job that cannot be queued, and the error; `log_bug` with what
    failed for a whole batch, and the error: its jobs are then queued in the order in which they came.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        enqueue: Callable[[Job], None],
        on_bug: Callable[[Job, Exception], None],
        log_bug: Callable[[str, Exception], None],
    ) -> None:
        self._planner = planner
        self._enqueue = enqueue
        self._on_bug = on_bug
        self._log_bug = log_bug
        self._arrived: list[Job] = []

    def __bool__(self) -> bool:
        return bool(self._arrived)

    @property
    def jobs(self) -> Set[Job]:
        """The jobs that are not queued yet. Some of them may have ended."""
        return set(self._arrived)

    def add(self, job: Job) -> None:
        """Accept a job, which `queue` queues later."""
        self._arrived.append(job)

    def queue(self, now: float) -> None:
        """Order and queue all jobs but those of batches that the journal is still searched for."""
        if not self._arrived:
            return
        arrived, self._arrived = self._arrived, []
        by_batch: dict[Batch, list[Job]] = {}
        for job in arrived:
            if job.ended:
                continue
            if job.batch.together and job.batch.lookups and not job.batch.arranged:
                self._arrived.append(job)
            else:
                by_batch.setdefault(job.batch, []).append(job)
        for batch in by_batch:
            batch.arranged = True
        for jobs in by_batch.values():
            try:
                self._planner.arrange(jobs, now)
            except Exception as error:
                self._log_bug("a batch could not be ordered", error)
            for job in jobs:
                try:
                    self._enqueue(job)
                except Exception as error:
                    self._on_bug(job, error)
