"""Limits that a server announces in its replies, and when the quota applies them.

One reply may come from a proxy or another deployment, or be provoked by its request, so a single reply never changes a
limit (promise P11). An announced limit applies while `REPLIES_NEEDED` of the last `REPLIES_KEPT` replies state it; of
several such limits the lowest applies.

A declared limit is never exceeded. A lower announced limit takes its place (`Ceiling`) until it is no longer announced,
or is refuted: after a window at the ceiling one request exceeds it, as a probe; after each rejected probe the wait
doubles, up to 16 windows. Two accepted probes in a row refute the ceiling. A token bucket accepts some that exceed its
rate, so `_REJECTIONS_NEEDED` rejections within a window put a refuted ceiling in its place again.
"""

from __future__ import annotations

import math
from collections import Counter, deque

REPLIES_NEEDED = 3
"""Number of replies that must announce the same limit before it applies."""
REPLIES_KEPT = 8
"""Number of recent replies whose announcements are kept."""
_PROBES_NEEDED = 2
_REJECTIONS_NEEDED = 3
_MAX_WAIT_WINDOWS = 16


class Announcements:
    """Records the limits that recent replies announced."""

    def __init__(self) -> None:
        self._recent: deque[float | None] = deque(maxlen=REPLIES_KEPT)

    def note(self, limit: float | None) -> float | None:
        """Record the limit that a reply announced; return the limit that applies now. None stands for no limit."""
        self._recent.append(limit)
        counts = Counter(self._recent)
        return min(
            (stated for stated, count in counts.items() if stated is not None and count >= REPLIES_NEEDED), default=None
        )


class Ceiling:
    """An announced limit below the declared one. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.limit = math.inf
        """The announced limit of all processes together; infinity if none below the declared one is announced."""
        self._refuted: float | None = None
        self._restored: float | None = None
        self._rejected_at: deque[float] = deque(maxlen=_REJECTIONS_NEEDED)
        self._probe_at = math.inf
        self._probing = False
        self._wait_windows = 1
        self._accepted_probes = 0

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
        self._wait_windows = min(2 * self._wait_windows, _MAX_WAIT_WINDOWS) if lower == self._restored else 1
        self._accepted_probes = 0
        self._probe_at = now + self._wait_windows * window_s if lower < math.inf else math.inf
        return True

    def rejected(self, now: float, window_s: float) -> None:
        """Record that the source rejected a request. After several, a refuted limit is no longer ignored."""
        if self._refuted is None:
            return
        self._rejected_at.append(now)
        if len(self._rejected_at) == _REJECTIONS_NEEDED and now - self._rejected_at[0] <= window_s:
            self._restored, self._refuted = self._refuted, None
            self._rejected_at.clear()

    def probe_in_s(self, now: float) -> float:
        """Seconds until one request may exceed the ceiling; infinity if a probe is in flight or there is no ceiling."""
        return math.inf if self._probing else max(0.0, self._probe_at - now)

    def probe_sent(self) -> None:
        """Record that a probe was sent: a request that exceeds the ceiling."""
        self._probing = True

    def probe_ended(self, now: float, *, sent: bool, rejected: bool, window_s: float) -> bool:
        """Record the end of the probe; return whether it refutes the ceiling.

        `sent`: the request reached the source. `rejected`: the source answered that a limit is exceeded.
        """
        self._probing = False
        if rejected:
            self._accepted_probes = 0
            self._wait_windows = min(2 * self._wait_windows, _MAX_WAIT_WINDOWS)
            self._probe_at = now + self._wait_windows * window_s
            return False
        self._probe_at = now
        self._accepted_probes += sent
        if self._accepted_probes < _PROBES_NEEDED or self.limit == math.inf:
            return False
        self._refuted, self.limit = self.limit, math.inf
        self._probe_at = math.inf
        return True

    def abandon(self, now: float) -> None:
        """Drop a probe in flight, because its event loop was closed."""
        if self._probing:
            self._probing = False
            self._probe_at = now
