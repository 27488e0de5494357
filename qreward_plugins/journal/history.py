"""The attempts of a call, as the journal records them: it keeps more of each than events tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..samples.spent import NO_USAGE, Usage
from ..sources.base import Reply, Request

if TYPE_CHECKING:
    from ..scheduling.attempts import Attempt
    from ..scheduling.jobs import Job


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True, eq=False)
class PastAttempt:
    """One attempt of a call that has ended. Times are seconds since the call was submitted. A request is kept as what
    makes its body again, because only few bodies are ever read.
    """

    source: str
    started_s: float
    sent_s: float | None
    """When its request was written; None if it never was."""
    ended_s: float
    result: str
    """"valid", "invalid", "throttled", "failed", or "cancelled": mostly because another attempt answered."""
    hedge: bool
    """Whether another attempt was under way when it started."""
    problem: str
    """Why it gave no answer; "" for an answer."""
    usage: Usage
    cost_usd: float
    """US dollars, by the configured price."""
    request: Request = field(repr=False)
    reply: Reply | None = field(repr=False)
    """None if none came."""
    said: str = field(default="", repr=False)
    """What the server said instead of an answer, without secrets; "" if that is not known."""
    written: Callable[[], str | None] = field(default=lambda: None, repr=False)
    """Writes the body of its request again, as `Source.written`."""


def history_of(job: Job, now: float) -> tuple[PastAttempt, ...]:
    """Return the attempts of a job that ends at `now`, in the order in which they started."""
    attempts = (*job.past, *job.live)
    if len(attempts) > 1:
        attempts = tuple(sorted(attempts, key=lambda attempt: attempt.started_at))
    return tuple(_past(attempt, job.submitted_at, now) for attempt in attempts)


def _past(attempt: Attempt, began: float, now: float) -> PastAttempt:
    reply = attempt.reply
    return PastAttempt(
        attempt.upstream.name,
        attempt.started_at - began,
        attempt.reservation.sent_at - began if attempt.sent else None,
        # One without a result is being cancelled.
        (attempt.ended_at if attempt.result else now) - began,
        attempt.result or "cancelled",
        attempt.hedge,
        attempt.problem,
        NO_USAGE if reply is None or reply.usage is None else reply.usage,
        attempt.cost_usd,
        attempt.request,
        reply,
        attempt.said,
        partial(attempt.upstream.source.written, *(attempt.together_with or (attempt.request,))),
    )
