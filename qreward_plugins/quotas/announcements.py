"""Limits that a server announces in its replies: believed when several replies say the same, and for a time.

One reply may come from a proxy, from another deployment, or be provoked by what was asked; so no single one changes a
limit (P11). A limit counts once `WITNESSES` of the last `HEARD` replies announced it, the lowest where several do, and
no longer when they cease to.

A declared limit stays the most that is sent. A lower one that the server announces is kept to instead (`Ceiling`), as
long as it is announced, and as long as it holds: after a window at it one request goes beyond, then after 2, 4, 8, 16,
and two that are accepted refute it.
"""

from __future__ import annotations

import math
from collections import Counter, deque

WITNESSES = 3
HEARD = 8
_DOUBTS = 2
_LONGEST_PATIENCE = 16


class Announcements:
    """The limits that the last replies announced."""

    __slots__ = ("_heard",)

    def __init__(self) -> None:
        self._heard: deque[float | None] = deque(maxlen=HEARD)

    def note(self, limit: float | None) -> float | None:
        """Take in what a reply announced, None where it announced nothing; return what is to be believed now."""
        self._heard.append(limit)
        counts = Counter(self._heard)
        return min((said for said, count in counts.items() if said is not None and count >= WITNESSES), default=None)


class Ceiling:
    """A limit that is announced below the declared one. Times are seconds of one monotonic clock."""

    __slots__ = ("_doubts", "_patience", "_probe_at", "_probing", "_refuted", "limit")

    def __init__(self) -> None:
        self.limit = math.inf
        """The whole limit, of all processes; infinity: none is announced below the declared one."""
        self._refuted: float | None = None
        self._probe_at = math.inf
        self._probing = False
        self._patience = 1
        self._doubts = 0

    def set(self, limit: float | None, *, declared: float, window_s: float, now: float) -> bool:
        """Keep to `limit` from now on, None or one that is not below `declared`: to none; return whether that is new.

        What was refuted is not believed again before another limit is announced.
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
        """Seconds until one request may go beyond it; infinity: one is under way, or there is no ceiling."""
        return math.inf if self._probing else max(0.0, self._probe_at - now)

    def probes(self) -> None:
        """Note that a request goes beyond it."""
        self._probing = True

    def probed(self, now: float, *, sent: bool, rejected: bool, window_s: float) -> bool:
        """Note the end of that request; return whether the ceiling is refuted by it."""
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
        """Forget a probe under way: its event loop was closed."""
        if self._probing:
            self._probing = False
            self._probe_at = now
