"""Hedges of calls with fixed rules: another attempt at the same source, after a delay that is fixed or learned.

`hedging.py` looks for another source that would answer sooner. A function has no other source, but a second call of it
may be quicker, because the first one hangs at a slow server behind it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping

from .attempts import Attempt
from .forecast import Forecast
from .hedging import LEAST_HEDGES, WORTH
from .jobs import Job
from .queue import ReadyQueue
from .upstream import Upstream

FIRST_LOOK_S = 0.05
"""Least age, in seconds, at which an attempt is hedged by a learned delay: shorter ones are noise of the event loop."""
_LATER = 1.25
"""Factor from one age at which an attempt is checked to the next."""
_AGAIN_S = 0.05
"""Seconds until the next check of a hedge that the limits do not allow now."""


class TimedHedges:
    """Chooses hedges of calls with rules. None takes the place that a job of higher priority waits for. Times are
    seconds of the event loop's clock.
    """

    def __init__(self, upstreams: Mapping[str, Upstream], queue: ReadyQueue, forecast: Forecast) -> None:
        self._upstreams = upstreams
        self._queue = queue
        self._forecast = forecast
        self._coming: list[tuple[float, int, Attempt]] = []
        self._numbers = itertools.count()

    @property
    def wake_at(self) -> float:
        """Time by which to call `choose` again."""
        return self._coming[0][0] if self._coming else math.inf

    def watch(self, attempt: Attempt) -> None:
        """Check an attempt when it has taken long."""
        rules = attempt.job.call.rules
        if rules is None or not rules.hedges:
            return
        self._push(attempt.started_at + _first_s(attempt), attempt)
        if len(self._coming) > 64 and len(self._coming) > 4 * sum(len(each.live) for each in self._upstreams.values()):
            # Most attempts end before they are checked.
            self._coming = [item for item in self._coming if not item[2].result]
            heapq.heapify(self._coming)

    def ended(self, attempt: Attempt) -> None:
        """Check the other attempts of its call again: a hedge that failed helps none of them."""
        job = attempt.job
        if attempt.result == "failed" and not job.ended and job.live:
            youngest = job.live[-1]
            self._push(max(job.not_before, youngest.started_at + _first_s(youngest)), youngest)

    def close(self) -> None:
        """Forget every attempt."""
        self._coming.clear()

    def choose(self, now: float) -> Iterator[tuple[Job, Upstream]]:
        """The hedges to start now."""
        while self._coming and self._coming[0][0] <= now:
            attempt = heapq.heappop(self._coming)[2]
            job, rules, upstream = attempt.job, attempt.job.call.rules, attempt.upstream
            if attempt.result or attempt.given_up or job.ended or job.begun or rules is None:
                continue
            if job.hedges >= rules.hedges or job.live[-1] is not attempt:
                # A younger attempt of the call is checked instead.
                continue
            if rules.hedge_after_s is None and not self._worth(attempt, now):
                self._push(attempt.started_at + max(_LATER * (now - attempt.started_at), FIRST_LOOK_S), attempt)
                continue
            allowed = job.batch.hedges + 1 <= max(LEAST_HEDGES, rules.hedge_budget * job.batch.jobs)
            free = upstream.breaker.closed and upstream.wait_s(0, now) <= 0
            if not (allowed and free) or self._queue.higher_waits(upstream.name, job):
                self._push(now + _AGAIN_S, attempt)
                continue
            job.hedges += 1
            job.batch.hedges += 1
            yield job, upstream

    def _push(self, at: float, attempt: Attempt) -> None:
        heapq.heappush(self._coming, (at, next(self._numbers), attempt))

    def _worth(self, attempt: Attempt, now: float) -> bool:
        """Whether a new attempt is likely to end before this one, by the ages at which others have ended."""
        if not attempt.upstream.speed.settled:
            return False
        self._forecast.update(attempt)
        return WORTH * attempt.expected_s <= self._forecast.left_s(attempt, now)


def _first_s(attempt: Attempt) -> float:
    """Age, in seconds, at which an attempt is checked first."""
    rules = attempt.job.call.rules
    if rules is not None and rules.hedge_after_s is not None:
        return rules.hedge_after_s
    return max(FIRST_LOOK_S, attempt.expected_s if attempt.upstream.speed.settled else 0.0)
