"""Hedging: starts a second attempt at another source if the first one takes much longer than expected.

There are three kinds of hedges. Each has its own share of the budget, so that false alarms of one kind leave enough for
the next (in simulation, one shared budget made small batches take three times as long):

    soft     the sources have nothing else to do: the attempts that may end last are started once more, from half of
             their expected latency on, because the batch will wait for stragglers
    early    judged by its age, an attempt will take longer than a new one at another source. While jobs are queued,
             only if it would end after everything else, and as late as a hedge can still end with the others
    overdue  the same at several times the expected latency. The last part of the budget is kept for these

An attempt of a latency-sensitive member is hedged as if no jobs were queued. No hedge takes the place that a job of
higher priority waits for.

`latency.Tail` learns how much longer an attempt of a certain age will take. The first success ends the other attempts.

Jeffrey Dean and Luiz Andre Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator

from .attempts import Attempt
from .forecast import Forecast
from .health import SHORTEST_SILENCE_S
from .jobs import Job
from .preemption import GIVE_UP_AFTER_S
from .queue import ReadyQueue
from .upstream import Upstream, Upstreams

SOFT_AT = 0.5
"""Age, as a multiple of the expected latency, from which an attempt may get a soft hedge."""
SOFT_WITHIN = 2.0
"""Largest expected latency of a soft hedge, as a multiple of that of the attempt."""
DUE_AT = 1.0
"""Age from which an attempt may be given up, and its source be taken for silent."""
LATE_AT = 1.5
"""Age from which an attempt may be hedged while jobs are queued, if nothing else would end later."""
OVERDUE_AT = 3.0
"""Age from which an attempt is overdue."""
WORTH = 1.2
"""Factor on the expected latency of a hedge that must end before the first attempt."""
LEAST_AGE_S = 0.25
"""Least age, in seconds, of a hedged attempt: a pause of this process must not look like a slow source."""
LEAST_HEDGES = 4
"""Hedges that a batch may have whatever its size."""
LEAST_SOFT_HEDGES = 2
"""Soft hedges that a batch may have whatever its size."""
SOFT_PART = 0.4
"""Part of the hedge budget that soft hedges may use."""
EARLY_PART = 0.75
"""Part of the hedge budget that hedges of attempts which are not overdue may use."""
_STAGES = (0.25, SOFT_AT, 0.75, 1.0, 1.5, 2.0, OVERDUE_AT, 4.0, 6.0, 9.0)
"""Ages, as multiples of the expected latency, at which an attempt is checked."""
_FLOORS_S = (LEAST_AGE_S, SHORTEST_SILENCE_S, GIVE_UP_AFTER_S, math.inf)
"""Ages, in seconds, at which an attempt is checked as well: before them it counts as too young for some decision."""
_LATER = 1.5
"""After the last stage, factor from one age at which it is checked to the next."""
_SUPERSEDED_EVERY_S = 5.0
"""The same for an overdue probe, in seconds: it may be given up when no other job waits any more."""
_LEAST_COMPACTED = 64
"""Shortest list of checks from which ended attempts are removed."""
_EVERY_S = 0.05
"""Least time, in seconds, between two searches for hedges."""


class Hedges:
    """Chooses hedges, and counts them against the budget. Times are seconds of the event loop's clock."""

    def __init__(self, upstreams: Upstreams, queue: ReadyQueue, forecast: Forecast) -> None:
        self._upstreams = upstreams
        self._queue = queue
        self._forecast = forecast
        self.budget = 0.0
        """Most hedges of a batch, as a share of its samples."""
        self._fresh: deque[tuple[float, Attempt]] = deque()
        """Attempts that were not checked yet, by when that is due: they start in this order. Most end before."""
        self._coming: list[tuple[float, int, Attempt]] = []
        self._compact_at = _LEAST_COMPACTED
        self._numbers = itertools.count()
        self._looked_at = {False: -math.inf, True: -math.inf}
        self._urgent: dict[Attempt, None] = {}
        self.wake_at = math.inf
        """Time by which to call `advance` and `choose` again."""

    def watch(self, attempt: Attempt, now: float) -> None:
        """Check an attempt that has just started when it reaches its stages."""
        if attempt.job.member.latency_sensitive:
            self._urgent[attempt] = None
        due = now + LEAST_AGE_S
        self._fresh.append((due, attempt))
        if due < self.wake_at and (attempt.probe or not attempt.hedge):
            # Perhaps nothing else wakes the planner before the attempt is overdue. Beside a hedge, the first attempt is
            # watched.
            self.wake_at = due

    def _watch_on(self, attempt: Attempt, now: float) -> None:
        """Check an attempt again when it reaches the next of its stages."""
        age_s, expected_s = now - attempt.started_at, attempt.expected_s
        stage = bisect.bisect_right(_STAGES, age_s / expected_s)
        later_s = age_s + _SUPERSEDED_EVERY_S if attempt.superseded else _LATER * age_s
        stage_s = _STAGES[stage] * expected_s if stage < len(_STAGES) else later_s
        floor_s = _FLOORS_S[bisect.bisect_right(_FLOORS_S, age_s)]
        due = max(attempt.started_at + max(LEAST_AGE_S, min(stage_s, floor_s)), math.nextafter(now, math.inf))
        heapq.heappush(self._coming, (due, next(self._numbers), attempt))
        if len(self._coming) > self._compact_at:
            # Most attempts end before they are checked again.
            self._coming = [item for item in self._coming if not item[2].result]
            heapq.heapify(self._coming)
            self._compact_at = max(_LEAST_COMPACTED, 2 * len(self._coming))

    def ended(self, attempt: Attempt) -> None:
        """Forget a latency-sensitive attempt."""
        self._urgent.pop(attempt, None)

    def close(self) -> None:
        """Forget every attempt."""
        self._fresh.clear()
        self._coming.clear()
        self._urgent.clear()

    def advance(self, now: float) -> list[Attempt]:
        """The attempts that have reached their next stage, without those that an answer is not due for yet."""
        self.wake_at = self._next_at()
        if self.wake_at > now:
            return []
        aged, due = [], []
        while self._fresh and self._fresh[0][0] <= now:
            due.append(self._fresh.popleft()[1])
        while self._coming and self._coming[0][0] <= now:
            due.append(heapq.heappop(self._coming)[2])
        for attempt in due:
            if attempt.result or attempt.job.ended:
                continue
            if attempt.uncalibrated:
                attempt.expected_s = self._forecast.expected_s(attempt.upstream, attempt.size)
            self._watch_on(attempt, now)
            age = attempt.age(now)
            attempt.late, attempt.overdue = age >= LATE_AT, age >= OVERDUE_AT
            if age >= DUE_AT:
                aged.append(attempt)
        self.wake_at = self._next_at()
        return aged

    def _next_at(self) -> float:
        while self._fresh and self._fresh[0][1].result:
            self._fresh.popleft()
        first_at = self._fresh[0][0] if self._fresh else math.inf
        return min(first_at, self._coming[0][0]) if self._coming else first_at

    def choose(self, now: float, *, drained: bool) -> Iterator[tuple[Job, Upstream]]:
        """The hedges to start now. `drained`: no job is queued."""
        if not self.budget:
            return
        again_at = self._looked_at[drained] + _EVERY_S
        early = now < again_at
        if early:
            self.wake_at = min(self.wake_at, again_at)
            if drained or not self._urgent:
                return  # a place that is free now goes to a waiting job otherwise
        else:
            self._looked_at[drained] = now
        upstreams = self._upstreams.all
        live = self._urgent if early else itertools.chain.from_iterable(upstream.live for upstream in upstreams)
        # A source is asked again only beside an overdue attempt.
        only_overdue = len(upstreams) == 1
        late = [
            attempt
            for attempt in live
            if (attempt.overdue or not only_overdue)
            and now - attempt.started_at >= LEAST_AGE_S
            and (
                (drained and attempt.job.batch.quiet(now))
                or attempt.job.member.latency_sensitive
                or attempt.overdue
                or (attempt.late and not self._forecast.prefer_cost)
            )
            and not attempt.given_up
            and attempt.job.hedgeable
            and not self._forecast.guesses(attempt.upstream)
        ]
        for attempt in sorted(late, key=lambda attempt: attempt.started_at):  # in simulation, no other order is better
            job = attempt.job
            alone = drained or job.member.latency_sensitive
            upstream = self._upstream_for(attempt, now, drained=alone) if job.hedgeable else None
            if upstream is not None:
                job.hedges += 1
                job.batch.hedges += 1
                yield job, upstream

    def _upstream_for(self, attempt: Attempt, now: float, *, drained: bool) -> Upstream | None:
        job, batch = attempt.job, attempt.job.batch
        age, expected_s = attempt.age(now), attempt.expected_s
        part = 1.0 if attempt.overdue else EARLY_PART
        if batch.hedges + 1 > max(LEAST_HEDGES, part * self.budget * batch.jobs):
            return None
        left_s = self._forecast.left_s(attempt, now)
        others_end = math.inf if drained else self._forecast.end(attempt.upstream, now)
        if not drained and now + left_s < others_end:
            return None
        upstream, takes_s = self._quickest(job, now)
        if upstream is None:
            return None
        if not drained and not attempt.overdue and now + WORTH * takes_s < others_end:
            # There is still time to wait for its end. A hedge now would take quota from the queued jobs.
            return None
        if WORTH * takes_s <= left_s and all(self._forecast.left_s(other, now) > takes_s for other in job.live):
            return upstream
        if not drained or age < SOFT_AT or takes_s > SOFT_WITHIN * expected_s or len(job.live) > 1:
            return None
        if batch.soft_hedges + 1 > max(LEAST_SOFT_HEDGES, SOFT_PART * self.budget * batch.jobs):
            return None
        batch.soft_hedges += 1
        return upstream

    def _quickest(self, job: Job, now: float) -> tuple[Upstream | None, float]:
        """The source that would answer `job` soonest, of those that are not asked already, and in how many seconds.

        A source with an overdue attempt of `job` may be asked again if it answers others. None if no source can send it
        now, or if one that cannot would still answer sooner than those that can.
        """
        asked = {attempt.upstream.name for attempt in job.live if not attempt.overdue}
        # Nothing else wakes the planner when a source that failed this job may be asked again.
        self.wake_at = min(self.wake_at, max(job.next_backoff_end(now), now + _EVERY_S))
        best, best_s, starts_in_s = None, math.inf, 0.0
        for name in sorted(job.eligible(now) - asked):
            upstream = self._upstreams[name]
            if upstream.health.unusable or (not upstream.breaker.closed and job.probes_left <= 0):
                continue
            if self._queue.higher_waits(name, job):
                continue
            if upstream.local and any(attempt.upstream is upstream for attempt in job.live):
                # A function would hang again on the same sample, and hold a second worker.
                continue
            wait_s = self._forecast.wait_s(upstream, job, now)
            takes_s = wait_s + self._forecast.expected_s(upstream, job.size)
            if takes_s < best_s:
                best, best_s, starts_in_s = upstream, takes_s, wait_s
        if best is not None and best.wait_for_s(job, now) > 0:
            self.wake_at = min(self.wake_at, now + max(starts_in_s, _EVERY_S))
            return None, math.inf
        return best, best_s
