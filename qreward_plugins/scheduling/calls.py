"""Calls and answers: the input and the output of the scheduler.

A call is one question that any of several sources may answer. The scheduler decides when and where it is asked, and
does not know its content: `request` makes what is sent, `read` tells whether a reply is an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..errors import QRewardError
from ..samples.spent import NOTHING, Spent

if TYPE_CHECKING:
    from ..sources.base import Reply, Request, ServedWeights
    from .upstream import Upstream

T = TypeVar("T")


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True, eq=False)
class Call(Generic[T]):
    """One question to one of several sources.

    `sources` are the names of those that may answer. `request` makes the request of the n-th try (from 0); another try
    should draw another nonce. It raises `InputError` if there is none. `read` turns a reply into the value; it is pure,
    and raises `InvalidReply` for a reply that is no answer. `name` says in logs who asks.

    An invalid reply costs another try, at another source if there is one, up to `invalid_retries` times. Set
    `clear_blame` if something depends on who is to blame for invalid replies: the call then fails for them
    (`Unanswered.invalid`) only once its sources have given valid replies to other calls.

    `identity` names all that changes how a reply is read. With what is sent it makes the key under which an answer is
    recorded; "" is for answers that must not be recorded. `recall` makes the value of a recorded answer; it raises
    ValueError, LookupError or InvalidReply if the record does not suit any more. `instead` makes the value that its
    caller uses for a missing answer, for the record; it raises if there is none.

    `on_text` is called with each piece of the answer as it comes, from the event loop; it must not raise. After the
    first piece the call is not asked again: if its attempt comes to nothing, it fails (`broken`). Such a call is never
    hedged, and its attempts end with it. A source that does not stream never calls it. None: nobody reads the pieces.

    `max_attempts`: the call fails after so many attempts, or a time-out, whoever is to blame. None: the scheduler
    decides by what it learns.

    `once`: an attempt that was sent is not repeated and not hedged, because the request may change something; only one
    that was throttled goes again. `refusal_ends`: a source that refuses this request (400, 413, 422 and the like) ends
    the call (`refused`), because the caller wants to see the refusal. `choose` chooses among the sources that can take
    the call now. None: the strategy of the configuration does.
    """

    sources: tuple[str, ...]
    request: Callable[[int], Request]
    read: Callable[[Request, Reply], T]
    name: str = ""
    invalid_retries: int = 1
    clear_blame: bool = False
    identity: str = ""
    recall: Callable[[Any], T] | None = None
    instead: Callable[[Unanswered], T] | None = None
    on_text: Callable[[str], None] | None = None
    max_attempts: int | None = None
    once: bool = False
    refusal_ends: bool = False
    choose: Callable[[Sequence[Upstream]], Upstream] | None = None


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True)
class Answer(Generic[T]):
    """The answer to a call: its value, its source, and the time and cost of all attempts together.

    `service_s` is the time from sending the request of the successful attempt to its reply, in seconds. `recorded`:
    the answer was not asked for now, but comes from the journal.
    """

    value: T
    source: str = ""
    model: str = ""
    spent: Spent = NOTHING
    service_s: float = 0.0
    recorded: bool = False
    answered_by: Any = field(default=None, repr=False, compare=False)
    """The `Source` that answered; its name may mean another one by now. None for a recorded answer."""
    weights: ServedWeights | None = None
    """The weights that gave the answer; None if its source does not know them."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why a call has no answer: `reason` is one word for metrics, `detail` one sentence for people.

    `invalid`: sources that answer other calls refused this one, or gave it invalid replies only, so that the question
    may have provoked it. `source` was asked last.
    """

    reason: str
    detail: str = ""
    invalid: bool = False
    source: str = ""
    spent: Spent = NOTHING


class CallFailed(QRewardError):
    """A call has no answer; `why` has the reason."""

    def __init__(self, why: Unanswered) -> None:
        self.why = why
        super().__init__(f"{why.reason}: {why.detail}" if why.detail else why.reason)

    def __reduce__(self) -> tuple[object, ...]:
        return CallFailed, (self.why,)


class Caller(Protocol):
    """Gets the result of a call. The scheduler calls it from the event loop; it must not raise."""

    def ended(self, result: Answer[Any] | Unanswered) -> None:
        """The call has ended. Called once, and not for a call that was dropped."""
        ...
