"""Chooses which replica of a source a request goes to, and keeps count of what is under way at each.

The replicas share the limits of their source. The scheduler tracks the health of the source as a whole; here each
replica has a health of its own. `routing.py` has the strategies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from ..config.source_models import Routing
from ..errors import SourceHeld, TransientError
from ..observers.statistics import ReplicaStatistics
from ..samples.spent import Usage
from .base import ServedWeights
from .lease import NO_HINTS, Lease, RoutingHints
from .replica import Mark, Replica
from .routing import STALE_S, chosen

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

    Replicas come and go while calls are under way: `add` and `remove` never touch a call that was sent, and a call
    whose replica was removed is counted down as any other.
    """

    def __init__(self, base_urls: Iterable[str], routing: Routing | None = None, *, name: str = "") -> None:
        self._name = name
        self._routing = Routing() if routing is None else routing
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
    def routing(self) -> Routing:
        return self._routing

    @property
    def all(self) -> Sequence[Replica]:
        return self._replicas

    def add(self, base_url: str) -> None:
        """Add a replica that is up. One that is there already is marked up."""
        if any(replica.base_url == base_url for replica in self._replicas):
            self.mark(base_url, "up")
        else:
            self._replicas.append(Replica(base_url))
            self.were_several = self.were_several or self.several

    def remove(self, base_url: str) -> None:
        """Remove a replica. Its calls go on. Raises LookupError for an unknown one."""
        self._replicas.remove(self._found(base_url))

    def mark(self, base_url: str, mark: Mark) -> None:
        """Say that a replica is up, down or draining. One that comes up begins without failures, and with an empty
        cache. Raises LookupError for an unknown one.
        """
        replica = self._found(base_url)
        if mark == "up" and replica.mark != "up":
            replica.reset()
        replica.mark = mark

    def serves(self, base_url: str, weights: ServedWeights) -> None:
        """Set the weights of a replica. Raises LookupError for an unknown one."""
        self._found(base_url).weights = weights

    def abort(self, base_url: str) -> None:
        """Cancel the calls at a replica; they are to be asked again."""
        for lease in [lease for lease in self.leases if lease.base_url == base_url]:
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
        same_prefix = 1 if hints.prefix is None else self.same_prefix[hints.prefix.key] + 1
        return chosen(candidates, self._routing, hints.prefix, same_prefix=same_prefix, now=now)

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

    def _found(self, base_url: str) -> Replica:
        for replica in self._replicas:
            if replica.base_url == base_url:
                return replica
        raise LookupError(f"source {self._name!r} has no replica {base_url!r}")


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else _KEPT_SHARE * mean + (1 - _KEPT_SHARE) * value
