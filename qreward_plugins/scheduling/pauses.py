"""Pauses that a throttled source asks for, or that grow by themselves where it does not say how long.

What was sent before a pause began and is throttled during it tells nothing new, and does not prolong it.
"""

from __future__ import annotations

import math

FIRST_S = 1.0
LONGEST_S = 60.0
_SHORTEST_S = 0.1


class Pauses:
    """When a source may be asked again. Times are seconds of the event loop's clock."""

    __slots__ = ("_at", "_in_row", "_until")

    def __init__(self) -> None:
        self._until = -math.inf
        self._at = -math.inf
        self._in_row = 0

    def left_s(self, now: float) -> float:
        """Seconds until it may be asked; 0: now."""
        return max(0.0, self._until - now)

    def throttled(self, retry_after_s: float | None, sent_at: float, now: float) -> float | None:
        """Note a 429 to what was sent at `sent_at`; return the pause in seconds that begins now, if one does."""
        if sent_at < self._at or now < self._until:
            return None
        self._in_row += 1
        growth = 2.0 ** min(self._in_row - 1, 10)
        if retry_after_s is None:
            pause_s = min(FIRST_S * growth, LONGEST_S)
        else:
            # "Retry at once" from a server that keeps on throttling would be a storm.
            pause_s = max(retry_after_s, min(_SHORTEST_S * growth, FIRST_S))
        self._at = now
        self._until = now + pause_s
        return pause_s

    def told(self, pause_s: float, now: float) -> None:
        """Note that another process was asked for a pause that has so many seconds left."""
        if now + pause_s > self._until:
            self._at = now
            self._until = now + pause_s

    def answered(self) -> None:
        """Note an answer: the next pause is a first one."""
        self._in_row = 0


__all__ = ["FIRST_S", "LONGEST_S", "Pauses"]
