"""Splits the makespan of a batch into parts that add up to it: what its last job waited for, and where.

The history of the last job is followed backwards from the attempt that ended it. An attempt is split into its usual
latency and the excess. A hedge leads to the attempt that it was started beside, because that one was too slow. The time
between two attempts counts for the source that took the job next, by what kept this source from taking it earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..observers.batch_report import BatchReport, Part, PartKind
from .attempts import Attempt
from .jobs import Job
from .upstream import Upstream
from .wait_reasons import WaitReason

if TYPE_CHECKING:
    from .batches import Batch

STRAGGLES_FROM = 1.5
"""Multiple of the expected latency from which an attempt is a straggler."""
_KINDS: Mapping[WaitReason, PartKind] = {"": "queue", "queue": "queue", "quota": "quota", "pause": "pause"}


def report(batch: Batch, upstreams: Mapping[str, Upstream]) -> BatchReport:
    """The counts of a batch that has ended, and what it waited for."""
    return BatchReport(
        samples=batch.samples,
        scored=batch.scored,
        failed=batch.samples - batch.scored,
        attempts=batch.attempts,
        hedges=batch.hedges,
        makespan_s=batch.last_at - batch.started_at,
        parts=tuple(_parts(batch.last, batch.started_at, batch.last_at, upstreams)) if batch.last else (),
        waits=batch.waits.by_size(),
    )


def _parts(job: Job, since: float, until: float, upstreams: Mapping[str, Upstream]) -> list[Part]:
    attempts = sorted((*job.past, *job.live), key=lambda attempt: attempt.started_at)
    backwards: list[Part] = []
    at = until
    attempt = _last_before(attempts, at)
    following = upstreams.get(job.last_source)
    while attempt is not None:
        ended_at = min(attempt.ended_at, at) if attempt.result else at
        backwards += reversed(_gap(job, following, ended_at, at, after=attempt))
        backwards += reversed(_attempt(attempt, ended_at))
        at, following = attempt.started_at, attempt.upstream
        attempt = _last_before([other for other in attempts if other is not attempt], at)
    backwards += reversed(_gap(job, following, job.submitted_at, at, after=None))
    backwards.append(Part("arrival", "", job.submitted_at - since))
    return [part for part in reversed(backwards) if part.seconds > 0]


def _last_before(attempts: list[Attempt], at: float) -> Attempt | None:
    """The attempt that the time before `at` was spent on: of those begun before, the one that gave the outcome, or else
    the one that was waited for longest.
    """
    begun = [attempt for attempt in attempts if attempt.started_at < at]
    winners = [attempt for attempt in begun if attempt.result == "valid"]
    if winners:
        return winners[-1]
    return max(
        begun, key=lambda attempt: (attempt.ended_at if attempt.result else at, attempt.started_at), default=None
    )


def _attempt(attempt: Attempt, until: float) -> list[Part]:
    name, seconds = attempt.upstream.name, until - attempt.started_at
    if attempt.result in ("failed", "invalid", "throttled") or attempt.given_up:
        return [Part("retry", name, seconds)]
    usual_s = min(seconds, STRAGGLES_FROM * attempt.expected_s)
    return [Part("service", name, usual_s), Part("straggler", name, seconds - usual_s)]


def _gap(job: Job, upstream: Upstream | None, since: float, until: float, *, after: Attempt | None) -> list[Part]:
    """What `job` waited for from `since`, when no attempt was under way, until `upstream` took it."""
    if until <= since:
        return []
    parts: list[Part] = []
    if (
        after is not None
        and upstream is not None
        and (after.given_up or after.result in ("failed", "invalid", "throttled"))
    ):
        backoff_end = min(until, max(job.backoff_until.get(upstream.name, since), job.not_before, since))
        kind: PartKind = "pause" if after.result == "throttled" else "retry"
        parts.append(Part(kind, upstream.name, backoff_end - since))
        since = backoff_end
    if upstream is None:
        return [*parts, Part("queue", "", until - since)]
    held = upstream.wait_reasons.seconds(since, until)
    return [*parts, *(Part(_KINDS[hold], upstream.name, seconds) for hold, seconds in held.items())]
