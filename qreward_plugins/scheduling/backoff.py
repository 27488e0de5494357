"""Backoff: when a job may go to a source again that failed it, and which other jobs go first.

A job backs off from one source at a time, so that other sources may take it at once. A job whose next attempt may harm
others (by taking a place for a whole time limit, by being throttled again) goes after them, but not for ever.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from .attempts import Attempt
from .jobs import Job, Jobs
from .pauses import FIRST_S, LONGEST_S
from .upstream import Upstream

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 20.0
"""Bounds of full jitter after a transient failure, in seconds: the first doubles up to the longest."""
RAISED_BACKOFF_S = 3.0
LONGEST_RAISED_BACKOFF_S = 60.0
"""Backoff after a local function raised, in seconds: the first doubles up to the longest."""
SHORTEST_INVALID_BACKOFF_S = 0.5
"""Shortest time, in seconds, for which a job avoids a source that gave it an invalid reply, if it has another."""
LEAST_PATIENCE_S = 1.0
"""Least time, in seconds, between two checks whether a suspect job still has to wait."""


class Backoff:
    """The backoff of all jobs of an event loop. Times are seconds of its clock."""

    def __init__(self, jobs: Jobs, upstreams: Mapping[str, Upstream], rng: random.Random) -> None:
        self._jobs = jobs
        self._upstreams = upstreams
        self._rng = rng
        self._until_answered: defaultdict[str, dict[Job, None]] = defaultdict(dict)
        self._put_off: defaultdict[str, deque[_PutOff]] = defaultdict(deque)
        """Retries that wait for the budget of a source, in the order in which they were taken."""

    # By the end of an attempt

    def after_failure(self, attempt: Attempt, now: float) -> None:
        """Back off with full jitter after a transient failure, which has been counted. Calls that shared a request back
        off together, so that they can share the next one.
        """
        job, batch = attempt.job, attempt.request_batch
        until = batch.again_at if batch is not None else None
        if until is None:
            doublings = min(max(0, job.failures + job.excused - 1), 10)
            until = now + self._rng.uniform(0, min(FIRST_BACKOFF_S * 2**doublings, LONGEST_BACKOFF_S))
        if batch is not None:
            batch.again_at = until
        self._until_answer(job, attempt.upstream, until)

    def after_raised(self, job: Job, upstream: Upstream, now: float) -> None:
        """Back off after a local function raised. Its breaker does not open, so the backoff must outlast an outage of a
        service behind it.
        """
        backoff_s = min(RAISED_BACKOFF_S * 2 ** (job.failures - 1), LONGEST_RAISED_BACKOFF_S)
        self._until_answer(job, upstream, now + self._rng.uniform(0.75, 1.25) * backoff_s)

    def after_throttled(self, job: Job, upstream: Upstream, retry_after_s: float, now: float, *, alone: bool) -> None:
        """Back off from a source that throttled `job`, as long as it asks for. If that may be due to `job` alone, back
        off for longer and longer; if it is so again and again, others go first.
        """
        in_row = job.throttled_alone(upstream.name)
        least_s = FIRST_S * 2.0 ** max(0, in_row - 1) if alone else 0.0
        job.back_off(upstream.name, now + min(max(least_s, retry_after_s), LONGEST_S))
        if in_row > 1:
            self._after_others(job, now)

    def after_invalid(self, job: Job, upstream: Upstream, now: float) -> None:
        """Let other sources, if one can take it soon, take `job` first after an invalid reply of `upstream`."""
        away = self._worth_waiting(job, upstream, now)
        job.back_off(upstream.name, now + (_invalid_backoff_s(job, upstream) if away else 0.0))
        self.renew(job, now)

    def after_timeout(self, job: Job, now: float) -> None:
        """Queue `job` after all others from now on: its next attempt may take a place for a whole time limit, too.

        In a stream that never ends it would starve. So this ends after as long again as the job has taken so far, or
        after half of the time to its deadline: then samples that are submitted later do not go first.
        """
        self._after_others(job, now)

    def _after_others(self, job: Job, now: float) -> None:
        job.suspect, job.suspected_at = True, now
        if not (job.faults or job.answers_before):  # local functions have time slices for that
            job.reconsider_at = now + min(now - job.submitted_at, (job.deadline_at - now) / 2)

    def until_budget(self, attempt: Attempt, now: float) -> None:
        """Take a retry from the budget of a source, one for each request that failed, and wait until it is due."""
        job, upstream, batch = attempt.job, attempt.upstream, attempt.request_batch
        number = None if batch is None else batch.retry_number
        if number is None:
            number = upstream.retries.withdraw(now)
        if batch is not None:
            batch.retry_number = number
        job.not_before = now + upstream.retries.wait_s(number, now)
        if job.not_before > now:
            waiting = self._put_off[upstream.name]
            while waiting and not waiting[0].waits(now):
                waiting.popleft()
            waiting.append(_PutOff(number, job, job.not_before))

    # While it lasts

    def earned(self, upstream: Upstream, now: float) -> None:
        """Queue the jobs whose retries are due, now that a source has answered."""
        waiting = self._put_off.get(upstream.name)
        while waiting:
            first = waiting[0]
            if first.waits(now):
                if upstream.retries.wait_s(first.number, now) > 0:
                    return
                first.job.not_before = now
                if not (first.job.live or first.job.undecided):
                    self._jobs.enqueue(first.job)
            waiting.popleft()

    def release(self, upstream: Upstream) -> None:
        """End the backoff after failures at a source that has answered: queue the jobs again."""
        if not self._until_answered.get(upstream.name):
            return
        waiting, self._until_answered[upstream.name] = self._until_answered[upstream.name], {}
        for job in waiting:
            if not job.ended and upstream.name in job.backoff_until:
                job.back_off(upstream.name, None)
                if not (job.live or job.undecided):
                    self._jobs.enqueue(job)

    def renew(self, job: Job, now: float) -> None:
        """Prolong the backoff after invalid replies while another source may judge `job` soon. This lasts for the first
        half of its time: it still gets an answer if the other source stays busy.
        """
        if now > (job.submitted_at + job.deadline_at) / 2:
            return
        for name in job.invalid_at - job.barred:
            upstream = self._upstreams[name]
            over = job.backoff_until.get(name, -math.inf) <= now
            if over and self._worth_waiting(job, upstream, now, untried=True):
                job.back_off(name, now + _invalid_backoff_s(job, upstream))

    def reconsider(self, job: Job, now: float) -> None:
        """End the suspicion against `job` if it is time, unless samples wait that were there before it was suspect."""
        if job.reconsider_at is None or now < job.reconsider_at:
            return
        if self._others_were_first(job):
            job.reconsider_at = now + max(LEAST_PATIENCE_S, (job.deadline_at - now) / 2)
        else:
            job.suspect, job.reconsider_at = False, None

    def alternative(self, job: Job, upstream: Upstream) -> bool:
        """Whether another source could serve `job` and is not degraded."""
        return bool(self._alternatives(job, upstream, untried=False))

    def _alternatives(self, job: Job, upstream: Upstream, *, untried: bool) -> list[Upstream]:
        """The other sources that could serve `job` and are not degraded. `untried`: and gave it no invalid reply."""
        without = job.barred | {upstream.name} | (job.invalid_at if untried else set())
        others = (self._upstreams[name] for name in job.call.sources if name not in without)
        return [
            other
            for other in others
            if not other.health.unusable and other.breaker.closed and not other.health.degraded
        ]

    def _worth_waiting(self, job: Job, upstream: Upstream, now: float, *, untried: bool = False) -> bool:
        """Whether `job` should wait for another source after an invalid reply of `upstream`.

        Another source is more likely to judge it. Where `upstream` judges most samples, that is worth as much time as
        the backoff takes, but not a window that is free only in a minute.
        """
        others = [other for other in self._alternatives(job, upstream, untried=untried) if other.up(now)]
        if not upstream.health.reliable:
            return bool(others)
        latest_s = _invalid_backoff_s(job, upstream) + upstream.speed.expected_s(job.size)
        return any(_answers_in_s(other, job, now) <= latest_s for other in others)

    def forget(self, job: Job) -> None:
        """Forget `job`, which has ended."""
        for name in job.backoff_until:
            self._until_answered[name].pop(job, None)

    def forget_sources(self, names: frozenset[str]) -> None:
        """Forget which jobs wait for an answer of these sources."""
        for name in names:
            self._until_answered.pop(name, None)
            self._put_off.pop(name, None)

    def _until_answer(self, job: Job, upstream: Upstream, until: float) -> None:
        """Keep `job` away from a source until `until`, or until the source answers another sample."""
        job.back_off(upstream.name, until)
        self._until_answered[upstream.name][job] = None

    def _others_were_first(self, job: Job) -> bool:
        """Whether a sample waits for a source of `job` that was submitted before `job` became suspect."""
        names = set(job.call.sources) - job.barred
        # They are in the order of their submission.
        for other in self._jobs.waiting_jobs():
            if other.submitted_at > job.suspected_at:
                return False
            if not other.suspect and not names.isdisjoint(set(other.call.sources) - other.barred):
                return True
        return False


class _PutOff(NamedTuple):
    """A retry that waits for the budget of a source. `number` is the one that the budget gave it."""

    number: int
    job: Job
    not_before: float
    """That of the job when the retry was taken. Another one since then has another reason."""

    def waits(self, now: float) -> bool:
        """Whether the job still waits for this."""
        return not self.job.ended and self.job.not_before == self.not_before > now


def _invalid_backoff_s(job: Job, upstream: Upstream) -> float:
    # Not longer: the other sources may be out of quota for minutes.
    return max(SHORTEST_INVALID_BACKOFF_S, 2 * upstream.speed.expected_s(job.size))


def _answers_in_s(upstream: Upstream, job: Job, now: float) -> float:
    """Seconds until `upstream` may have answered `job`; infinity if this process has no part of its limits now. A busy
    source is taken to be free after one more answer.
    """
    takes_s = upstream.speed.expected_s(job.size)
    busy = 0 < upstream.quota.concurrency <= upstream.quota.in_flight
    wait_s = takes_s if busy else upstream.wait_for_s(job, now)
    return takes_s + max(wait_s, job.backoff_until.get(upstream.name, now) - now)
