"""Starts the attempts that may go now: by the planner, or without it if it fails with a bug.

A single call with rules of its own (`Call.rules`) and without hedges needs no planner while nothing waits and its
source has room to spare: whatever comes next gets a place as well, so no order is to be kept. It starts where it is
submitted.
"""

from __future__ import annotations

import math
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
ROOM_TO_SPARE = 2
"""Calls that a source must have room for, so that one of them may start without the planner."""


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

    def at_once(self, job: Job, now: float) -> Upstream | None:
        """The source at which a job that was just submitted may start without the planner; None: it has to wait for
        the next step.
        """
        rules = job.call.rules
        if rules is None or rules.hedges or job.batch.together or len(job.call.sources) != 1:
            # Hedges are the planner's.
            return None
        upstream = self._upstreams[job.call.sources[0]]
        quota = upstream.quota
        ready = not (
            self._planner.queue
            or self._arrivals
            or upstream.request_batches is not None
            or quota.most_tokens < math.inf
            or quota.valid_until < math.inf  # other processes have to learn first what waits here
            or not upstream.breaker.closed
        )
        return upstream if ready and upstream.has_room(ROOM_TO_SPARE, now) else None

    def place(self, now: float) -> float:
        """Start everything that may go now; return the time by which to do it again."""
        if not self._jobs and not len(self._running) and self._planner.nothing_to_plan(now, under_way=False):
            return math.inf
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
