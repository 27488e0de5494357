"""Giving up: ends attempts that might still be answered, so that their jobs or other jobs go on sooner.

    old           if its source is silent or fails others, an attempt is given up at a small age. If the source answers
                  others, only an attempt that takes far too long is given up, and only if it has no hedge
    probe         an overdue probe is given up for the next one if it takes its place, or if the next one is answered
    time slice    a call of a local function is ended if it keeps others waiting
    called back   an attempt ends because this process's share of the source's limits ended

The retry policy then decides what happens to the job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import SampleFault, TransientError
from .attempts import Attempt
from .jobs import MAX_FORGIVEN, MAX_RESTARTS
from .upstream import Upstream

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


class GivingUp:
    """Ends attempts of an event loop before they are answered, and tells `retry_policy`. Times are seconds of the event
    loop's clock. `max_attempts` bounds a job's failed attempts.
    """

    def __init__(self, retry_policy: RetryPolicy, *, max_attempts: int) -> None:
        self._retry_policy = retry_policy
        self.max_attempts = max_attempts

    def check_age(self, attempt: Attempt, now: float) -> None:
        """Give up an attempt for its age if it has no hedge, and all older attempts of a source that is silent."""
        job, upstream = attempt.job, attempt.upstream
        if job.call.rules is not None:
            return
        if upstream.health.silent(attempt, now) or upstream.health.open_for_silence:
            self._give_up_old(upstream, now, GIVE_UP_SILENT_FROM, f"{upstream.name} stopped answering")
        if (
            not attempt.given_up
            and not job.ended
            and not (upstream.local or (attempt.probe and not upstream.breaker.closed))
            and upstream.speed.known
            and attempt.lateness(now) >= GIVE_UP_AT
            and now - attempt.started_at >= GIVE_UP_AFTER_S
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
        than `OVERDUE_FROM` times as long.
        """
        for attempt in list(upstream.live):
            overdue = attempt.superseded and now - attempt.started_at > OVERDUE_FROM * took_s
            if overdue and not attempt.job.ended:
                self._give_up(attempt, now, f"{upstream.name} was down when it was sent")

    def probe(self, attempt: Attempt, now: float) -> None:
        """Give up an overdue probe, so that the next one has room."""
        if not attempt.job.ended:
            self._give_up(attempt, now, f"{attempt.upstream.name} did not answer a probe")

    def preempt(self, attempt: Attempt, now: float) -> None:
        """End a call of a local function that keeps others waiting. Its sample is tried once more, after them."""
        if attempt.result or attempt.given_up or attempt.job.ended:
            return
        attempt.upstream.preempted += attempt.speaks
        took_s = now - attempt.sent_at
        error = SampleFault(f"{attempt.upstream.name} had not ended after {took_s:.1f} s, others waited")
        if attempt.together > 1:
            self._retry_policy.splitting.failed(attempt, error, now)
        else:
            self._retry_policy.sample_fault(attempt, error, had_whole_limit=False)
        attempt.given_up = True
        attempt.cancel()

    def call_back(self, upstream: Upstream, *, sent: bool) -> None:
        """Cancel the attempts at a source that have not been sent; `sent`: the others, too. Their jobs are queued
        again. This counts neither against the jobs nor against the source.
        """
        for attempt in list(upstream.live):
            if (sent or not attempt.sent) and not (attempt.result or attempt.given_up or attempt.job.ended):
                attempt.given_up = True
                attempt.cancel()
                self._retry_policy.retry(attempt, "it was called back, because the share of its limits had ended")

    def _give_up_old(self, upstream: Upstream, now: float, from_age: float, why: str) -> None:
        """Give up the attempts of a source whose `age` is at least `from_age`, so that their jobs go elsewhere."""
        backoff = self._retry_policy.backoff
        for attempt in list(upstream.live):
            # A probe gets time to answer, because a source that is only slower could not recover otherwise.
            kept = attempt.probe and not (attempt.superseded and backoff.alternative(attempt.job, upstream))
            # The source is certainly down, so the expected latency counts, not the longest possible one.
            if attempt.age(now) >= from_age and not kept and not attempt.job.ended:
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
        if attempt.request_batch is not None and attempt.request_batch.has_answered(attempt):
            return
        attempt.given_up = True
        attempt.cancel()
        probes = attempt.probe and job.probes_left > 0
        excused = False
        together = attempt.together > 1
        if together:
            self._retry_policy.splitting.given_up(attempt, for_age=for_age)
            excused = True
        elif not probes and job.failures + 1 >= self.max_attempts:
            excused = for_age or job.forgiven < MAX_FORGIVEN
            job.forgiven += not for_age
        self._retry_policy.transient(attempt, TransientError(why), now, excused=excused)
