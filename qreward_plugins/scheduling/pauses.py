"""Pauses that a throttled source asks for, or that grow by themselves where it does not say how long.

What was sent before a pause began and is throttled during it adds no growth, and does not begin a new pause; but where
it says when to come back, and that is later than was known, the later time counts: the server's word is a time, and the
latest is the one that holds for everything.

No pause is believed to the end: after `PROBE_AFTER_S` seconds of it one request may go, and after as long again the
next. An answer to one ends the pause, so that an absurd word of one reply cannot keep a source from everybody.
"""

from __future__ import annotations

import math

FIRST_S = 1.0
LONGEST_S = 60.0
PROBE_AFTER_S = 60.0
"""Seconds of a pause after which one request probes the source."""
_SHORTEST_S = 0.1
_LATER_S = 0.05
"""Less than this is the way of a reply, and no later time."""


class Pauses:
    """When a source may be asked again. Times are seconds of the event loop's clock."""

    __slots__ = ("_at", "_in_row", "_probe_at", "_until")

    def __init__(self) -> None:
        self._until = -math.inf
        self._at = -math.inf
        self._probe_at = math.inf
        self._in_row = 0

    def left_s(self, now: float) -> float:
        """Seconds until it may be asked, by a probe if need be; 0: now."""
        return max(0.0, min(self._until, self._probe_at) - now)

    def started(self, now: float) -> None:
        """Note that a request is sent: in a pause it is the probe, and the next one waits."""
        if now < self._until:
            self._probe_at = now + PROBE_AFTER_S

    def throttled(self, retry_after_s: float | None, sent_at: float, now: float) -> float | None:
        """Note a 429 to what was sent at `sent_at`; return the pause in seconds that lasts from now, if one begins or
        becomes longer.
        """
        if sent_at <= self._at or now < self._until:
            if retry_after_s is None or now + retry_after_s <= max(self._until, now) + _LATER_S:
                return None
            if now >= self._until:
                self._probe_at = math.inf
            return self._pause(now + retry_after_s, now)
        self._in_row += 1
        growth = 2.0 ** min(self._in_row - 1, 10)
        if retry_after_s is None:
            pause_s = min(FIRST_S * growth, LONGEST_S)
        else:
            # "Retry at once" from a server that keeps on throttling would be a storm.
            pause_s = max(retry_after_s, min(_SHORTEST_S * growth, FIRST_S))
        self._at = now
        self._probe_at = math.inf
        return self._pause(now + pause_s, now)

    def told(self, pause_s: float, now: float) -> None:
        """Note that another process was asked for a pause that has so many seconds left."""
        if now + pause_s > self._until:
            if now >= self._until:
                self._at = now
                self._probe_at = math.inf
            self._pause(now + pause_s, now)

    def answered(self, sent_at: float = math.inf) -> None:
        """Note an answer to what was sent at `sent_at`: the next pause is a first one, and the present one is over if
        that was sent in it.
        """
        self._in_row = 0
        if sent_at > self._at:
            self._until = min(self._until, sent_at)

    def _pause(self, until: float, now: float) -> float:
        self._until = until
        # A pause that becomes longer is probed as early as it would have been.
        self._probe_at = min(self._probe_at, now + PROBE_AFTER_S)
        return until - now


__all__ = ["FIRST_S", "LONGEST_S", "PROBE_AFTER_S", "Pauses"]
