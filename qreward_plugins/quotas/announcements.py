"""Limits that a server announces in its replies, and when they are believed.

One reply may come from a proxy or another deployment, or be provoked by its request, so a single reply never changes a
limit (promise P11). An announced limit counts while `WITNESSES` of the last `HEARD` replies state it; of several such
limits the lowest counts.

A declared limit is never exceeded. A lower announced limit takes its place (`Ceiling`) until it is no longer announced,
or is refuted: after a window at the ceiling one request exceeds it, as a probe; after each rejected probe the wait
doubles, up to 16 windows. Two accepted probes in a row refute the ceiling.
"""

from __future__ import annotations

import math
from collections import Counter, deque

WITNESSES = 3
"""Replies that have to announce the same limit."""
HEARD = 8
"""Number of the last replies that are looked at."""
_DOUBTS = 2
_LONGEST_PATIENCE = 16


class Announcements:
    """The limits that the last replies announced."""

    __slots__ = ("_heard",)

    def __init__(self) -> None:
        self._heard: deque[float | None] = deque(maxlen=HEARD)

    def note(self, limit: float | None) -> float | None:
        """Note the limit that a reply announced (None: none), and return the limit to believe now (None: none)."""
        self._heard.append(limit)
        counts = Counter(self._heard)
        return min((said for said, count in counts.items() if said is not None and count >= WITNESSES), default=None)


class Ceiling:
    """A limit that is announced below the declared one. Times are seconds of one monotonic clock."""

    __slots__ = ("_doubts", "_patience", "_probe_at", "_probing", "_refuted", "limit")

    def __init__(self) -> None:
        self.limit = math.inf
        """The announced limit of all processes together; infinity if none below the declared one is announced."""
        self._refuted: float | None = None
        self._probe_at = math.inf
        self._probing = False
        self._patience = 1
        self._doubts = 0

    def set(self, limit: float | None, *, declared: float, window_s: float, now: float) -> bool:
        """Set the ceiling to `limit`, or to none if that is None or not below `declared`; return whether it changed.

        A refuted limit is ignored until another one is announced.
        """
        if limit != self._refuted:
            self._refuted = None
        lower = limit if limit is not None and limit < declared and limit != self._refuted else math.inf
        if lower == self.limit:
            return False
        self.limit = lower
        self._patience, self._doubts = 1, 0
        self._probe_at = now + window_s if lower < math.inf else math.inf
        return True

    def probe_in_s(self, now: float) -> float:
        """Seconds until one request may exceed the ceiling; infinity if a probe is in flight or there is no ceiling."""
        return math.inf if self._probing else max(0.0, self._probe_at - now)

    def probes(self) -> None:
        """Note that a request exceeds the ceiling: the probe."""
        self._probing = True

    def probed(self, now: float, *, sent: bool, rejected: bool, window_s: float) -> bool:
        """Note the end of the probe; return whether it refutes the ceiling.

        `sent`: the request reached the source. `rejected`: the source answered that a limit is exceeded.
        """
        self._probing = False
        if rejected:
            self._doubts = 0
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
            self._probe_at = now + self._patience * window_s
            return False
        self._probe_at = now
        self._doubts += sent
        if self._doubts < _DOUBTS or self.limit == math.inf:
            return False
        self._refuted, self.limit = self.limit, math.inf
        self._probe_at = math.inf
        return True

    def abandon(self, now: float) -> None:
        """Forget a probe in flight, because its event loop was closed."""
        if self._probing:
            self._probing = False
            self._probe_at = now
