"""Time slices: how long a call of a local function may keep other samples waiting.

Some samples make a function hang. A few of them could take all workers for their whole time limit, while samples that
need milliseconds miss their deadlines. So a call that takes far longer than usual is ended when another sample waits
for its worker. Its sample is tried once more when none waits, with the whole time limit, because it may only be slow.

These last tries would take the workers one after another, each for a whole time limit. So they run together, as far as
the source has spare workers for them, in addition to those that the other samples need.

Times are seconds of the event loop's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .attempts import Attempt
from .jobs import Job
from .queue import ReadyQueue
from .upstream import Upstream

USUAL_TIMES = 8.0
"""Multiple of the expected latency that a call may take while others wait: its slice."""
SHORTEST_SLICE_S = 5.0
"""Shortest slice: a worker that has just started may still be importing modules."""
FIRST_SLICE_S = 15.0
"""Slice while no call has ended yet, so that the usual latency is unknown."""
MOST_DOUBLINGS = 10
"""How often the slice doubles at most while no call ends."""
LAST_TRY_KEEPS_WAITING = 0.1
"""Patience of a waiting sample before another's last try is ended, as a share of its whole time to the deadline."""


class TimeSlices:
    """Finds calls whose time slice is over while others wait, and last tries that a spare worker can run.

    `on_slice_over` is called with the attempt of each such call and the time; it ends the attempt. `on_spare` is
    called with the job of each such try, its source and the time; it starts the try.
    """

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        queue: ReadyQueue,
        *,
        on_slice_over: Callable[[Attempt, float], None],
        on_spare: Callable[[Job, Upstream, float], None],
    ) -> None:
        self._upstreams = upstreams
        self._queue = queue
        self._on_slice_over = on_slice_over
        self._on_spare = on_spare

    def advance(self, now: float) -> float:
        """End the calls whose slice is over at `now`; return the time by which to call this again."""
        wake_at = math.inf
        for upstream in self._upstreams.values():
            if not upstream.sliced or upstream.quota.in_flight < upstream.quota.concurrency:
                continue
            waiting = self._queue.first(upstream.name)
            if waiting is None:
                continue
            if waiting.suspect:
                self._start_on_spare(upstream, now)
                continue
            for attempt in list(upstream.live):
                due_at = self._due_at(attempt, upstream, waiting)
                if due_at <= now:
                    self._on_slice_over(attempt, now)
                else:
                    wake_at = min(wake_at, due_at)
        return wake_at

    def _start_on_spare(self, upstream: Upstream, now: float) -> None:
        for _ in range(upstream.free_spares):
            job = self._queue.first(upstream.name)
            if job is None or not job.faults:
                return
            self._queue.discard(job)
            self._on_spare(job, upstream, now)

    def _due_at(self, attempt: Attempt, upstream: Upstream, waiting: Job) -> float:
        """When `attempt` has to make room; infinity if it takes none, has not been sent yet, or is being ended."""
        if attempt.result or attempt.given_up or attempt.reservation.spare:
            return math.inf
        slice_s = FIRST_SLICE_S
        if upstream.speed.known:
            slice_s = max(SHORTEST_SLICE_S, USUAL_TIMES * upstream.speed.expected_s(attempt.size))
        # If no call ends any more, the slices may be too short: every new worker has to import its modules first.
        rounds = upstream.preempted // max(1, upstream.quota.concurrency)
        due_at = attempt.sent_at + slice_s * 2.0 ** min(rounds, MOST_DOUBLINGS)
        if attempt.job.suspect:
            patience_s = LAST_TRY_KEEPS_WAITING * (waiting.deadline_at - waiting.submitted_at)
            due_at = max(due_at, waiting.submitted_at + patience_s)
        return due_at
