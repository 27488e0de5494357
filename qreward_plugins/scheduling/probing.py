"""Probing: which sample asks a source that failed, and when.

A source that no other can stand in for is probed as long as something waits for it. The pace is set by what it costs:
a small part of the source's limits, and no more free tries of the samples than they have for the time until their
deadlines. Each probe is another sample, as long as there are others: what failed may have failed because of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from .attempts import Attempt
from .breaker import LONGEST_PAUSE_S
from .jobs import Job
from .lane import Lane
from .queue import ReadyQueue

SHORTEST_PACE_S = 0.5
LONGEST_PACE_S = 10.0
"""The most that the source's limits alone may keep a probe waiting."""
SHARE_OF_LIMIT = 0.2
"""Part of the requests that a source allows which probes may take, so that a source that is well again can be used."""
FIRST_PACE_S = 1.0
"""Pace of the first probes where few samples wait; it doubles until their tries last until their deadlines."""
FIRST_ROOM_S = 5.0
"""Age from which an overdue probe is given up for the next one, where probes take all places that a source has. It
doubles each time: a source that has become slow must get to answer."""
SCARCE = 3
"""Free tries that are left from which on each next pause is a good part of the time to the deadline."""
_LOOKED_AT = 64


class Probing:
    """Decides for all sources of an event loop. `on_lost` is called with overdue probes that must make room. Times are
    seconds of the event loop's clock.
    """

    def __init__(
        self, lanes: Mapping[str, Lane], queue: ReadyQueue, *, on_lost: Callable[[Attempt, float], None]
    ) -> None:
        self._on_lost = on_lost
        self.wake_at = math.inf
        """When to look again at the latest."""
        self._lanes = lanes
        self._queue = queue

    def look(self, now: float) -> None:
        """Find out which open sources are needed, and how soon each may be asked again."""
        self.wake_at = math.inf
        for lane in self._lanes.values():
            if lane.breaker.closed:
                continue
            lane.breaker.needed = any(self._only(lane, job) for job in self._queue.heads(lane.name))
            if lane.breaker.needed:
                lane.breaker.pace_s = self._pace_s(lane, now)
                if lane.quota.in_flight >= lane.quota.concurrency:
                    self._make_room(lane, now)

    def _make_room(self, lane: Lane, now: float) -> None:
        oldest = next((attempt for attempt in lane.live if attempt.superseded and not attempt.rescued), None)
        if oldest is None:
            return
        due_at = oldest.started_at + FIRST_ROOM_S * 2.0 ** min(lane.breaker.given_up, 10)
        if due_at <= now:
            lane.breaker.given_up += 1
            self._on_lost(oldest, now)
        else:
            self.wake_at = min(self.wake_at, due_at)

    def choose(self, lane: Lane) -> Job | None:
        """The sample that probes `lane`: one that has not failed there, with the most free tries left, and short."""
        failing = lane.breaker.failing
        return min(
            self._queue.jobs(lane.name),
            key=lambda job: (job.suspect, job.sequence in failing, -job.probes_left, job.size, job.sequence),
            default=None,
        )

    def _only(self, lane: Lane, job: Job) -> bool:
        """Whether no other source can take `job`."""
        others = (self._lanes[name] for name in job.judge.sources if name != lane.name and name not in job.barred)
        return not any(other.breaker.closed and not other.unusable for other in others)

    def _pace_s(self, lane: Lane, now: float) -> float:
        if lane.in_doubt:
            return 0.0
        jobs = list(itertools.islice(self._queue.jobs(lane.name), _LOOKED_AT))
        if lane.breaker.is_doubted_by_few({job.sequence for job in jobs}):
            return 0.0
        rate_per_s = lane.quota.rate_per_s * SHARE_OF_LIMIT
        least_s = min(max(SHORTEST_PACE_S, 1 / rate_per_s if rate_per_s > 0 else math.inf), LONGEST_PACE_S)
        left = sum(max(0, job.probes_left) for job in jobs)
        left_s = max((job.deadline_at - now for job in jobs), default=0.0)
        if not left:
            return LONGEST_PAUSE_S
        if left <= SCARCE:
            return max(least_s, min(left_s / 2.0**left, LONGEST_PAUSE_S))
        growing_s: float = FIRST_PACE_S * 2.0 ** min(lane.breaker.probes, 10)
        return max(least_s, min(growing_s, left_s / (2 * left)))
