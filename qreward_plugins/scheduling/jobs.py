"""A job: one call, its attempts so far, and the sources that it may still go to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..samples.spent import NO_USAGE, Spent, Usage
from ..sources.base import Request
from .calls import Answer

if TYPE_CHECKING:
    from .attempts import Attempt
    from .batches import Batch, Member
    from .calls import Call, Caller
    from .upstream import Upstream

MAX_HEDGES = 5
"""Hedges of one sample in all. More than one, because a hedge may fail, too."""
MAX_LIVE = 3
"""Attempts of one sample at once; in simulation, a second hedge halved the loss where sources err often."""

MAX_FAULTS = 2
"""Most tries of one sample that hang in a local function or crash it."""
MAX_RESTARTS = 2
"""Attempts of one sample that are given up for their age. After three slow attempts the slowness is accepted."""
MAX_FORGIVEN = 4
"""Attempts of one sample that may be given up because of their source without counting as its last failure."""

NOWHERE: frozenset[str] = frozenset()
"""No source. A shared object: most jobs never fail, and thousands of them wait at once."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})

ANY_NUMBER = 2**31
"""`Job.most_together` of a job that was not in a request of several calls that failed."""

_SPREAD = 0x9E3779B1
"""Odd, and near 2**32 over the golden ratio: its multiples modulo 2**32 spread evenly (Fibonacci hashing, Knuth)."""


class Rank(NamedTuple):
    """What is compared before sizes: the lowest rank is served first. A job that was submitted alone ranks between
    batches by when it was submitted, so that neither single jobs nor batches starve.
    """

    last: int
    """`Job.last`: above 0 it goes after all others, whatever their priority."""
    priority: int
    """The user's priority, negated."""
    number: int
    """Number of the job's batch; for a single job, of the last batch that was begun before it."""
    single: bool
    """Whether it was submitted alone, in no batch."""
    untried: bool
    """Whether it has had no attempt yet: retries go first."""
    together: int
    """`Job.most_together`, negated. Only jobs with the same number go in one request."""


class ThrottledAt(NamedTuple):
    """The last attempt of a sample that a source throttled."""

    order: int
    """Its number at the source."""
    ended_at: float
    alone: int
    """How often the source had throttled the sample again, while it accepted others."""


@dataclass(eq=False, slots=True)
class Job:
    """One call on its way to its answer. Times are seconds of the event loop's clock."""

    call: Call[Any]
    caller: Caller
    member: Member
    batch: Batch
    submitted_at: float
    deadline_at: float
    request: Request
    """What is sent. `asks` replaces it."""
    sequence: int
    size: int = field(init=False)
    """Bytes of the request."""
    ended: bool = False
    """Whether its caller has the result, or has dropped it."""
    after: int = 0
    """Number of the last batch that was begun before it was submitted."""

    live: list[Attempt] = field(default_factory=list)
    """Attempts under way: one, or more when it is hedged."""
    past: tuple[Attempt, ...] = ()
    """Attempts that ended, in the order in which they ended."""
    attempts: int = 0
    failures: int = 0
    probes_left: int = 0
    """Free tries: number of probes that may still fail before a failure counts. A failed probe says little about its
    sample."""
    invalid: int = 0
    hedges: int = 0
    restarts: int = 0
    """Number of attempts that were given up for their age."""
    forgiven: int = 0
    """Number of attempts that were given up because of their source and would have been the last failure allowed. They
    do not count: the source might still have answered them."""
    throttled: int = 0
    """Number of attempts that were throttled."""
    throttled_at: Mapping[str, ThrottledAt] = field(init=False)
    """By source: the last attempt that was throttled there."""
    excused: int = 0
    """Number of attempts that failed because their source was down for all samples, or one of its replicas."""
    usage: Usage = NO_USAGE
    cost_usd: float = 0.0
    barred: frozenset[str] = NOWHERE
    """Sources that will never answer this sample."""
    backoff_until: Mapping[str, float] = field(init=False)
    """Sources that failed this sample, with the time from which they may be asked again. `back_off` changes it."""
    not_before: float = 0.0
    """Time before which no source may be asked, because the retry budget was used up."""
    invalid_at: frozenset[str] = NOWHERE
    """Sources that gave an invalid reply."""
    faults: int = 0
    """Number of attempts that hung in a local function or crashed it."""
    last: int = 0
    """Above 0 it goes after all others, whatever their priority. 1: it needs an empty window, or no source can answer
    it before its deadline. 2: it may harm others, because it may take a place for a whole time limit again."""
    last_until: float = math.inf
    """Time at which `last` ends."""
    raised_at: tuple[str, int] = ("", 0)
    """The local function that raised on it last, and how many answers it had given then."""
    most_together: int = ANY_NUMBER
    """Most calls that one request may carry if it carries this one. It falls when a request of several calls fails,
    because one of them may be to blame for that."""
    refused_for: str = ""
    """`SampleRefused.reason` of the last source that refused this sample; "" if none did."""
    refused_at: frozenset[str] = NOWHERE
    """Sources that refused this request with 400, 413 or 422."""
    refusals: Mapping[str, object] = field(init=False)
    """By source: what those of its servers did that refused it or answered invalidly, so that another one is asked."""
    refused: int = 0
    """Number of attempts that such servers refused."""
    last_problem: str = ""
    last_source: str = ""
    precedence: float = 0.0
    """Its sort key within its batch; a higher one is served earlier. By default its size."""
    begun: bool = False
    """Whether it cannot be asked again: its caller has a piece of the answer (`Call.on_text`), or it was sent and may
    go only `Call.once`."""
    question: Hashable = None
    """What it asks, if others may wait for its answer (`EqualCalls`)."""
    entry: int = 0
    """Number of its entry in the queue; 0 if it is not queued."""
    backoff_timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.size = self.request.size
        self.backoff_until = self.throttled_at = self.refusals = _NOTHING

    @property
    def waits(self) -> bool:
        """Whether it is queued, or avoids sources for a while."""
        return bool(self.entry) or self.backoff_timer is not None

    @property
    def hedgeable(self) -> bool:
        """Whether another attempt may be started beside those under way."""
        if self.call.on_text is not None or self.call.once or self.call.max_attempts is not None:
            # Two attempts would write two texts, and a text cannot be taken back.
            return False
        return len(self.live) < MAX_LIVE and self.hedges < MAX_HEDGES and not self.ended

    def request_to(self, source: str) -> Request:
        """What is sent to a source: `request`, with what its servers did that were asked in vain, if there are any."""
        refusal = self.refusals.get(source) if self.refusals else None
        return self.request if refusal is None else replace(self.request, refusal=refusal)

    def asks(self, request: Request) -> None:
        """Send `request` from now on."""
        self.request = request
        self.size = request.size

    @property
    def rank(self) -> Rank:
        """Its rank now."""
        joint = self.batch.together
        number = self.batch.number if joint else self.after
        own = self.member.priority
        return Rank(
            self.last,
            -(self.batch.priority if own is None else own),
            number,
            not joint,
            self.attempts == 0,
            -self.most_together,
        )

    @property
    def tie_break(self) -> int:
        """The sort key between equal deadlines. Single jobs keep their order. Jobs of a batch are shuffled, so that the
        jobs that miss their deadline are spread evenly over the batch.
        """
        return (self.sequence * _SPREAD) % 2**32 if self.batch.together else self.sequence

    def eligible(self, now: float) -> frozenset[str]:
        """The sources that this job may go to now. Their limits and health are not considered."""
        if self.not_before > now:
            return NOWHERE
        if not (self.barred or self.backoff_until):
            return set_of(self.call.sources)
        return frozenset(
            name for name in self.call.sources if name not in self.barred and self.backoff_until.get(name, now) <= now
        )

    def throttled_alone(self, source: str) -> int:
        """How often `source` throttled it again, while it accepted other samples."""
        last = self.throttled_at.get(source)
        return 0 if last is None else last.alone

    def go_last(self, until: float = math.inf, *, harmless: bool = False) -> None:
        """Let all others go first until this time, on the event loop's clock; a `harmless` one goes before the rest."""
        self.last, self.last_until = max(self.last, 1 if harmless else 2), until

    def go_with(self, most: int) -> None:
        """Go in requests of at most this number of calls from now on."""
        self.most_together = min(self.most_together, max(1, most))

    def back_off(self, source: str, until: float | None) -> None:
        """Avoid a source until this time, on the event loop's clock; None: use it again."""
        others = {name: at for name, at in self.backoff_until.items() if name != source}
        self.backoff_until = others if until is None else {**others, source: until}

    def ended_attempt(self, attempt: Attempt) -> None:
        """Note that an attempt under way has ended without ending the job."""
        self.live.remove(attempt)
        self.past += (attempt,)

    def next_backoff_end(self, now: float) -> float:
        """The earliest time at which its backoff from a source ends; infinity if there is none."""
        if self.not_before > now:
            return self.not_before
        if not self.backoff_until:
            return math.inf
        ends = (at for name, at in self.backoff_until.items() if at > now and name not in self.barred)
        return min(ends, default=math.inf)

    def forget_sources(self, names: frozenset[str]) -> None:
        """Forget what these sources did with it, because their names mean nothing or other sources from now on."""
        self.barred -= names
        self.invalid_at -= names
        self.refused_at -= names
        self.backoff_until = {name: at for name, at in self.backoff_until.items() if name not in names}
        self.refusals = {name: refusal for name, refusal in self.refusals.items() if name not in names}

    def let_go(self) -> None:
        """Forget the attempts when nobody needs them any more. They refer to the job; without this cycle its memory is
        freed at once.
        """
        self.live.clear()
        self.past = ()

    def spent(self, now: float) -> Spent:
        """Attempts, usage, time and cost so far."""
        return Spent(self.attempts, self.usage, now - self.submitted_at, self.cost_usd)

    def answer(self, attempt: Attempt, now: float) -> Answer[Any]:
        """The answer that `attempt` gave."""
        reply, upstream = attempt.reply, attempt.upstream
        model = (reply.model if reply is not None else "") or upstream.source.model
        return Answer(
            attempt.value,
            upstream.name,
            model,
            self.spent(now),
            attempt.service_s,
            answered_by=upstream.source,
            weights=None if reply is None else reply.weights,
        )


@lru_cache(1024)
def set_of(sources: tuple[str, ...]) -> frozenset[str]:
    """The names of a tuple as a set: the calls of a judge share one."""
    return frozenset(sources)


def why_not_in_time(job: Job, upstreams: Mapping[str, Upstream], now: float) -> str:
    """Return why a job has no answer at its deadline."""
    asked = " and ".join(attempt.upstream.name for attempt in job.live)
    if job.last_problem or asked:
        return job.last_problem or f"{asked} had not answered"
    problems = filter(None, (upstreams[name].problem(now) for name in job.call.sources))
    return "; ".join(["no source could take it in time", *problems])


def why_no_source(job: Job, upstreams: Mapping[str, Upstream]) -> str:
    """Return why no source can ever take a job."""
    if not job.call.sources:
        return "its sources were removed by a reload of the configuration"
    if job.last_problem:
        return job.last_problem
    barred = [upstreams[name] for name in job.barred]
    reasons = [
        f"{upstream.name}: {upstream.health.unusable or upstream.too_large(job.request) or 'it cannot take it'}"
        for upstream in barred
    ]
    return "no source can take it (" + "; ".join(sorted(reasons)) + ")"
