"""A job: a call on its way to its answer, with all that its own history says about where it may go."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..sources.base import Request
from ..spent import NO_USAGE, Spent, Usage
from .calls import Answer, Call, Caller, Unanswered

if TYPE_CHECKING:
    from .attempts import Attempt
    from .batches import Batch, Member

MAX_HEDGES = 5
"""Hedges of one sample in all: some of them fail, too."""
MAX_LIVE = 3
"""Attempts of one sample at once; in simulation, a second hedge halved the loss where sources err often."""

MAX_FAULTS = 2
"""Most tries of one sample that hang in a local function or crash it."""
MAX_RESTARTS = 2
"""Attempts of one sample that are given up for their age: whoever is slow three times in a row is slow."""
MAX_RESCUES = 4
"""Attempts of one sample that are given up for their source, beyond those that count, before such an end is its own."""

_SPREAD = 0x9E3779B1
"""Odd, and near 2**32 over the golden ratio: its multiples modulo 2**32 spread evenly (Fibonacci hashing, Knuth)."""


class Rank(NamedTuple):
    """What is compared before sizes: the lowest rank is served first. A job that was submitted alone ranks between
    batches by when it was submitted, so that neither single jobs nor batches starve.
    """

    suspect: bool
    """`Job.suspect`: it goes after all others, whatever their priority."""
    priority: int
    """The user's priority, negated."""
    hopeless: bool
    """Whether no source can end it before its deadline (`Job.hopeless`)."""
    number: int
    """Number of the job's batch; for a single job, of the last batch that was begun before it."""
    single: bool
    """Whether it was submitted alone, in no batch."""
    untried: bool
    """Whether it has had no attempt yet: retries go first."""


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
    sequence: int
    ended: bool = False
    """Whether its caller has the result, or was not interested any more."""
    after: int = 0
    """Number of the last batch that was begun before it was submitted."""

    live: list[Attempt] = field(default_factory=list)
    """Attempts under way: one, or more when it is hedged."""
    past: list[Attempt] = field(default_factory=list)
    """Attempts that ended, in the order in which they ended."""
    attempts: int = 0
    failures: int = 0
    failed_at: float = math.inf
    """When it failed first; infinity: it has not."""
    probes_left: int = 0
    """Its free tries: so many probes of a source may fail before a failure counts against it. A failed probe says
    little about its sample."""
    invalid: int = 0
    hedges: int = 0
    restarts: int = 0
    """Attempts that were given up because they took far too long."""
    rescues: int = 0
    """Attempts that were given up because of their source when no failure was left to count: we ended them, and they
    may have been well."""
    throttled: int = 0
    """Attempts that were throttled."""
    excused: int = 0
    """Attempts that failed by no fault of the sample: its source was down for everybody."""
    usage: Usage = NO_USAGE
    cost_usd: float = 0.0
    barred: frozenset[str] = frozenset()
    """Sources that will never answer this sample."""
    rested_at: dict[str, float] = field(default_factory=dict)
    """Sources that failed this sample, and when they may be asked again; other sources may at once."""
    avoids: frozenset[str] = frozenset()
    """Sources whose whole token window it may exceed, while another source has room for it."""
    rests_until: float = 0.0
    """No source may be asked before, because its retries have used up their budget."""
    invalid_at: frozenset[str] = frozenset()
    """Sources that gave an invalid verdict."""
    faults: int = 0
    """Number of attempts that hung in a local function or crashed it."""
    suspect: bool = False
    """Whether all other samples go first: it crashed a local function, or an attempt of it took a whole time limit, and
    the next one may do so, too."""
    answers_before: dict[str, int] = field(default_factory=dict)
    """By local function: how many answers it had given when it last failed this sample."""
    refused_for: str = ""
    """`SampleRefused.reason` of the last source that refused this sample; "" if none did."""
    refused_at: frozenset[str] = frozenset()
    """Sources that refused this request with 400, 413 or 422."""
    undecided: bool = False
    """Whether all its tries are used up, and its outcome depends on whether its sources answer other samples."""
    last_problem: str = ""
    last_source: str = ""
    place: float = 0.0
    """Its place in the order of its batch; a higher one is served earlier. By default its size."""
    hopeless: bool = False
    """Whether no source can end it before its deadline, while others that can meet theirs wait."""
    first_at: float | None = None
    """When its first attempt started."""
    entry: int = 0
    """The job's live entry in the queue; 0: it is not queued."""
    rest_timer: asyncio.TimerHandle | None = None

    @property
    def hedgeable(self) -> bool:
        """Whether another attempt may be started beside those under way."""
        return len(self.live) < MAX_LIVE and self.hedges < MAX_HEDGES and not self.ended

    @property
    def size(self) -> int:
        return self.request.size

    @property
    def rank(self) -> Rank:
        """What is compared before sizes."""
        whole = self.batch.whole
        number = self.batch.number if whole else self.after
        return Rank(self.suspect, -self.batch.priority, self.hopeless, number, not whole, self.attempts == 0)

    @property
    def turn(self) -> int:
        """Decides between equal deadlines. Single jobs keep their order. Jobs of a batch are shuffled, so that misses
        are spread evenly over it, whatever order its samples are in.
        """
        return (self.sequence * _SPREAD) % 2**32 if self.batch.whole else self.sequence

    def eligible(self, now: float) -> frozenset[str]:
        """The sources that this job may go to now, as far as its own history says."""
        if self.rests_until > now:
            return frozenset()
        if not (self.barred or self.avoids or self.rested_at):
            return frozenset(self.call.sources)
        return frozenset(
            name
            for name in self.call.sources
            if name not in self.barred and name not in self.avoids and self.rested_at.get(name, now) <= now
        )

    def next_rested_at(self, now: float) -> float | None:
        """When the next of the sources that this job keeps away from may be asked again; None: it rests from none."""
        if self.rests_until > now:
            return self.rests_until
        if not self.rested_at:
            return None
        resting = [at for name, at in self.rested_at.items() if at > now and name not in self.barred]
        return min(resting, default=None)

    def let_go(self) -> None:
        """Forget the attempts, once nobody will ask how it came to its outcome: they hold the job in turn, and memory
        must not wait for the garbage collector.
        """
        self.live.clear()
        self.past.clear()

    def spent(self, now: float) -> Spent:
        """What it took so far."""
        return Spent(self.attempts, self.usage, now - self.submitted_at, self.cost_usd)

    def answer(self, attempt: Attempt, now: float) -> Answer[Any]:
        """The answer that `attempt` gave."""
        reply, upstream = attempt.reply, attempt.upstream
        model = (reply.model if reply is not None else "") or upstream.source.model
        return Answer(attempt.value, upstream.name, model, self.spent(now), attempt.service_s)

    def unanswered(self, reason: str, detail: str, now: float, *, invalid: bool = False) -> Unanswered:
        """The failure of this job."""
        return Unanswered(reason, detail, invalid, self.last_source, self.spent(now))


class JobHost(Protocol):
    """Holds the jobs, and ends them: the dispatcher."""

    def waiting_jobs(self) -> Iterable[Job]: ...

    def enqueue(self, job: Job) -> None: ...

    def finish(self, job: Job, result: Answer[Any] | Unanswered) -> None: ...

    def fail(self, job: Job, reason: str, detail: str, *, invalid: bool = False) -> None: ...
