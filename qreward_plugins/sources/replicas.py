"""Which of a source's base URLs a request goes to.

The replicas share the limits of their source, so this is plain load balancing: the fewest in flight, and past those
that failed a moment ago. Health in any deeper sense belongs to the scheduler, which sees the source as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

COOL_OFF_S = 5.0
"""Seconds for which a replica that could not be reached, or answered 5xx, is avoided while another one is up."""


@dataclass(slots=True)
class Replica:
    """One base URL."""

    base_url: str
    in_flight: int = 0
    last_used: int = 0
    failed_at: float | None = None

    def failed(self, now: float) -> None:
        """Say that it could not be reached or answered 5xx; `now` is the event loop's time in seconds."""
        self.failed_at = now

    def answered(self) -> None:
        """Say that it answered with anything but 5xx."""
        self.failed_at = None


class Replicas:
    """The base URLs of one source."""

    def __init__(self, base_urls: Sequence[str]) -> None:
        self._replicas = [Replica(url) for url in base_urls]
        self._uses = 0

    @contextmanager
    def borrow(self, now: float) -> Iterator[Replica]:
        """Choose a replica, and count it as busy until the block ends. `now` is the event loop's time in seconds."""
        replica = min(self._replicas, key=lambda r: (_is_cooling_off(r, now), r.in_flight, r.last_used))
        self._uses += 1
        replica.last_used = self._uses
        replica.in_flight += 1
        try:
            yield replica
        finally:
            replica.in_flight -= 1


def _is_cooling_off(replica: Replica, now: float) -> bool:
    # The second half is for the time of another event loop, which may have started later.
    return replica.failed_at is not None and 0 <= now - replica.failed_at < COOL_OFF_S
