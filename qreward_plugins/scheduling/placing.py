"""Starts the attempts that may go now: by the planner, or without it if it fails with a bug."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from .arrivals import Arrivals
from .jobs import Job
from .planner import Planner
from .running import Running
from .slices import TimeSlices
from .undecided import Undecided
from .upstream import Upstream
from .waiting import Waiting

SAFE_WAKE_S = 0.25
"""Seconds between two steps while the planner fails with a bug."""


class Start(Protocol):
    """Starts an attempt of a job at a source."""

    def __call__(self, job: Job, upstream: Upstream, now: float, *, hedge: bool) -> None: ...


class Placing:
    """Starts attempts of `jobs`. `on_bug` ends a job that cannot be placed."""

    def __init__(
        self,
        jobs: Collection[Job],
        upstreams: Mapping[str, Upstream],
        planner: Planner,
        *,
        arrivals: Arrivals,
        waiting: Waiting,
        running: Running,
        undecided: Undecided,
        slices: TimeSlices,
        start: Start,
        on_bug: Callable[[Job, Exception], None],
    ) -> None:
        self._jobs = jobs
        self._upstreams = upstreams
        self._planner = planner
        self._arrivals = arrivals
        self._waiting = waiting
        self._running = running
        self._undecided = undecided
        self._slices = slices
        self._start = start
        self._on_bug = on_bug

    def place(self, now: float) -> float:
        """Start everything that may go now; return the time by which to do it again."""
        self._arrivals.queue(now)
        self._waiting.queue_fitting(now)
        for job, upstream, hedge in self._planner.placements(now, in_flight=lambda: len(self._running)):
            self._start(job, upstream, now, hedge=hedge)
        self._waiting.queue_oversize(now)
        if self._undecided:
            self._undecided.decide(others_live=False)
        return min(self._planner.wake_at, self._waiting.next_due_at(now), self._slices.advance(now))

    def place_plainly(self, now: float) -> float:
        """Place jobs without the planner: in order of submission, at the first source that can take each. Return the
        time by which to do it again.
        """
        for job in list(self._jobs):
            if job.live or job.undecided or job.ended:
                continue
            try:
                for name in sorted(job.eligible(now)):
                    upstream = self._upstreams[name]
                    if not upstream.too_large(job.request) and upstream.wait_s(upstream.tokens(job.request), now) <= 0:
                        self._waiting.discard(job)
                        self._start(job, upstream, now, hedge=False)
                        break
                else:
                    if job not in self._waiting:  # because of the bug
                        self._waiting.enqueue(job)
            except Exception as error:
                self._on_bug(job, error)
        return now + SAFE_WAKE_S if self._jobs else float("inf")
