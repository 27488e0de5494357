"""Backoff: when a job may go to a source again that failed it. It queues the jobs for the sources that they may go to.

A job backs off from one source at a time, so that other sources may take it at once.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..quotas.pauses import FIRST_S, LONGEST_S
from .jobs import Job, why_no_source

if TYPE_CHECKING:
    from .attempts import Attempt
    from .dispatcher import Dispatcher
    from .queue import ReadyQueue
    from .upstream import Upstream

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 20.0
"""Bounds of full jitter after a transient failure, in seconds: the first doubles up to the longest."""
RAISED_BACKOFF_S = 3.0
LONGEST_RAISED_BACKOFF_S = 60.0
"""Backoff after a local function raised, in seconds: the first doubles up to the longest."""
SHORTEST_INVALID_BACKOFF_S = 0.5
"""Shortest time, in seconds, for which a job avoids a source that gave it an invalid reply, if it has another."""
LONGEST_ALONE_S = 16.0
"""Longest backoff of a job that its source throttles while it accepts others, in seconds: it is refused in a minute."""
LONG_PAUSE_S = 5.0
"""Pause, in seconds, from which a job that was throttled goes after all others until the pause has ended."""
LEAST_PATIENCE_S = 1.0
"""Least time, in seconds, between two checks whether a job still goes after all others, and for which it does after a
pause."""


class Backoff:
    """The backoff of all jobs of an event loop. Times are seconds of its clock."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        upstreams: Mapping[str, Upstream],
        queue: ReadyQueue,
        rng: random.Random,
    ) -> None:
        self._dispatcher = dispatcher
        self._upstreams = upstreams
        self.queue = queue
        self._rng = rng
        self._until_answered: defaultdict[str, dict[Job, None]] = defaultdict(dict)

    def enqueue(self, job: Job) -> None:
        """Queue a job for the sources that it may go to now, and again when it may go to the next one. Fail it if no
        source can ever take it. Nothing happens to a job that has ended.
        """
        if job.ended:
            return
        now = self._dispatcher.now()
        self.no_longer_waits(job)
        for name in job.call.sources:
            upstream = self._upstreams[name]
            if upstream.too_large(job.request):
                job.barred |= {name}
            elif name not in job.barred and (budget := upstream.over_budget(job.request, now)) is not None:
                job.barred |= {name}
                job.refused_for = budget.reason
                job.last_problem = budget.problem(upstream.expected_cost(job.request))
        if not job.call.sources or (job.barred and job.barred.issuperset(job.call.sources)):
            self._dispatcher.fail(job, job.refused_for or "no_source", why_no_source(job, self._upstreams))
            return
        if job.last and now >= job.last_until:
            self._reconsider(job, now)
        eligible = job.eligible(now)
        if eligible:
            oversize = [name for name in eligible if self._upstreams[name].oversize(job.request)]
            if oversize:
                half_at, fitting = (job.submitted_at + job.deadline_at) / 2, eligible.difference(oversize)
                if any(self._upstreams[name].up for name in fitting):
                    eligible = fitting
                elif not (fitting or job.last) and now < half_at:
                    # Its source needs an empty window for it. An estimate is no reason to refuse it, so it goes last.
                    job.last_problem = job.last_problem or "it may take more tokens than a whole window allows"
                    job.go_last(half_at, harmless=True)
            self.queue.push(job, eligible)
            self._dispatcher.look_again()
        again_at = min(job.next_backoff_end(now), job.last_until if job.last else math.inf)
        if again_at < math.inf:
            job.backoff_timer = self._dispatcher.loop.call_at(again_at, self._backoff_over, job)

    def _backoff_over(self, job: Job) -> None:
        job.backoff_timer = None
        self._renew(job, self._dispatcher.now())
        self._dispatcher.safely(self.enqueue, job)

    def no_longer_waits(self, job: Job) -> None:
        """Take `job` out of the queue, and end its backoff."""
        if job.entry:
            self.queue.discard(job)
        if job.backoff_timer is not None:
            job.backoff_timer.cancel()
            job.backoff_timer = None

    def after_failure(self, attempt: Attempt, now: float) -> None:
        """Back off with full jitter after a transient failure, which has been counted, or for longer if the source's
        retry budget says so. Calls that shared a request do it together, so that they can share the next one.
        """
        job, upstream, batch = attempt.job, attempt.upstream, attempt.request_batch
        again = batch.again if batch is not None else None
        if again is None:
            doublings = min(max(0, job.failures + job.excused - 1), 10)
            backoff_s = self._rng.uniform(0, min(FIRST_BACKOFF_S * 2**doublings, LONGEST_BACKOFF_S))
            again = now + backoff_s, now + upstream.retries.withdraw(upstream.answers, now)
        if batch is not None:
            batch.again = again
        until, job.not_before = again
        if not attempt.probe:
            # Probes need no backoff, because `Health.pace_s` is their pace.
            self._until_answer(job, upstream, until)

    def after_raised(self, job: Job, upstream: Upstream, now: float) -> None:
        """Back off after a local function raised. Its breaker does not open, so the backoff must outlast an outage of a
        service behind it.
        """
        backoff_s = min(RAISED_BACKOFF_S * 2 ** (job.failures - 1), LONGEST_RAISED_BACKOFF_S)
        self._until_answer(job, upstream, now + self._rng.uniform(0.75, 1.25) * backoff_s)

    def after_throttled(self, job: Job, upstream: Upstream, retry_after_s: float, now: float, *, alone: bool) -> None:
        """Back off from a source that throttled `job`, as long as it asks for. If that may be due to `job` alone, back
        off for longer and longer; if it is so again and again, others go first for a while. They do, too, if the source
        asks for a long pause, or accepts nothing from pause to pause: the first in line may be samples that it will
        never accept.
        """
        in_row = job.throttled_alone(upstream.name)
        least_s = min(FIRST_S * 2.0 ** max(0, in_row - 1), LONGEST_ALONE_S) if alone else 0.0
        job.back_off(upstream.name, now + min(max(least_s, retry_after_s), LONGEST_S))
        if retry_after_s >= LONG_PAUSE_S:
            job.go_last(now + retry_after_s + LEAST_PATIENCE_S, harmless=True)
        elif in_row > 1:
            self.behind_others(job, now, harmless=True)  # it takes a request of the quota, but no place for long
        elif not alone and upstream.pauses.in_row > 1:
            job.go_last(max(now, upstream.pauses.until) + LEAST_PATIENCE_S, harmless=True)

    def after_invalid(self, job: Job, upstream: Upstream, now: float) -> None:
        """Let other sources, if one is up, take `job` first after an invalid reply of `upstream`."""
        if self.alternatives(job, upstream):
            # Not for longer: the other sources may be out of quota for minutes.
            backoff_s = max(SHORTEST_INVALID_BACKOFF_S, 2 * upstream.speed.expected_s(job.size))
            job.back_off(upstream.name, now + backoff_s)

    def _renew(self, job: Job, now: float) -> None:
        """Prolong the backoff after invalid replies of sources that do not judge most samples, while another source is
        up. This lasts for the first half of its time: it still gets an answer if the other source stays busy.
        """
        if job.invalid_at and now <= (job.submitted_at + job.deadline_at) / 2:
            for name in job.invalid_at - job.barred:
                upstream = self._upstreams[name]
                untried = {other.name for other in self.alternatives(job, upstream)} - job.invalid_at
                if untried and not upstream.health.reliable and job.backoff_until.get(name, 0.0) <= now:
                    self.after_invalid(job, upstream, now)

    def behind_others(self, job: Job, now: float, *, harmless: bool = False) -> None:
        """Queue `job` after all others for as long again as it has taken so far, or half of the time to its deadline:
        its next attempt may harm them. In a stream that never ends it would starve otherwise.
        """
        job.go_last(now + min(now - job.submitted_at, (job.deadline_at - now) / 2), harmless=harmless)

    def _reconsider(self, job: Job, now: float) -> None:
        """Let `job` go with the others again, unless harmless ones wait for its sources that were there before it."""
        names = set(job.call.sources) - job.barred
        for other in self._dispatcher.waiting_jobs() if job.last > 1 else ():  # in the order of their submission
            if other.submitted_at > job.submitted_at:
                break
            if other is not job and other.last < 2 and not names.isdisjoint(set(other.call.sources) - other.barred):
                job.last_until = now + max(LEAST_PATIENCE_S, (job.deadline_at - now) / 2)
                return
        job.last = 0

    def release(self, upstream: Upstream) -> None:
        """End the backoff after failures at a source that has answered: queue the jobs again."""
        for job in self._until_answered.pop(upstream.name, ()):
            if not job.ended and upstream.name in job.backoff_until:
                waits = job.waits
                job.back_off(upstream.name, None)
                if waits:
                    self.enqueue(job)

    def alternatives(self, job: Job, upstream: Upstream) -> list[Upstream]:
        """The other sources that could serve `job`, are up and not degraded."""
        names = (name for name in job.call.sources if name not in job.barred and name != upstream.name)
        others = [self._upstreams[name] for name in names]
        return [other for other in others if other.up and not other.health.degraded]

    def forget(self, job: Job) -> None:
        """Forget `job`, which has ended."""
        if job.entry:
            # Jobs behind it may go now.
            self._dispatcher.look_again()
        self.no_longer_waits(job)
        for name in job.backoff_until:
            self._until_answered[name].pop(job, None)

    def _until_answer(self, job: Job, upstream: Upstream, until: float) -> None:
        """Keep `job` away from a source until `until`, or until the source answers another sample."""
        job.back_off(upstream.name, until)
        self._until_answered[upstream.name][job] = None
