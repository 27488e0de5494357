"""Chooses which base URL of a source a request goes to.

The replicas share the limits of their source, so this is plain load balancing: the replica with the fewest requests in
flight that has not failed recently. The scheduler tracks the health of the source as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COOL_OFF_S = 5.0
"""Seconds for which a replica is avoided after it was unreachable or answered 5xx, if another one is up."""


@dataclass(slots=True)
class Replica:
    """One base URL."""

    base_url: str
    in_flight: int = 0
    last_used: int = 0
    failed_at: float | None = None

    def __enter__(self) -> Replica:
        self.in_flight += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1

    def failed(self, now: float) -> None:
        """Record that it was unreachable or answered 5xx; `now` is the event loop's time in seconds."""
        self.failed_at = now

    def answered(self) -> None:
        """Record that it answered with a status below 500."""
        self.failed_at = None


class Replicas:
    """The base URLs of one source."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        self._replicas = [Replica(url) for url in base_urls]
        self._uses = 0

    def borrow(self, now: float) -> Replica:
        """Choose a replica for a `with` block, which counts as a request in flight. `now` is the event loop's time in
        seconds.
        """
        replica = min(self._replicas, key=lambda r: (_is_cooling_off(r, now), r.in_flight, r.last_used))
        self._uses += 1
        replica.last_used = self._uses
        return replica


def _is_cooling_off(replica: Replica, now: float) -> bool:
    # The difference is negative if `failed_at` comes from an event loop whose clock is ahead.
    return replica.failed_at is not None and 0 <= now - replica.failed_at < COOL_OFF_S
