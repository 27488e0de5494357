"""A circuit breaker per source: after failures in a row it keeps samples away, and asks again with one probe.

Without it a source that refuses at once looks like the fastest of all, and every waiting sample burns its attempts
there while a healthy source would have served it a little later. A source that accepts requests and never answers is
worse: nothing fails until a time limit of minutes has passed. So silence opens it, too: the lane can tell how many
answers are missing that should have come since the last one. And a probe that is overdue has failed.
"""

from __future__ import annotations

import math

FAILURES_TO_OPEN = 5
SHARE_TO_OPEN = 0.25
"""Failures in a row, as a share of what is in flight, that open it: errors come quicker than answers, so the first ends
of a burst are failures even where one request in ten fails."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Closed: everything may pass. Open until a time. Half-open: one probe may pass, and its end decides."""

    def __init__(self) -> None:
        self.failures_in_row = 0
        self._open_until = -math.inf
        self._pause_s = FIRST_PAUSE_S
        self._probing = False

    @property
    def closed(self) -> bool:
        return self._open_until == -math.inf

    def wait_s(self, now: float) -> float:
        """Seconds until an attempt may pass; infinity while a probe is under way."""
        if self._open_until == -math.inf:
            return 0.0
        if self._probing:
            return math.inf
        return max(0.0, self._open_until - now)

    def rest_s(self, now: float) -> float:
        """Seconds that are left of a rest; 0: it has none, or a probe finds out."""
        return 0.0 if self.closed or self._probing else max(0.0, self._open_until - now)

    def started(self) -> None:
        """Note that an attempt passed."""
        if not self.closed:
            self._probing = True

    def succeeded(self) -> None:
        """Note that the source answered."""
        self.failures_in_row = 0
        self._open_until = -math.inf
        self._pause_s = FIRST_PAUSE_S
        self._probing = False

    def failed(self, now: float, *, probe: bool, in_flight: int) -> bool:
        """Note a failure while `in_flight` attempts are under way; return whether it opened just now.

        `probe`: the attempt started while the breaker was open.
        """
        self.failures_in_row += 1
        if probe and not self.closed:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._open(now)
            return True
        if self.closed and self.failures_in_row >= max(FAILURES_TO_OPEN, SHARE_TO_OPEN * in_flight):
            self._open(now)
            return True
        return False

    def trip(self, now: float) -> bool:
        """Open it, because the source is silent or its answers are worth nothing; return whether it was closed."""
        if not self.closed:
            return False
        self._open(now)
        return True

    def told(self, rest_s: float, now: float) -> None:
        """Note that another process gives the source a rest that has so many seconds left."""
        if self.closed:
            self._open_until = now + rest_s

    def told_of_recovery(self, now: float) -> None:
        """Note that another process had an answer: a probe may go at once."""
        if not self.closed:
            self._open_until = min(self._open_until, now)

    def abandoned(self, *, probe: bool) -> None:
        """Note that an attempt ended without telling anything about the source (cancelled, throttled)."""
        if probe:
            self._probing = False

    def _open(self, now: float) -> None:
        self._open_until = now + self._pause_s
        self._probing = False
