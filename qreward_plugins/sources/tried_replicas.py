"""Defines `TriedReplicas`: the replicas that one call was sent to in vain, and who is at fault if they refused it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from .replica import Replica

_log = logging.getLogger("qreward_plugins.sources")

MOST_REFUSALS = 8
"""Replicas that refuse a request, from which the request is at fault, however many others there are."""
ENOUGH_REFUSALS = 2
"""Replicas that answer other requests and refuse this one, from which it is at fault."""


class TriedReplicas:
    """The replicas that one call was sent to in vain: they refused it (400, 413, 422), failed, or answered invalidly.

    The next request of the call carries it (`Request.refusal`), and goes to another replica. If that one answers, those
    that refused have failed. If the request is found at fault, no replica has.
    """

    __slots__ = ("_decided", "_refused", "_unanswered")

    def __init__(self) -> None:
        self._refused: dict[Replica, tuple[float, str]] = {}
        """Those that refused it, with the time at which it was first sent to them, and the error."""
        self._unanswered: dict[Replica, None] = {}
        """Those that did not answer it, or not validly."""
        self._decided = False

    def refused_by(self, replica: Replica, error: str, *, began_at: float) -> None:
        """Record that `replica` refused the request, sent at `began_at`."""
        self._refused.setdefault(replica, (began_at, error))

    def unanswered_by(self, replica: Replica) -> None:
        """Record that `replica` did not answer, or not validly."""
        self._unanswered[replica] = None

    def untried(self, up: Sequence[Replica]) -> list[Replica]:
        """Return those of `up` that were not tried yet, and may answer."""
        tried = self._refused.keys() | self._unanswered
        return [replica for replica in up if replica not in tried and not replica.refuses_all]

    def next(self, up: Sequence[Replica], *, more_later: bool) -> Sequence[Replica]:
        """Return those of `up` that the call may go to now; empty if it has to wait. `more_later`: further replicas may
        take it later.

        First come those that were not tried yet. Then one that refused it and answers others decides. Those that did
        not answer are tried again.
        """
        left = self.untried(up) or [replica for replica in up if replica in self._credible()]
        left = left or [replica for replica in up if replica in self._unanswered and replica not in self._refused]
        return left if left or (more_later and self._refused) else up

    def is_at_fault(self, up: Collection[Replica], *, more_later: bool) -> bool:
        """Whether the request is at fault, after a refusal. `up`: the replicas that take the call now. `more_later`:
        further ones may take it later.
        """
        credible = len(self._credible())
        if credible >= ENOUGH_REFUSALS or len(self._refused) >= MOST_REFUSALS:
            return True
        if self.untried([*up]):
            return False
        return credible > 0 or not (more_later or any(replica in self._unanswered for replica in up))

    def found_at_fault(self) -> None:
        """Record that the request is at fault."""
        self._decided = True
        for replica in self._refused:
            replica.refusal_confirmed()

    def answered_by(self, other: Replica, now: float) -> None:
        """Record that `other` gave a valid answer, and warn once of each replica that refused the call, or gave
        several invalid replies in a row.
        """
        if self._decided or other in self._refused:
            return
        for replica, (began_at, error) in self._refused.items():
            self._decided = True
            replica.refusal_contradicted(now, began_at=began_at)
            if not replica.refuses_alone:
                replica.refuses_alone = True
                _log.warning(
                    "%s, and the replica %s answers the same request. What %s refuses is asked elsewhere from now on; "
                    "give all replicas the same model, chat template and longest context",
                    error,
                    other.base_url,
                    replica.base_url,
                )
        for replica in self._unanswered:
            if replica.answers_invalidly and not replica.invalid_alone:
                replica.invalid_alone = True
                _log.warning(
                    "the last replies of the replica %s were invalid, and the replica %s gives a valid one. The former "
                    "gets one request at a time until a reply is valid; check its model and chat template",
                    replica.base_url,
                    other.base_url,
                )

    @property
    def problem(self) -> str:
        """The last refusal; "" if there was none."""
        return next((error for _, error in reversed(self._refused.values())), "")

    def _credible(self) -> list[Replica]:
        """Those whose refusal says something of the request: they answer others."""
        return [replica for replica, (began_at, _) in self._refused.items() if replica.answers_others(began_at)]
