"""Chooses which replica of a source a request goes to, and keeps count of what is under way at each.

The replicas share the limits of their source. The scheduler tracks the health of the source as a whole; here each
replica has a health of its own. `routing.py` has the strategies. A `Lease` is a request under way at a replica.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from ..config.source_models import PREFIX_AWARE, RoutingStrategy
from ..errors import InvalidReply, PermanentError, QRewardError, SourceHeld, SourceUnusable, TransientError
from ..observers.statistics import ReplicaStatistics
from ..samples.spent import Usage
from .replica import Mark, Replica
from .routing import STALE_S, chosen

T = TypeVar("T")

_PATIENCE = 3.0
"""A call that is cancelled earlier than this many times the mean time of an answer does not count as a failure of its
replica: it may have been hedged.
"""


@dataclass(frozen=True, slots=True)
class TriedReplicas:
    """The replicas that one call was sent to in vain: those that refused it (400, 413, 422), and those whose reply was
    invalid. The next request of the call carries it (`Request.refusal`), and goes to another one.
    """

    refused: tuple[Replica, ...] = ()
    invalid: tuple[Replica, ...] = ()

    def others(self, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """Return those of `replicas` to which the call goes next: those not tried, else those that did not refuse it,
        else all.
        """
        left = [replica for replica in replicas if replica not in self.refused]
        return [replica for replica in left if replica not in self.invalid] or left or replicas


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """What is known of a request before a replica is chosen: its prompt tokens (estimated), the most completion tokens
    (0: no bound), a hash of the part that its siblings share, and the replicas that the same call was sent to in vain.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix: int | None = None
    tried: TriedReplicas | None = None


NO_HINTS = RoutingHints()
"""For a source with one replica, where no choice is made."""


class Lease:
    """A request under way at a replica. It counts there from `Replicas.acquire` until `release` or the end of a `with`
    block. Of `answered`, `failed` and `cancelled`, the first one that is called counts.
    """

    def __init__(self, of: Replicas, replica: Replica, hints: RoutingHints, tokens: int, now: float) -> None:
        self._of = of
        self.replica = replica
        self._tried = hints.tried
        self._tokens = tokens
        self._began_at = now
        self._open = True
        self._recorded = False
        self.weights = replica.weights
        """The weights of the replica when the request was sent."""
        self.mixed = False
        """Whether the replica had other weights when the request ended."""
        self.aborted = False
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        """How often its task had been cancelled before."""
        if of.gate is not None:
            self._task = asyncio.current_task()
            if self._task is not None and hasattr(self._task, "cancelling"):  # Python 3.11
                self._cancelling = self._task.cancelling()
            of.leases[self] = None
        self._prefix = hints.prefix
        if self._prefix is not None:
            of.same_prefix[self._prefix] += 1
        replica.began(self, tokens, hints.prefix, now)

    def abort(self) -> None:
        """Cancel the call, because it is sent again to another replica. Its task finds `aborted`."""
        if self._open and self._task is not None:
            self.aborted = True
            self._task.cancel()

    def end_abort(self) -> bool:
        """Let the task of a call that was aborted go on. False if somebody else has cancelled it, too: it ends then.

        Python 3.10 does not count who cancels, so it goes on there.
        """
        if self._task is None or not hasattr(self._task, "uncancel"):  # Python 3.11
            return True
        left: int = self._task.uncancel()
        return left <= self._cancelling

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """End the request's count. Idempotent."""
        if self._open:
            self._open = False
            self.replica.ended(self, self._tokens)
            self.mixed = self.replica.weights != self.weights
            if self._of.gate is not None:
                self._task = None
                self._of.leases.pop(self, None)
                self._of.gate.leave(self.replica.base_url)
            if self._prefix is not None:
                same_prefix = self._of.same_prefix
                same_prefix[self._prefix] -= 1
                if not same_prefix[self._prefix]:
                    del same_prefix[self._prefix]

    def read(self, now: float, read: Callable[[], T]) -> T:
        """Return what `read` reads of the reply, and record whether the replica answered.

        A refusal that may concern all requests (a key, a URL) is that of one replica while another one answers. The
        call then goes there. Raises what `read` raises, and TransientError for such a refusal. A PermanentError gets
        its `refusal` unless the request is at fault, and an InvalidReply if there are several replicas.
        """
        refusal: SourceUnusable | None = None
        try:
            found = read()
        except SourceUnusable as error:
            self.failed(now)
            if error.certain or not self._of.others_answer(self.replica):
                raise
            refusal = error
        except TransientError as error:
            self.failed(now, error)
            raise
        except PermanentError as error:
            error.refusal = self._refused(now)
            raise
        except InvalidReply as error:
            self.answered(now)
            if self._of.several:
                error.refusal = self.judged(False, now)
            raise
        except QRewardError:
            self.answered(now)
            raise
        else:
            self.answered(now)
            return found
        failure = TransientError(str(refusal), status=refusal.status)
        failure.of_one_replica = True
        raise failure

    def judged(self, valid: bool, now: float) -> TriedReplicas | None:
        """Record whether the judge found the answer valid. If not, return what the next request of the call carries, so
        that it goes to another replica.
        """
        self.replica.judged(valid, now)
        tried = self._tried or TriedReplicas()
        if not valid:
            return replace(tried, invalid=(*tried.invalid, self.replica))
        for replica in tried.refused:
            if replica is not self.replica:
                replica.refused_alone()
        return None

    def _refused(self, now: float) -> TriedReplicas | None:
        """Record that the replica refused the request. Return what its next request carries, to another replica; None
        if the request is at fault: a second one refused it, or there is no other.
        """
        tried = self._tried or TriedReplicas()
        self._recorded = True
        if tried.refused or all(replica is self.replica for replica in self._of.up):
            for replica in (*tried.refused, self.replica):
                replica.forgiven()
            return None
        if self._of.others_answer(self.replica):
            self.replica.refused(now, began_at=self._began_at)
        return replace(tried, refused=(self.replica,))

    def answered(self, now: float) -> None:
        """Record that the replica answered."""
        if not self._recorded:
            self._recorded = True
            self.replica.answered(now)
            self._of.answered(now - self._began_at)

    def failed(self, now: float, error: QRewardError | None = None) -> None:
        """Record that the replica was unreachable, answered with a status from 500 on or with what cannot be read, or
        refused a request as it may refuse all. `error` is told whether other replicas answer.
        """
        if isinstance(error, TransientError):
            error.of_one_replica = self._of.others_answer(self.replica)
        if not self._recorded:
            self._recorded = True
            self.replica.failed(now, began_at=self._began_at)

    def cancelled(self, now: float) -> None:
        """Record that the wait for the reply was given up. If it was a long wait, and the replica has answered nothing
        since the request was sent, this counts as a failure: it may hang. Before the first answer of any replica, it is
        unknown what a long wait is.
        """
        if self._recorded:
            return
        self._recorded = True
        waited_s, usual_s = now - self._began_at, self._of.mean_answer_s
        is_long = usual_s is not None and waited_s > _PATIENCE * usual_s
        if is_long and self.replica.answered_at < self._began_at:
            self.replica.failed(now, began_at=self._began_at)


_KEPT_SHARE = 0.9
"""Weight of the past in the means of completion tokens and of seconds."""


class CallGate(Protocol):
    """Admits calls to replicas that are drained and changed while calls are under way. Base URLs are those of
    `Replicas`.
    """

    def look(self) -> object:
        """Update which replicas are up, before one is chosen."""

    def enter(self, base_url: str) -> bool:
        """Count a call at a replica; False if it takes none any more, which `look` finds then."""

    def leave(self, base_url: str) -> None:
        """Count a call down."""

    def held(self) -> str:
        """Why no replica takes calls for a while; "" if nothing is to be waited for."""


class Replicas:
    """The replicas of the source `name`. It belongs to one event loop at a time and is not thread-safe.

    Replicas come and go while calls are under way: `move` never touches a call that was sent, and a call whose replica
    has gone is counted down as any other.
    """

    def __init__(
        self, base_urls: Iterable[str], routing: Sequence[RoutingStrategy] = PREFIX_AWARE, *, name: str = ""
    ) -> None:
        self._name = name
        self.routing = routing
        self._replicas = [Replica(url) for url in dict.fromkeys(base_urls)]
        self.were_several = len(self._replicas) > 1
        """Whether there ever was a choice: then statistics are shown, also while one replica is left."""
        self._uses = 0
        self._mean_completion: float | None = None
        self.mean_answer_s: float | None = None
        """Mean seconds from sending to a reply, over all replicas; None before the first."""
        self.same_prefix: Counter[int] = Counter()
        """Requests under way by prefix."""
        self.gate: CallGate | None = None
        """Admits calls to the replicas; None if all calls are admitted."""
        self.leases: dict[Lease, None] = {}
        """The calls under way; only with a `gate`."""
        self.absent = 0
        """Number of further replicas, which have no URL until their servers run again."""

    @property
    def several(self) -> bool:
        """Whether there is a choice, now or when those that are absent are back."""
        return len(self._replicas) + self.absent > 1

    def others_answer(self, replica: Replica) -> bool:
        """Whether there is another replica that has not failed since its last answer."""
        return any(other is not replica and other.is_healthy for other in self._replicas)

    @property
    def up(self) -> list[Replica]:
        """The replicas that take calls."""
        return [replica for replica in self._replicas if replica.mark == "up"]

    @property
    def all(self) -> Sequence[Replica]:
        return self._replicas

    def move(self, base_urls: Sequence[str]) -> None:
        """Have replicas at these URLs. What is known of those that stay is kept; calls at those that go, go on."""
        known = {replica.base_url: replica for replica in self._replicas}
        self._replicas = [known.get(url) or Replica(url) for url in base_urls]
        self.were_several = self.were_several or self.several

    def mark(self, replica: Replica, mark: Mark) -> None:
        """Say that a replica is up, down or draining. One that comes up begins without failures, and with an empty
        cache.
        """
        if mark == "up" and replica.mark != "up":
            replica.reset()
        replica.mark = mark

    def abort(self, replica: Replica) -> None:
        """Cancel the calls at a replica; they are to be asked again."""
        for lease in [lease for lease in self.leases if lease.replica is replica]:
            lease.abort()

    def acquire(self, now: float, hints: RoutingHints = NO_HINTS) -> Lease:
        """Choose a replica, and count the request as under way there. `now` is the event loop's time in seconds.

        Replicas that failed are tried less: only if their backoff is over, one call at a time, or if all have failed.
        Raises TransientError if no replica is up.
        """
        while True:
            if self.gate is not None:
                self.gate.look()
            replica = self._chosen(now, hints)
            if self.gate is None or self.gate.enter(replica.base_url):
                break
        self._uses += 1
        replica.last_used = self._uses
        # Counts are not shown for a source with one replica.
        tokens = 1 if hints is NO_HINTS else self._tokens(hints)
        return Lease(self, replica, hints, tokens, now)

    def _chosen(self, now: float, hints: RoutingHints) -> Replica:
        if len(self._replicas) == 1 and self._replicas[0].mark == "up" and hints.tried is None:
            return self._replicas[0]
        up: Sequence[Replica] = self.up
        if not up:
            held = "" if self.gate is None else self.gate.held()
            if held:
                raise SourceHeld(f"source {self._name!r}: {held}")
            raise TransientError(f"source {self._name!r}: no replica is up")
        if hints.tried is not None:
            up = hints.tried.others(up)
        candidates = [replica for replica in up if replica.takes_calls(now)] or up
        same_prefix = 1 if hints.prefix is None else self.same_prefix[hints.prefix] + 1
        return chosen(candidates, self.routing, hints.prefix, same_prefix=same_prefix, now=now)

    def used(self, replica: Replica, usage: Usage | None) -> None:
        """Count the usage that a reply of `replica` states."""
        if usage is None:
            return
        replica.used(usage)
        self._mean_completion = _mean(self._mean_completion, usage.completion_tokens)

    def answered(self, seconds: float) -> None:
        """Count the time that a reply took."""
        self.mean_answer_s = _mean(self.mean_answer_s, seconds)

    def statistics(self, now: float) -> tuple[ReplicaStatistics, ...]:
        """Return the statistics of every replica; `now` is the event loop's time in seconds."""
        return tuple(replica.statistics(now, STALE_S) for replica in self._replicas)

    def _tokens(self, hints: RoutingHints) -> int:
        """Estimate the tokens of a request, prompt and completion; at least 1."""
        completion: float = hints.completion_tokens or math.inf
        if self._mean_completion is not None:
            completion = min(completion, self._mean_completion)
        return max(1, hints.prompt_tokens + (0 if completion == math.inf else round(completion)))


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else _KEPT_SHARE * mean + (1 - _KEPT_SHARE) * value
