"""Splitting: what the failure of a request of several calls means for its source and for each of its jobs.

It is not known which call is to blame, so none of them uses up a try. They go again in smaller batches
(`Job.most_together`) until the one to blame is alone; its failure then counts as that of any other job.

    refused          400, 413, 422, 403 ..., or a function that raised: batches of half the size
    invalid reply    the results cannot be matched to the calls: each call alone
    hung or crashed  a local function: each call alone
    timed out        each call alone, because another time limit may be more than the deadlines allow
    throttled        the batches stay as large as they were, because a pause is mostly enough. Two cases are different.
                     Some servers answer 429 to a request that is too large: if the source never answered as many
                     calls, batches of half the size from a job's second 429. One call may be too large for a limit:
                     otherwise batches of half the size at each third 429 of a job
    other failures   batches of half the size, and alone after the second one. If no sample can be to blame
                     (`Health.excuses`), the batches stay as large as they were

So a call is in few failed requests of several calls: log2(max_size) after refusals, 1 after an invalid reply, otherwise
`ALONE_AFTER` besides the requests for which no sample can be to blame. G calls that fail every request cause at most G
times as many of these, plus the tries of each alone; no other call fails because of them.

The source sees one failure, whatever number of calls the request had: its circuit breaker, its learned concurrency and
its retry budget count requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidReply, NotStarted, PermanentError, SampleFault, SourceError, SourceUnusable, TransientError
from .attempts import Attempt, is_one_replicas
from .jobs import Job

if TYPE_CHECKING:
    from .retry_policy import RetryPolicy

ALONE_AFTER = 2
"""Failed requests of several calls after which a job goes alone."""
THROTTLED_TO_HALVE = 3
"""Times that a request of several calls is throttled until it is halved."""
THROTTLED_TO_DOUBT_SIZE = 2
"""Throttled requests of one job from which their number of calls may be the reason, where the source never answered as
many."""


class Splitting:
    """Decides for `retry_policy`. Times are seconds of the event loop's clock."""

    def __init__(self, retry_policy: RetryPolicy) -> None:
        self._retry_policy = retry_policy

    def failed(self, attempt: Attempt, error: InvalidReply | SourceError, now: float) -> None:
        """Split the calls of a request that failed with `error`, except a 429 or an error that is certain to concern
        all calls. Called for each of its attempts.
        """
        job, speaks, together = attempt.job, attempt.speaks, attempt.together
        if isinstance(error, TransientError) and not isinstance(error, SampleFault):
            if speaks:
                self._source_failed(attempt, error, now)
            if not (job.ended or attempt.given_up):
                self._transient(attempt, error, now)
            return
        if speaks and isinstance(error, PermanentError):
            self._source_refused(attempt, error, now)
        if not (job.ended or attempt.given_up):
            _reduce(job, together // 2 if isinstance(error, PermanentError) else 1)
            self._retry_policy.retry(attempt, str(error))

    def throttled(self, attempt: Attempt) -> None:
        """Note that the request of `attempt` was throttled, after `Job.throttled` was counted."""
        throttled, together = attempt.job.throttled, attempt.together
        too_many = together > attempt.upstream.most_answered and throttled >= THROTTLED_TO_DOUBT_SIZE
        if together > 1 and (too_many or throttled % THROTTLED_TO_HALVE == 0):
            _reduce(attempt.job, together // 2)

    def given_up(self, attempt: Attempt, *, for_age: bool) -> None:
        """Note that the request of `attempt` was given up: `for_age` because it took too long, otherwise because its
        source stopped answering. One call that hangs can cause either.
        """
        if for_age or not attempt.upstream.health.excuses(attempt):
            self._reduce_after_failure(attempt)

    def _source_failed(self, attempt: Attempt, error: TransientError, now: float) -> None:
        upstream = attempt.upstream
        if upstream.local and not isinstance(error, NotStarted):
            return  # a function raised, because of a sample or of a service behind it
        if is_one_replicas(attempt, error):
            return
        if attempt.timed_out:
            upstream.quota.timed_out(now, sent_at=attempt.started_at)
        if upstream.health.failed(now, probe=False, samples=attempt.samples, error=str(error)):
            self._retry_policy.giving_up.source_fails(upstream, now)

    def _source_refused(self, attempt: Attempt, error: PermanentError, now: float) -> None:
        upstream = attempt.upstream
        if isinstance(error, SourceUnusable):
            if upstream.health.refused(attempt, str(error), now, certain=False):
                self._retry_policy.fail_stranded()
        else:
            self._retry_policy.note_refusal(attempt, error)

    def _transient(self, attempt: Attempt, error: TransientError, now: float) -> None:
        if not attempt.upstream.health.excuses(attempt):
            self._reduce_after_failure(attempt)
        self._retry_policy.transient(attempt, error, now, excused=True)

    def _reduce_after_failure(self, attempt: Attempt) -> None:
        job = attempt.job
        job.failed_together += 1
        alone = attempt.timed_out or job.failed_together >= ALONE_AFTER
        _reduce(job, 1 if alone else attempt.together // 2)


def _reduce(job: Job, most_together: int) -> None:
    job.most_together = min(job.most_together, max(1, most_together))
