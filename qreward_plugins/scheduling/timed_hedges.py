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
from .batches import Batch
from .forecast import Forecast
from .hedging import LEAST_HEDGES, WORTH
from .jobs import Job
from .queue import ReadyQueue
from .upstream import Upstream

FIRST_LOOK_S = 0.05
"""Least age, in seconds, at which an attempt is hedged by a learned delay: shorter ones are noise of the event loop."""
_LATER = 1.25
"""Factor from one age at which an attempt is checked to the next."""


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
        self._ready: dict[tuple[int, str], dict[Attempt, None]] = {}
        """Attempts whose time has come, by priority and source. They wait for room at the source, and for jobs of
        higher priority."""
        self._over_budget: dict[Batch, dict[Attempt, None]] = {}
        """Attempts whose time has come, but whose batch has made all hedges that it may make."""
        self._room_at = math.inf
        """Time at which a source with attempts that are ready has room, as far as time alone gives it."""

    @property
    def wake_at(self) -> float:
        """Time by which to call `choose` again. It is called again on every event besides: what hedges wait for may
        have changed.
        """
        return min(self._coming[0][0], self._room_at) if self._coming else self._room_at

    @property
    def watching(self) -> bool:
        """Whether an attempt may be hedged, now or later; ended ones count until they are forgotten."""
        return bool(self._coming or self._ready or self._over_budget)

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
        job, rules = attempt.job, attempt.job.call.rules
        if rules is None or not rules.hedges:
            return
        for waiting in (self._over_budget.get(job.batch), self._ready.get(_line(attempt))):
            if waiting is not None:
                waiting.pop(attempt, None)
        if attempt.result == "failed" and not job.ended and job.live:
            youngest = job.live[-1]
            self._push(max(job.not_before, youngest.started_at + _first_s(youngest)), youngest)

    def close(self) -> None:
        """Forget every attempt."""
        self._coming.clear()
        self._ready.clear()
        self._over_budget.clear()

    def choose(self, now: float) -> Iterator[tuple[Job, Upstream]]:
        """The hedges to start now."""
        self._look(now)
        self._room_at = math.inf
        for line in sorted(self._ready):
            attempts = self._ready[line]
            while attempts:
                attempt = next(iter(attempts))
                job, upstream = attempt.job, attempt.upstream
                if _wanted(attempt) and _affordable(attempt):
                    wait_s = upstream.wait_s(0, now)
                    if wait_s > 0:
                        self._room_at = min(self._room_at, now + wait_s)
                    if wait_s > 0 or not upstream.breaker.closed or self._queue.higher_waits(upstream.name, job):
                        break
                del attempts[attempt]
                if not _wanted(attempt):
                    continue
                if not _affordable(attempt):
                    self._over_budget.setdefault(job.batch, {})[attempt] = None
                    continue
                job.hedges += 1
                job.batch.hedges += 1
                yield job, upstream
            if not attempts:
                del self._ready[line]

    def _look(self, now: float) -> None:
        """Find the attempts whose time has come."""
        for batch in list(self._over_budget):
            attempts = self._over_budget[batch]
            if not attempts or _affordable(next(iter(attempts))):
                del self._over_budget[batch]
                for attempt in attempts:
                    self._ready.setdefault(_line(attempt), {})[attempt] = None
        while self._coming and self._coming[0][0] <= now:
            attempt = heapq.heappop(self._coming)[2]
            if not _wanted(attempt):
                continue
            rules = attempt.job.call.rules
            if rules is not None and rules.hedge_after_s is None and not self._worth(attempt, now):
                self._push(attempt.started_at + max(_LATER * (now - attempt.started_at), FIRST_LOOK_S), attempt)
                continue
            self._ready.setdefault(_line(attempt), {})[attempt] = None

    def _push(self, at: float, attempt: Attempt) -> None:
        heapq.heappush(self._coming, (at, next(self._numbers), attempt))

    def _worth(self, attempt: Attempt, now: float) -> bool:
        """Whether a new attempt is likely to end before this one, by the ages at which others have ended."""
        if not attempt.upstream.speed.settled:
            return False
        self._forecast.update(attempt)
        return WORTH * attempt.expected_s <= self._forecast.left_s(attempt, now)


def _wanted(attempt: Attempt) -> bool:
    """Whether its call may still be hedged. Of several attempts of a call, only the youngest one is checked."""
    job, rules = attempt.job, attempt.job.call.rules
    if attempt.result or attempt.given_up or job.ended or job.begun or rules is None:
        return False
    return job.hedges < rules.hedges and job.live[-1] is attempt


def _affordable(attempt: Attempt) -> bool:
    """Whether the budget of its batch has room for a hedge."""
    batch, rules = attempt.job.batch, attempt.job.call.rules
    return rules is not None and batch.hedges + 1 <= max(LEAST_HEDGES, rules.hedge_budget * batch.jobs)


def _line(attempt: Attempt) -> tuple[int, str]:
    return attempt.job.rank.priority, attempt.upstream.name


def _first_s(attempt: Attempt) -> float:
    """Age, in seconds, at which an attempt is checked first."""
    rules = attempt.job.call.rules
    if rules is not None and rules.hedge_after_s is not None:
        return rules.hedge_after_s
    return max(FIRST_LOOK_S, attempt.expected_s if attempt.upstream.speed.settled else 0.0)
