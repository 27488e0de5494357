"""The planner decides which job goes to which source now. The dispatcher sends them.

By default a source takes the job with the earliest expected finish:

- A source that is about as fast as the fastest takes the head of the queue.
- A slower source takes a short job, if it will finish it before everything else is done. Its size is such that the
  source uses up its requests and its time together.
- If there is no such job, it takes the head, if no other source would finish the head earlier.
- Otherwise it idles, but at most `LONGEST_IDLE_S`, and never while nothing at all is in flight.

The order makes batches end early as long as there is time: the jobs of a batch go longest first, or by
`forecast.windows_order` if they need several windows. Single jobs go in order of submission while more are being
submitted, because short ones would starve otherwise. If the waiting jobs may not all end before the earliest of their
deadlines, the earliest deadline goes first, and a job that no source can end in time goes behind the others.

The named strategies choose among the sources that can send the head of the queue now, as load balancers do. None of
them considers latency: they are for runs that need predictable shares more than speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from ..config import Scheduling, Strategy
from ..quotas.budgets import UNITS, DollarBudget
from .attempts import Attempt
from .batches import Batch
from .forecast import Forecast, windows_order
from .health import LONGEST_PACE_S
from .hedging import Hedges
from .jobs import Job
from .latency import SAFETY
from .queue import ReadyQueue
from .upstream import Upstream, Upstreams

NEARLY_FASTEST = 1.5
"""A source within this factor of the fastest one's latency takes the head of the queue."""
LONGEST_IDLE_S = 0.25
"""Longest time, in seconds, for which a source idles before the planner chooses again."""
LONGEST_UNNEEDED_S = 1.0
"""Longest time, in seconds, for which an expensive source is left out before the planner checks that again."""

Choice: TypeAlias = Callable[[Sequence[Upstream]], Upstream]
"""Chooses among the sources that can send a job now."""
Placement: TypeAlias = tuple[Job, Upstream, bool]
"""A job to be sent to a source now, and whether that is a hedge."""


class Planner:
    """Decides which job goes to which source. Times are seconds of the event loop's clock."""

    def __init__(self, upstreams: Upstreams, settings: Scheduling) -> None:
        self._upstreams = upstreams
        self._settings = settings
        self._choose = strategy(settings.strategy)
        self.queue = ReadyQueue()
        self.forecast = Forecast(upstreams, self.queue)
        self.hedges = Hedges(upstreams, self.queue, self.forecast)
        self.wake_at = math.inf
        """Time by which to ask again, even if nothing happens before."""
        self.change(settings)

    def change(self, settings: Scheduling) -> None:
        """Go on with other settings and upstreams."""
        if settings.strategy != self._settings.strategy:
            self._choose = strategy(settings.strategy)
        self._settings = settings
        self.forecast.change(prefer_cost=settings.prefer == "cost")
        self.hedges.budget = settings.hedge_budget if settings.hedge else 0.0

    def arrange(self, arrived: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """Order jobs that have arrived, batch by batch. Return those that are ready, and those that have to wait until
        the journal was searched for their whole batch: its first jobs are ordered together, so that the longest go
        first.
        """
        ready: dict[Batch, list[Job]] = {}
        waiting: list[Job] = []
        for job in arrived:
            if job.ended:
                continue
            if job.batch.together and job.batch.lookups and not job.batch.arranged:
                waiting.append(job)
            else:
                ready.setdefault(job.batch, []).append(job)
        for batch, jobs in ready.items():
            batch.arranged = True
            self._order(jobs)
        return [job for jobs in ready.values() for job in jobs], waiting

    def _order(self, jobs: Sequence[Job]) -> None:
        """Set `Job.precedence` of jobs that were submitted together."""
        for job in jobs:
            job.precedence = float(job.size)
        per_window = self.forecast.per_window(jobs) if jobs[0].batch.together else None
        order = windows_order(jobs, per_window) if per_window is not None else None
        if order is not None:
            for precedence, job in zip(range(len(order), 0, -1), order, strict=True):
                job.precedence = float(precedence)
            for job in jobs:
                job.batch.planned = True

    def waiting(self, upstream: Upstream | DollarBudget) -> tuple[int, float, float]:
        """What waits for a source: the number of requests, the estimate of their tokens, and the most of the first
        one. Calls that may share a request count as one. For a budget, the most that they cost in its units.
        """
        if isinstance(upstream, DollarBudget):
            mine = [each for each in self._upstreams.values() if upstream in each.budgets]
            found = [
                (self.waiting(each)[0], UNITS * each.expected_cost(head.request))
                for each in mine
                if (head := self.queue.first(each.name)) is not None
            ]
            most = max((units for _, units in found), default=0.0)
            return sum(count for count, _ in found), sum(count * units for count, units in found), most
        count = self.queue.count(upstream.name)
        first = self.queue.first(upstream.name) if count else None
        if first is None:
            return 0, 0.0, 0.0
        mean_size = self.queue.mean_size
        each, most = upstream.tokens_of(mean_size), float(upstream.tokens(first.request))
        most = min(most, upstream.quota.most_tokens)  # no more than a whole window can be asked for
        requests = math.ceil(count / upstream.calls_per_request(count, mean_size))
        return requests, max(count * each, most), most

    def ended(self, attempt: Attempt) -> None:
        """Learn from the age at which an attempt ended."""
        self.forecast.attempt_ended()
        self.hedges.ended(attempt)
        if not attempt.uncalibrated:
            age = attempt.age(attempt.ended_at)
            if (attempt.result == "valid" or attempt.result == "invalid") and attempt.speaks:
                self.forecast.tail.ended(age)
            elif attempt.result == "cancelled" and not (attempt.request_batch and attempt.request_batch.members):
                self.forecast.tail.given_up(age)

    def rests(self, now: float) -> bool:
        """Return whether there is nothing to plan while nothing waits or is under way: no source is probed. If so,
        forget the attempts, and record why each source waits.
        """
        if not all(upstream.breaker.closed for upstream in self._upstreams.values()):
            return False
        self.hedges.close()
        for upstream in self._upstreams.values():
            upstream.wait_reasons.note(upstream.wait_reason(now), now)
        return True

    def placements(self, now: float) -> Iterator[Placement]:
        """What to send now. The caller must start each placement before it asks for the next one."""
        self.wake_at = math.inf
        self.queue.look(now)
        for upstream in self._upstreams.values():
            if not upstream.breaker.closed:
                upstream.breaker.pace_s = upstream.health.pace_s if self._probed(upstream) else LONGEST_PACE_S
        self.queue.by_deadline = self.forecast.under_pressure(now)
        if self.queue:
            for job, upstream in self.hedges.choose(now, drained=False):
                yield job, upstream, True
            open_upstreams = [
                upstream
                for upstream in self._upstreams.values()
                if upstream.takes_calls(now) and not self.forecast.unneeded(upstream, now)
            ]
            if open_upstreams:
                yield from self._by_turns(open_upstreams, now)
                if self.queue and not any(upstream.live for upstream in self._upstreams.values()):
                    yield from self._never_idle(open_upstreams, now)
        if not self.queue:
            for job, upstream in self.hedges.choose(now, drained=not self.forecast.prefer_cost):
                yield job, upstream, True
        for name, upstream in self._upstreams.items():
            reason = upstream.wait_reason(now)
            # One that is full needs no time: an end wakes the planner.
            head = self.queue.first(name) if reason != "queue" or upstream.request_batches is not None else None
            if head is not None:
                wait_s = upstream.breaker.wait_s(now)
                if wait_s <= 0:
                    if not upstream.breaker.closed:
                        head = self._probing_job(upstream, now) or head
                    wait_s = upstream.wait_for_s(head, now)
                if self.forecast.unneeded(upstream, now):
                    self.wake_at = min(self.wake_at, now + LONGEST_UNNEEDED_S)
                elif wait_s > 0:
                    self.wake_at = min(self.wake_at, now + wait_s)
                reason = reason or ("quota" if wait_s > 0 else "")
            upstream.wait_reasons.note(reason, now)
        self.wake_at = min(self.wake_at, self.hedges.wake_at)

    def _by_turns(self, upstreams: list[Upstream], now: float) -> Iterator[Placement]:
        """One job for each source in turn, the fastest first, as long as any takes one."""
        turns, near = upstreams, {upstreams[0].name}
        if len(self._upstreams) > 1:
            mean_s = {upstream.name: self._mean_s(upstream) for upstream in self._upstreams.values()}
            used = [
                upstream
                for upstream in self._upstreams.values()
                if upstream.up and not self.forecast.unneeded(upstream, now)
            ]
            fastest_s = min((mean_s[upstream.name] for upstream in used), default=0.0)
            near = {name for name, takes_s in mean_s.items() if takes_s <= NEARLY_FASTEST * fastest_s}
            turns = sorted(upstreams, key=lambda upstream: mean_s[upstream.name])
        while turns:
            again = []
            for upstream in turns:
                job = self._pick(upstream, now, near=upstream.name in near)
                if job is None or not self._fits(job, upstream, now):
                    continue
                self.queue.discard(job)
                yield job, self._chosen(job, upstream, upstreams, now), False
                if upstream.has_place:
                    again.append(upstream)
            turns = again

    def _chosen(self, job: Job, upstream: Upstream, upstreams: Sequence[Upstream], now: float) -> Upstream:
        """The source to which `job` goes by a named strategy, its own or that of all; `upstream` could take it now."""
        choose = job.call.choose or self._choose
        if choose is None or not upstream.breaker.closed:
            return upstream
        able = [
            other
            for other in upstreams
            if other is upstream
            or (
                other.name in job.eligible(now)
                and other.breaker.closed
                and other.takes_calls(now)
                and other.wait_for_s(job, now) <= 0
                and not self.queue.higher_waits(other.name, job)
            )
        ]
        return choose(able)

    def _pick(self, upstream: Upstream, now: float, *, near: bool) -> Job | None:
        head = self._head(upstream, now)
        by_strategy = head is not None and (head.call.choose or self._choose) is not None
        if head is None or by_strategy or len(self._upstreams) == 1 or not upstream.breaker.closed:
            return head
        if not upstream.speed.known:
            # The source is new, so it gets the job with the least at stake.
            return self.queue.smallest(upstream.name)
        if near:
            return head
        by_deadline = (upstream.name, head.rank.priority) in self.queue.by_deadline
        if by_deadline and now + SAFETY * self._expected_s(upstream, head) <= head.deadline_at:
            return head
        left_s = self.forecast.end(upstream, now) - now
        size = min(upstream.speed.size_within(left_s / SAFETY), self._balanced_size(upstream, left_s, now))
        size -= upstream.joined_size(head)
        job = head if head.size <= size else self._largest_within(upstream, size, head)
        if job is not None:
            # A job of higher priority goes first, even if it is larger, unless it would end earlier elsewhere.
            higher = self.queue.higher_waits(upstream.name, job) and self.finishes_first(upstream, head, now)
            return head if higher else job
        least = self.queue.smallest(upstream.name)
        if least is not None and SAFETY * self._expected_s(upstream, least) <= left_s:
            return least
        if self.finishes_first(upstream, head, now):
            return head
        self.wake_at = min(self.wake_at, now + LONGEST_IDLE_S)
        return None

    def finishes_first(self, upstream: Upstream, job: Job, now: float) -> bool:
        """Whether no other source would finish `job` before `upstream` does: the wait and the expected latency there
        count.
        """
        here_s = self._expected_s(upstream, job)
        for name in job.call.sources:
            other = self._upstreams[name]
            if other is upstream or name in job.barred or self.forecast.unneeded(other, now):
                continue
            wait_s = max(self.forecast.wait_s(other, job, now), job.backoff_until.get(name, now) - now)
            if wait_s + self._expected_s(other, job) < here_s:
                return False
        return True

    def _expected_s(self, upstream: Upstream, job: Job) -> float:
        """Latency to expect of the request that `job` would go in."""
        return self.forecast.expected_s(upstream, upstream.joined_size(job) + job.size)

    def _mean_s(self, upstream: Upstream) -> float:
        """Latency to expect of a request of average size."""
        mean_size = self.queue.mean_size
        return self.forecast.expected_s(upstream, mean_size * upstream.calls_per_request(len(self.queue), mean_size))

    def _head(self, upstream: Upstream, now: float) -> Job | None:
        """The first job for `upstream`. If time is short, jobs that no source can end in time go behind the others."""
        if not upstream.breaker.closed:
            return self._probing_job(upstream, now)
        head = self.queue.first(upstream.name)
        while self.queue.by_deadline and head is not None and self._hopeless(head, upstream, now):
            self.queue.demote(head)
            head = self.queue.first(upstream.name)
        return head

    def _hopeless(self, job: Job, upstream: Upstream, now: float) -> bool:
        if job.last or (upstream.name, job.rank.priority) not in self.queue.by_deadline:
            return False
        if self.forecast.guesses(upstream):
            return False
        able = [self._upstreams[name] for name in job.call.sources if name not in job.barred]
        each_s = (self.forecast.expected_s(other, job.size) for other in able if not other.health.unusable)
        left_s, least_s = job.deadline_at - now, min(each_s, default=0.0)
        # The expected latency may be wrong, so a job with a short deadline is not hopeless from the start.
        return left_s < SAFETY * least_s and left_s < now - job.submitted_at

    def _balanced_size(self, upstream: Upstream, left_s: float, now: float) -> float:
        """The size at which a slow source uses up its requests and its time together in `left_s` seconds.

        The source does the same amount of work with few long jobs and with many short ones. But short ones end in time
        more surely, and each of them saves a faster source one of its requests.
        """
        requests = upstream.quota.capacity(now + left_s, 0.0, now)
        if requests <= 0 or math.isinf(requests):
            return 0.0
        return upstream.speed.size_within(upstream.quota.concurrency * left_s / requests)

    def _largest_within(self, upstream: Upstream, size: float, head: Job) -> Job | None:
        if head.batch.planned:
            return next((job for job in self.queue.jobs(upstream.name) if job.size <= size), None)
        return self.queue.largest_within(upstream.name, size)

    def _fits(self, job: Job, upstream: Upstream, now: float) -> bool:
        """Whether `upstream` may send `job` now, or never because its budget is spent: then the dispatcher queues the
        job for its other sources. Smaller jobs do not overtake a job whose tokens do not fit yet, because it would
        never be sent.
        """
        spent = bool(upstream.budgets) and upstream.over_budget(job.request, now) is not None
        return spent or upstream.wait_for_s(job, now) <= 0

    def _probed(self, upstream: Upstream) -> bool:
        """Whether a job waits for a source whose circuit is open, so that it is probed. One that answers mostly
        nonsense is left alone if another source can take the job.
        """
        job = self.queue.first(upstream.name)
        if job is None or not upstream.health.degraded:
            return job is not None
        return not any(self._upstreams[name].up for name in set(job.call.sources) - job.barred - {upstream.name})

    def _probing_job(self, upstream: Upstream, now: float) -> Job | None:
        """The sample that probes `upstream`, None if none waits: one that does not go last and has not failed there, if
        there is one, then the most free tries left, then the shortest. So each probe is a different sample where
        possible, because one may have caused the failures. If its tokens do not fit yet, the one that fits first.
        """
        failing = upstream.breaker.failing

        def order(job: Job) -> tuple[object, ...]:
            return job.last, job.sequence in failing, -job.probes_left, job.excused, job.size, job.sequence

        job = min(self.queue.jobs(upstream.name), key=order, default=None)
        if job is None or upstream.wait_tokens_s(job, now) <= 0:
            return job
        return min(self.queue.jobs(upstream.name), key=lambda job: (upstream.wait_tokens_s(job, now), *order(job)))

    def _never_idle(self, upstreams: Sequence[Upstream], now: float) -> Iterator[Placement]:
        """One job for the fastest source that can send it, however slow that is."""
        for upstream in sorted(upstreams, key=self._mean_s):
            job = self._head(upstream, now)
            if job is not None and self._fits(job, upstream, now):
                self.queue.discard(job)
                yield job, upstream, False
                return


class RoundRobin:
    """Smooth weighted round robin: each source in turn, as often as its weight says, and evenly spread.

    The rule of nginx (`ngx_http_upstream_round_robin.c`): every candidate gains its weight. The one with the most
    credit is chosen, and loses the sum of all weights.
    """

    def __init__(self, weight: Callable[[Upstream], float]) -> None:
        self._weight = weight
        self._credit: dict[str, float] = {}

    def __call__(self, candidates: Sequence[Upstream]) -> Upstream:
        total = 0.0
        for upstream in candidates:
            weight = self._weight(upstream)
            total += weight
            self._credit[upstream.name] = self._credit.get(upstream.name, 0.0) + weight
        chosen = max(candidates, key=lambda upstream: self._credit[upstream.name])
        self._credit[chosen.name] -= total
        return chosen


def strategy(name: Strategy) -> Choice | None:
    """The strategy of this name; None for earliest finish, which the planner implements.

    `least_requests` chooses the source with the fewest requests in flight for its weight.
    """
    if name == "round_robin":
        return RoundRobin(lambda upstream: 1.0)
    if name == "weighted":
        return RoundRobin(lambda upstream: upstream.weight)
    if name == "least_requests":
        return lambda candidates: min(candidates, key=lambda upstream: upstream.quota.in_flight / upstream.weight)
    return None
