"""Probing: which sample probes a source with an open circuit breaker, and when.

A source is probed as long as samples wait for it, whatever other sources there are. Two things bound the pace: probes
take a small part of the source's limits, and the samples' free tries have to last until their deadlines. If no sample
can be to blame (nothing was sent, or several samples failed and none was answered), a probe costs no free try. Each
probe is a different sample where possible, because one sample may have caused the failures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from .attempts import Attempt
from .breaker import LONGEST_COOLDOWN_S
from .jobs import Job
from .queue import ReadyQueue
from .upstream import Upstream

SHORTEST_PACE_S = 0.5
"""Shortest pace: seconds from one probe to the next."""
LONGEST_PACE_S = 10.0
"""Longest pace that the source's limits alone may require, and for samples that failed while others were answered: they
are more likely to blame than the source."""
LONGEST_FREE_PACE_S = 1.0
"""Longest pace where probes cost no free tries. A refused connection a second costs nothing, and a source that recovers
shortly before a deadline must still be used."""
LONGEST_SPARING_PACE_S = 30.0
"""Longest pace where free tries are saved, if there are more than `SCARCE`."""
SHARE_OF_LIMIT = 0.2
"""Share of the source's request limit that probes may take. The rest is left for the moment when it recovers."""
FIRST_PACE_S = 1.0
"""Pace of the first probes where few samples wait. It doubles until their free tries last until their deadlines."""
FIRST_ROOM_S = 5.0
"""Age at which an overdue probe is given up for the next one, if probes take the source's whole concurrency. It doubles
each time, so that a source that has become slow can answer."""
SCARCE = 3
"""From this number of free tries left, the pace is a large part of the time to the deadline."""
STRETCH = 0.3
"""Largest part by which a pace is lengthened."""
_GOLDEN = 0.6180339887
_LOOKED_AT = 64
"""Waiting samples whose free tries and deadlines decide the pace."""


class Probing:
    """Decides for all sources of an event loop. `on_overdue` is called with each probe to give up, and the time.
    Times are seconds of the event loop's clock."""

    def __init__(
        self, upstreams: Mapping[str, Upstream], queue: ReadyQueue, *, on_overdue: Callable[[Attempt, float], None]
    ) -> None:
        self._on_overdue = on_overdue
        self.wake_at = math.inf
        """Time by which `look` has to be called again."""
        self._upstreams = upstreams
        self._queue = queue

    def look(self, now: float) -> None:
        """Update which open sources are needed and how fast they are probed, and give up overdue probes."""
        self.wake_at = math.inf
        for upstream in self._upstreams.values():
            if upstream.breaker.closed:
                continue
            upstream.breaker.needed = self._needed(upstream)
            if upstream.breaker.needed:
                upstream.breaker.pace_s = self._pace_s(upstream, now) * _stretch(upstream)
                if upstream.quota.in_flight >= upstream.quota.concurrency:
                    self._make_room(upstream, now)

    def _make_room(self, upstream: Upstream, now: float) -> None:
        oldest = next((attempt for attempt in upstream.live if attempt.superseded and not attempt.given_up), None)
        if oldest is None:
            return
        due_at = oldest.started_at + FIRST_ROOM_S * 2.0 ** min(upstream.breaker.given_up, 10)
        if due_at <= now:
            upstream.breaker.given_up += 1
            self._on_overdue(oldest, now)
        else:
            self.wake_at = min(self.wake_at, due_at)

    def choose(self, upstream: Upstream, now: float) -> Job | None:
        """The sample that probes `upstream`, None if none waits: one that is not suspect and has not failed there, if
        there is one, then the most free tries left, then the shortest. If its tokens do not fit yet, the one that fits
        first.
        """
        failing = upstream.breaker.failing

        def order(job: Job) -> tuple[object, ...]:
            return (
                job.suspect,
                job.sequence in failing,
                -job.probes_left,
                job.excused,
                job.size,
                job.sequence,
            )

        def wait_s(job: Job) -> float:
            return upstream.quota.wait_s(min(upstream.tokens(job.request), upstream.quota.most_tokens), now)

        job = min(self._queue.jobs(upstream.name), key=order, default=None)
        if job is None or wait_s(job) <= 0:
            return job
        return min(self._queue.jobs(upstream.name), key=lambda other: (wait_s(other), *order(other)))

    def _needed(self, upstream: Upstream) -> bool:
        """Whether a job waits for `upstream`. One that answers mostly nonsense is left alone if another can take it."""
        job = self._queue.first(upstream.name)
        if job is None or not upstream.health.degraded:
            return job is not None
        others = (self._upstreams[name] for name in set(job.call.sources) - job.barred - {upstream.name})
        return not any(other.breaker.closed and not other.health.unusable for other in others)

    def _pace_s(self, upstream: Upstream, now: float) -> float:
        if upstream.health.refusing:
            return 0.0
        jobs = list(itertools.islice(self._queue.jobs(upstream.name), _LOOKED_AT))
        if upstream.breaker.is_doubted_by_few({job.sequence for job in jobs}):
            return 0.0
        rate_per_s = upstream.quota.rate_per_s * SHARE_OF_LIMIT
        least_s = min(max(SHORTEST_PACE_S, 1 / rate_per_s if rate_per_s > 0 else math.inf), LONGEST_PACE_S)
        growing_s: float = FIRST_PACE_S * 2.0 ** min(upstream.breaker.probes, 10)
        if upstream.health.down_for_all:
            return max(least_s, min(growing_s, LONGEST_FREE_PACE_S))
        if all(job.failed_at < upstream.health.answered_at for job in jobs):
            return max(least_s, min(growing_s, LONGEST_PACE_S))
        left = sum(max(0, job.probes_left) for job in jobs)
        left_s = max((job.deadline_at - now for job in jobs), default=0.0)
        if not left:
            return LONGEST_COOLDOWN_S
        if left <= SCARCE:
            return max(least_s, min(left_s / 2.0**left, LONGEST_COOLDOWN_S))
        return max(least_s, min(growing_s, left_s / (2 * left), LONGEST_SPARING_PACE_S))


def _stretch(upstream: Upstream) -> float:
    """A factor of the pace that differs from probe to probe, so that probes do not keep step with a source that is up
    and down by turns. Multiples of the golden ratio spread evenly, and are the same for the same schedule.
    """
    return 1 + STRETCH * (upstream.requests * _GOLDEN % 1)
