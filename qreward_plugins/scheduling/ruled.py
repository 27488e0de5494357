"""Decides what the end of an attempt means for a call with fixed rules (`Call.rules`).

failed            the next attempt follows after the interval of the rules, as long as retries are left; otherwise
                  the call fails with this error. Nothing is excused. If another attempt of the call is under way, the
                  call waits for that one, and a hedge may follow after the interval; a hedge that failed counts as a
                  retry then
permanent         the call fails with this error
throttled         the same as failed, and the source pauses as it asks
circuit opens     calls that wait for the source fail, and later ones until its recovery time is over
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import PermanentError, Throttled
from .attempts import Attempt, AttemptError
from .calls import Call
from .jobs import Job, Jobs
from .rules import FAILED, OPEN
from .upstream import Upstream

if TYPE_CHECKING:
    from .retry_policy import RetryPolicy


class RuledCalls:
    """The calls of an event loop that have fixed rules. Times are seconds of its clock."""

    def __init__(
        self, retry_policy: RetryPolicy, jobs: Jobs, upstreams: Mapping[str, Upstream], rng: random.Random
    ) -> None:
        self._retry_policy = retry_policy
        self._jobs = jobs
        self._upstreams = upstreams
        self._rng = rng

    def refusal(self, call: Call[object], now: float) -> str:
        """Why `call` is refused before its first attempt; "" if it is not."""
        problems = []
        for name in call.sources:
            breaker = self._upstreams[name].breaker
            if breaker.closed or breaker.wait_s(now) <= 0:
                return ""
            problems.append(_open(self._upstreams[name], now))
        return "; ".join(problems)

    def answered(self, attempt: Attempt) -> None:
        """Note for its source that an attempt was answered."""
        if attempt.upstream.error_share is not None:
            attempt.upstream.error_share.note(False)

    def failed(self, attempt: Attempt, error: AttemptError, now: float, *, gone: bool) -> None:
        """Retry the call of a failed attempt, or fail it. `gone`: the attempt does not count for its call any more."""
        job, rules = attempt.job, attempt.job.call.rules
        assert rules is not None
        if attempt.given_up:
            # It has swallowed its cancellation, and was told when its time was up.
            return
        passes = rules.retry_timeouts if attempt.timed_out else not isinstance(error, PermanentError)
        self._tell_source(attempt, error, now, passes=passes)
        if gone or job.ended:
            return
        job.failures += 1
        tries = job.attempts - job.hedges
        again = passes and tries <= rules.retries
        wait_s = rules.wait_s(tries, self._rng) if again else 0.0
        if len(job.live) > 1:
            if attempt.hedge and again:
                # The attempt that takes long still does, so another hedge may follow, in the place of a retry.
                job.hedges -= 1
            job.not_before = now + wait_s
            self._retry_policy.retry(attempt, str(error))
            return
        if not again or job.begun or now + wait_s >= job.deadline_at:
            self._jobs.fail(job, FAILED, str(error))
            return
        if not attempt.upstream.breaker.closed:
            self._jobs.fail(job, OPEN, _open(attempt.upstream, now))
            return
        job.not_before = now + wait_s
        self._retry_policy.retry(attempt, str(error))

    def _tell_source(self, attempt: Attempt, error: AttemptError, now: float, *, passes: bool) -> None:
        upstream = attempt.upstream
        if isinstance(error, Throttled):
            upstream.throttled(error.retry_after_s, attempt.started_at, now, error=str(error))
        if not passes:
            # An error that a retry does not help is a matter of the arguments.
            upstream.breaker.abandoned(probe=attempt.decides)
            return
        if upstream.error_share is not None and upstream.error_share.note(True):
            upstream.quota.timed_out(now, sent_at=attempt.started_at)
        if upstream.health.failed(now, probe=attempt.decides, error=str(error)):
            for job in list(self._jobs.waiting_jobs()):
                if job.call.rules is not None and self._stranded(job, now):
                    self._jobs.fail(job, OPEN, _open(upstream, now))

    def _stranded(self, job: Job, now: float) -> bool:
        return bool(self.refusal(job.call, now))


def _open(upstream: Upstream, now: float) -> str:
    left_s = upstream.breaker.open_s(now)
    when = f"in {left_s:.3g} s" if left_s > 0 else "when the call that probes it has ended"
    return f"the circuit of {upstream.name} is open after failures in a row; it may be called again {when}"
