"""Time slices: how long a call of a local function may keep other samples waiting.

A function hangs on some samples, and these are often the longest, which go first. Were each of them given its whole
time limit while others wait, a few would take all workers for minutes, and samples that need milliseconds would miss
their deadlines. So a call that takes far longer than usual is ended when somebody waits for its place. Its sample is
tried once more when nobody waits, with the whole time limit, in case that it is merely slow.

Times are seconds of the event loop's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from .attempts import Attempt
from .jobs import Job
from .lane import Lane
from .queue import ReadyQueue

USUAL_TIMES = 8.0
"""Multiple of the expected latency that a call may take while others wait."""
SHORTEST_SLICE_S = 5.0
"""Seconds that any call may take: a worker that has just started may still have modules to import."""
FIRST_SLICE_S = 15.0
"""Seconds that a call may take where no call has ended yet, so that nothing is known of what is usual."""
MOST_DOUBLINGS = 10
LAST_TRY_KEEPS_WAITING = 0.1
"""Part of the time to its deadline that a sample waits, before a last try is ended for it."""


class TimeSlices:
    """Finds the calls whose time slice is over while others wait. `on_over` is called with each, and ends it."""

    def __init__(
        self, lanes: Mapping[str, Lane], queue: ReadyQueue, *, on_over: Callable[[Attempt, float], None]
    ) -> None:
        self._lanes = [lane for lane in lanes.values() if lane.local]
        self._queue = queue
        self._on_over = on_over

    def advance(self, now: float) -> float:
        """End what is over now; return when to look again at the latest."""
        wake_at = math.inf
        for lane in self._lanes:
            if lane.quota.in_flight < lane.quota.concurrency:
                continue
            waiting = self._queue.first(lane.name)
            if waiting is None or waiting.suspect:
                continue
            for attempt in list(lane.live):
                due_at = self._due_at(attempt, lane, waiting)
                if due_at <= now:
                    self._on_over(attempt, now)
                else:
                    wake_at = min(wake_at, due_at)
        return wake_at

    def _due_at(self, attempt: Attempt, lane: Lane, waiting: Job) -> float:
        """When `attempt` has to make room; infinity: it has not begun, or is being ended."""
        if attempt.result or attempt.rescued:
            return math.inf
        slice_s = FIRST_SLICE_S
        if lane.speed.known:
            slice_s = max(SHORTEST_SLICE_S, USUAL_TIMES * lane.speed.expected_s(attempt.job.size))
        # Where nothing ends any more, the slices may be too short: workers that start anew have to import again.
        rounds = lane.set_aside // max(1, lane.quota.concurrency)
        due_at = attempt.sent_at + slice_s * 2.0 ** min(rounds, MOST_DOUBLINGS)
        if attempt.job.suspect:
            patience_s = LAST_TRY_KEEPS_WAITING * (waiting.deadline_at - waiting.submitted_at)
            due_at = max(due_at, waiting.submitted_at + patience_s)
        return due_at
