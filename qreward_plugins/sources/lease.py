"""Defines `Lease`, a request under way at a replica: it counts there, and its end says whether the replica answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ..errors import InvalidReply, PermanentError, QRewardError, SourceUnusable, TransientError
from .prefixes import Prefix
from .replica import Replica

if TYPE_CHECKING:
    from .replicas import Replicas

_log = logging.getLogger("qreward_plugins.sources")

T = TypeVar("T")

_PATIENCE = 3.0
"""A call that is cancelled earlier than this many times the mean time of an answer does not count as a failure of its
replica: it may have been hedged.
"""


@dataclass(frozen=True, slots=True)
class TriedReplicas:
    """The replicas that one call was sent to in vain: those that refused it (400, 413, 422), with the last error, and
    those whose reply was invalid. The next request of the call carries it (`Request.refusal`), and goes to another one.
    """

    refused: tuple[Replica, ...] = ()
    error: str = ""
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
    (0: no bound), the part that its siblings share, and the replicas that the same call was sent to in vain.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix: Prefix | None = None
    tried: TriedReplicas | None = None


NO_HINTS = RoutingHints()
"""For a source with one replica, where no choice is made."""


class Lease:
    """A request under way at a replica. It counts there from `Replicas.acquire` until `release` or the end of a `with`
    block. Of `answered`, `failed` and `cancelled`, the first one that is called counts.
    """

    __slots__ = (
        "_began_at",
        "_cancelling",
        "_key",
        "_of",
        "_open",
        "_recorded",
        "_task",
        "_tokens",
        "_tried",
        "aborted",
        "mixed",
        "replica",
        "weights",
    )

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
        self._key = None if hints.prefix is None else hints.prefix.key
        if self._key is not None:
            of.same_prefix[self._key] += 1
        replica.began(self, tokens, hints.prefix, hints.prompt_tokens, now)

    @property
    def base_url(self) -> str:
        return self.replica.base_url

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
            if self._key is not None:
                same_prefix = self._of.same_prefix
                same_prefix[self._key] -= 1
                if not same_prefix[self._key]:
                    del same_prefix[self._key]

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
            error.refusal = self._refused(now, str(error))
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
            if replica is self.replica:
                continue
            replica.refused_alone()
            if not replica.refuses_alone:
                replica.refuses_alone = True
                _log.warning(
                    "%s, and the replica %s answers the same request; give all replicas the same model, chat template "
                    "and longest context",
                    tried.error,
                    self.replica.base_url,
                )
        return None

    def _refused(self, now: float, error: str) -> TriedReplicas | None:
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
        return replace(tried, refused=(self.replica,), error=error)

    def answered(self, now: float) -> None:
        """Record that the replica answered."""
        if not self._recorded:
            self._recorded = True
            self.replica.answered(now)
            self._of.answered(now - self._began_at)

    def failed(self, now: float, error: QRewardError | None = None, *, draining: bool = False) -> None:
        """Record that the replica was unreachable, answered with a status from 500 on or with what cannot be read, or
        refused a request as it may refuse all. `error` is told whether other replicas answer. `draining`: it said that
        it shuts down.
        """
        if isinstance(error, TransientError):
            error.of_one_replica = self._of.others_answer(self.replica)
        if not self._recorded:
            self._recorded = True
            self.replica.failed(now, began_at=self._began_at, draining=draining)

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
