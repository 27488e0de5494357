"""Events of scoring, as immutable values.

Every event has `at`, the event loop's clock in seconds. Names are shortened to `NAME_CHARS`, and details of attempts to
`DETAIL_CHARS`. Texts may contain line breaks and control characters, so escape them before you print them. No event
holds a credential.

    SampleSubmitted  ->  SampleEnded or SampleDropped            one of each for a sample
    AttemptStarted   ->  AttemptEnded                            a pair for each request to a source
    CallEnded                                                    one for each question of a judge

A sample may have several calls, and a call several attempts. Attempts that are cancelled because another one answered
end after their call. For a new metric, count these events as `statistics.py` does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from ..samples import Outcome
from ..samples.spent import Usage
from .batch_report import BatchReport

NAME_CHARS = 80
"""Most characters of a sample's id and data source."""
DETAIL_CHARS = 1_000
"""Most characters of the detail of an attempt."""
AttemptResult = Literal["answered", "invalid", "throttled", "failed", "refused", "cancelled"]
"""`answered`: a valid reply. `invalid`: a reply that is no verdict. `throttled`: the source asks for a pause (429).
`failed`: a time-out, a lost connection, a 5xx, or a function that raised. `refused`: the source will not answer this
request (400, 401, 403, 404 ...). `cancelled`: the scheduler ended it, mostly because another attempt answered."""


class SampleSubmitted(NamedTuple):
    """A sample was submitted."""

    at: float
    sample_id: str
    data_source: str


class SampleEnded(NamedTuple):
    """A sample has its outcome, which includes what it took: attempts, tokens, seconds and US dollars."""

    at: float
    sample_id: str
    data_source: str
    outcome: Outcome


class SampleDropped(NamedTuple):
    """A sample ended without an outcome: its caller cancelled it, or got a `JournalError`."""

    at: float
    sample_id: str
    data_source: str


class CallEnded(NamedTuple):
    """One call of a judge was answered, or failed."""

    at: float
    call: int
    """Number of the call, unique within an event loop."""
    judge: str
    source: str
    """The source of the last attempt; "" without any."""
    reason: str
    """Why it has no answer ("deadline", "exhausted", "dropped" ...); "" if it has one."""
    size: int
    """Size of the call in bytes of UTF-8."""
    waited_s: float
    """Seconds from the call to its first attempt; to its end if it had none."""
    attempts: int


class AttemptStarted(NamedTuple):
    """A request is sent to a source."""

    at: float
    call: int
    attempt: int
    """Number of the attempt within its call, from 0."""
    judge: str
    source: str
    hedge: bool
    """Whether another attempt of the call is running."""
    in_flight: int
    """Running attempts at this source, this one included."""


class AttemptEnded(NamedTuple):
    """A request to a source ended."""

    at: float
    call: int
    attempt: int
    judge: str
    source: str
    result: AttemptResult
    seconds: float
    """Seconds since it started."""
    usage: Usage
    """Tokens of its reply, as the source counts them."""
    cost_usd: float
    """US dollars, by the configured price."""
    timed_out: bool
    """Whether it exceeded its time limit."""
    late: bool
    """Whether its call had ended before, so that the answer changes no outcome."""
    detail: str
    """What went wrong; "" for a valid reply."""
    first_token_s: float | None = None
    """Seconds from sending to the first token; None for a reply that was not streamed."""


class RequestBatchSent(NamedTuple):
    """A request that may carry several calls is sent (`batch` of a source). Its attempts have started before."""

    at: float
    source: str
    calls: int


class SourceStateChanged(NamedTuple):
    """A source started or stopped taking requests.

    `state` and `before` are "up", "paused" (it asked for a pause), "held" (its servers sleep, or get other weights),
    "down" (its circuit is open), "degraded" (most of its replies are invalid) or "unusable" (it refuses everything).
    The scheduler looks at states when it places requests, so the end of a pause in which nothing waits is emitted
    later.
    """

    at: float
    source: str
    state: str
    before: str
    problem: str
    """Why it takes no requests, with the last error; "" if it takes them."""


class ReplicaChanged(NamedTuple):
    """The state or the weights of a replica of a source of kind `replicas` have changed."""

    at: float
    source: str
    replica: int
    state: str
    """"starting", "up", "draining", "updating", "asleep", "stale", "down", "failed" or "stopped"; see
    docs/replicas.md."""
    before: str
    version: str
    """The version of its weights; "" for those of the configuration."""
    problem: str
    """Why it takes no calls; "" if it has not failed."""


class BatchEnded(NamedTuple):
    """All samples of a batch have ended. Samples scored one by one form one batch until none of them is left."""

    at: float
    report: BatchReport


class EngineClosed(NamedTuple):
    """The engine is closed. This is the last event: flush and close what the observer holds."""

    at: float


Event: TypeAlias = (
    SampleSubmitted
    | SampleEnded
    | SampleDropped
    | CallEnded
    | AttemptStarted
    | AttemptEnded
    | SourceStateChanged
    | ReplicaChanged
    | RequestBatchSent
    | BatchEnded
    | EngineClosed
)


def short(text: object, chars: int = NAME_CHARS) -> str:
    """At most `chars` characters of `text`; "" for None."""
    return "" if text is None else str(text)[:chars]
