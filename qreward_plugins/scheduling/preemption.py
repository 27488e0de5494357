"""Preemption: ends attempts that might still be answered, so that their jobs or other jobs go on sooner.

    old           if its source is silent or fails others, an attempt is given up at a small age. If the source answers
                  others, only an attempt that takes far too long is given up, and only if it has no hedge
    probe         an overdue probe is given up if it takes the last place, or if the next probe is answered
    time slice    a call of a local function that takes far longer than usual is ended when another sample waits for
                  its worker: some samples make a function hang, and a few of them could take all workers for their
                  whole time limit. Its sample is tried once more when none waits, with the whole time limit
    called back   an attempt ends because this process's share of the source's limits ended

The retry policy then decides what happens to the job. Times are seconds of the event loop's clock.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import SampleFault, TransientError
from .attempts import Attempt
from .health import FIRST_SILENCE_S
from .jobs import MAX_FORGIVEN, MAX_RESTARTS
from .upstream import Upstream, Upstreams

if TYPE_CHECKING:
    from .retry_policy import RetryPolicy

GIVE_UP_SILENT_FROM = 1.0
"""`Attempt.age` from which an attempt is given up if its source is silent."""
GIVE_UP_FAILING_FROM = 1.5
"""The same if its source fails others. It is higher, because an attempt that did not fail at once may be answered."""
GIVE_UP_AT = 8.0
"""`Attempt.lateness` from which an attempt without a hedge is given up and its job starts anew. A straggler that would
end at ten times the usual latency loses nothing by that."""
GIVE_UP_AFTER_S = 5.0
"""Least age, in seconds, of such an attempt."""
OVERDUE_FROM = 2.0
"""Age from which an overdue probe is given up once a later one is answered, as a multiple of what that one took."""
FIRST_ROOM_S = 5.0
"""Age at which an overdue probe is given up for the next one, if probes take the source's whole concurrency. It doubles
with each probe that comes to nothing, so that a source that has become slow can answer."""
USUAL_TIMES = 8.0
"""Multiple of the expected latency that a call may take while others wait: its slice."""
MOST_DOUBLINGS = 10
"""How often the slice doubles at most while no call ends: every new worker has to import its modules first."""
SHORTEST_SLICE_S = 5.0
"""Shortest slice: a worker that has just started may still be importing modules."""
FIRST_SLICE_S = 15.0
"""Slice while no call has ended yet, so that the usual latency is unknown."""


class Preemption:
    """Ends attempts of an event loop before they are answered, and tells `retry_policy`."""

    def __init__(self, retry_policy: RetryPolicy, upstreams: Upstreams) -> None:
        self._retry_policy = retry_policy
        self._upstreams = upstreams

    def check_age(self, attempt: Attempt, now: float) -> None:
        """Give up an attempt for its age if it has no hedge, and all older attempts of a source that is silent."""
        job, upstream = attempt.job, attempt.upstream
        if job.ended or attempt.result:
            return
        health, tail = upstream.health, self._upstreams.tail
        others = () if upstream.speed.known else self._retry_policy.backoff.alternatives(job, upstream)
        places = sum(_places(other, attempt.size, now) for other in others)
        if health.silent(attempt, now, tail, places=places) or health.open_for_silence:
            self._give_up_old(upstream, now, GIVE_UP_SILENT_FROM, f"{upstream.name} does not answer")
        if attempt.given_up or job.ended or upstream.local:
            return
        age_s = now - attempt.started_at
        if attempt.probe and not upstream.breaker.closed:
            full = upstream.quota.in_flight >= upstream.quota.concurrency
            if attempt.superseded and full and age_s >= FIRST_ROOM_S * 2.0 ** min(upstream.breaker.probes, 10):
                upstream.breaker.probes += 1
                self._give_up(attempt, now, f"{upstream.name} did not answer a probe")
        elif (
            upstream.speed.known
            and attempt.lateness(now) >= GIVE_UP_AT
            and age_s >= GIVE_UP_AFTER_S
            and job.restarts < MAX_RESTARTS
            and len(job.live) == 1
        ):
            job.restarts += 1
            why = f"{upstream.name} took {attempt.lateness(now):.0f} times longer than expected"
            self._give_up(attempt, now, why, for_age=True)

    def source_fails(self, upstream: Upstream, now: float) -> None:
        """Give up the older attempts at a source whose circuit has just opened because of failures."""
        self._give_up_old(upstream, now, GIVE_UP_FAILING_FROM, f"{upstream.name} failed other samples")

    def source_recovered(self, upstream: Upstream, took_s: float, now: float) -> None:
        """Give up the overdue probes of a source that has answered a later one after `took_s` seconds, if they had more
        than `OVERDUE_FROM` times as long. A server that hung never answers them, and the step would wait for their time
        limits.
        """
        for attempt in list(upstream.live):
            overdue = attempt.superseded and now - attempt.started_at > OVERDUE_FROM * took_s
            if overdue and not attempt.job.ended:
                self._give_up(attempt, now, f"{upstream.name} was down when it was sent")

    def call_back(self, upstream: Upstream, *, sent: bool) -> None:
        """Cancel the attempts at a source that have not been sent; `sent`: the others, too. Their jobs are queued
        again. This counts neither against the jobs nor against the source.
        """
        for attempt in list(upstream.live):
            if (sent or not attempt.sent) and not (attempt.result or attempt.given_up or attempt.job.ended):
                attempt.given_up = True
                attempt.cancel()
                self._retry_policy.retry(attempt, "it was called back, because the share of its limits had ended")

    def end_slices(self, now: float) -> float:
        """End the calls whose time slice is over while others wait; return the time by which to call this again."""
        wake_at = math.inf
        for upstream in self._upstreams.values():
            if not upstream.local or upstream.quota.in_flight < upstream.quota.concurrency:
                continue
            waiting = self._retry_policy.backoff.queue.first(upstream.name)
            if waiting is None or waiting.last:
                continue
            for attempt in list(upstream.live):
                due_at = _slice_end(attempt)
                if due_at <= now:
                    self._end_slice(attempt, now)
                else:
                    wake_at = min(wake_at, due_at)
        return wake_at

    def _end_slice(self, attempt: Attempt, now: float) -> None:
        if attempt.job.ended:
            return
        attempt.upstream.preempted += attempt.speaks
        took_s = now - attempt.sent_at
        error = SampleFault(f"{attempt.upstream.name} had not ended after {took_s:.1f} s, others waited")
        if attempt.together > 1:
            self._retry_policy.request_failed(attempt, error, now)
        else:
            self._retry_policy.sample_fault(attempt, error, had_whole_limit=False)
        attempt.given_up = True
        attempt.cancel()

    def _give_up_old(self, upstream: Upstream, now: float, from_age: float, why: str) -> None:
        """Give up the attempts of a source whose `age` is at least `from_age`, so that their jobs go elsewhere."""
        backoff = self._retry_policy.backoff
        # A probe gets time to answer, because a source that is only slower could not recover otherwise. If its job
        # could go elsewhere, the oldest one gets it, half of its time, and only while other jobs wait anyway. A
        # stream does not, because it cannot be hedged.
        overdue = (attempt for attempt in upstream.live if attempt.superseded and attempt.job.call.on_text is None)
        spared = next(overdue, None) if backoff.queue else None
        if spared is not None and now - spared.started_at > (spared.job.deadline_at - now) / 2:
            spared = None
        for attempt in list(upstream.live):
            elsewhere = attempt.superseded and attempt is not spared and backoff.alternatives(attempt.job, upstream)
            # The source is certainly down, so the expected latency counts, not the longest possible one.
            if attempt.age(now) >= from_age and (elsewhere or not attempt.probe) and not attempt.job.ended:
                self._give_up(attempt, now, why)

    def _give_up(self, attempt: Attempt, now: float, why: str, *, for_age: bool = False) -> None:
        """Cancel an attempt that might still be answered, and treat it as failed. Where that failure would end the job,
        it does not count: always `for_age`, otherwise `MAX_FORGIVEN` times. That of a request of several calls never
        counts, because the request is split.
        """
        job = attempt.job
        if attempt.result or attempt.given_up or job.begun:
            # Its answer has begun to stream, and the length of the rest is unknown.
            return
        attempt.given_up = True
        excused = False
        if attempt.together > 1:
            excused = True
            if for_age or not attempt.upstream.health.excuses(attempt):
                # One call that hangs can be the reason.
                job.go_with(attempt.together // 2)
        elif not (attempt.probe and job.probes_left > 0) and job.failures + 1 >= self._retry_policy.max_attempts:
            excused = for_age or job.forgiven < MAX_FORGIVEN
            job.forgiven += not for_age
        self._retry_policy.transient(attempt, TransientError(why), now, excused=excused)
        attempt.cancel()


def _places(upstream: Upstream, size: int, now: float) -> float:
    """How many requests of `size` a source can have in flight in the next while, by its concurrency and its windows; 0
    if it takes none now, or has never answered.
    """
    if not upstream.speed.known or upstream.pauses.left_s(now) > 0:
        return 0.0
    sent = upstream.quota.capacity(now + FIRST_SILENCE_S, upstream.tokens_of(size), now)
    return min(upstream.quota.concurrency, sent * upstream.speed.expected_s(size) / FIRST_SILENCE_S)


def _slice_end(attempt: Attempt) -> float:
    """When `attempt` has to make room for others; infinity if it has not been sent yet, or is being ended."""
    if attempt.result or attempt.given_up:
        return math.inf
    upstream, slice_s = attempt.upstream, FIRST_SLICE_S
    if upstream.speed.known:
        slice_s = max(SHORTEST_SLICE_S, USUAL_TIMES * upstream.speed.expected_s(attempt.size))
    rounds = upstream.preempted // max(1, upstream.quota.concurrency)
    return attempt.sent_at + slice_s * 2.0 ** min(rounds, MOST_DOUBLINGS)
