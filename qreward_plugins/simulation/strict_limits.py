"""The limits of a strict server: what it has admitted, and how long a refused request would have to wait.

This code is separate from the client's quotas in `qreward_plugins.quotas`, because shared code would share its
mistakes. Refused requests are not entered. Every entry takes constant time, amortised.

Times are seconds of one clock and never go backwards. `wait_s` is 0 if a request may enter now.
"""

from __future__ import annotations

import math
from collections import deque

SHORTEST_WAIT_S = 0.01
"""The shortest wait that a server asks for."""


_ROUNDING = 1e-9


class Window:
    """At most `limit` requests or tokens in any half-open window `(t - window_s, t]`."""

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._entries: deque[tuple[float, int]] = deque()
        self._total = 0

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` more fits; a whole window if it never does."""
        excess = self.used(now) + amount - self.limit
        if excess <= 0:
            return 0.0
        for at, entered in self._entries:
            excess -= entered
            if excess <= 0:
                return max(SHORTEST_WAIT_S, at + self.window_s - now)
        return self.window_s

    def enter(self, amount: int, now: float) -> None:
        """Enter `amount`, whether it fits or not."""
        self._entries.append((now, amount))
        self._total += amount

    def used(self, now: float) -> int:
        """The amount in the window that ends now."""
        entries, horizon = self._entries, now - self.window_s
        while entries and entries[0][0] <= horizon:
            self._total -= entries.popleft()[1]
        return self._total

    def reset_s(self, now: float) -> float:
        """Seconds until the whole limit is free again, if nothing more comes."""
        return self._entries[-1][0] + self.window_s - now if self.used(now) else 0.0


class RequestBucket:
    """A token bucket of requests: `burst` at once, refilled at `per_minute`; initially full."""

    def __init__(self, per_minute: float, burst: int) -> None:
        self.limit = burst
        self._rate_per_s = per_minute / 60.0
        self._level = float(burst)
        self._at = -math.inf

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` more requests fit."""
        missing = amount - self._fill(now)
        return 0.0 if missing <= _ROUNDING else max(SHORTEST_WAIT_S, missing / self._rate_per_s)

    def enter(self, amount: int, now: float) -> None:
        """Enter `amount` requests, whether they fit or not."""
        self._level = self._fill(now) - amount

    def used(self, now: float) -> int:
        """The used part of the bucket, in whole requests."""
        return self.limit - math.floor(self._fill(now) + _ROUNDING)

    def reset_s(self, now: float) -> float:
        """Seconds until the bucket is full again, if nothing more comes."""
        return (self.limit - self._fill(now)) / self._rate_per_s

    def change(self, per_minute: float, now: float) -> None:
        """Refill at another rate from now on."""
        self._level = self._fill(now)
        self._rate_per_s = per_minute / 60.0

    def _fill(self, now: float) -> float:
        if now > self._at:
            if self._at > -math.inf:
                self._level = min(float(self.limit), self._level + (now - self._at) * self._rate_per_s)
            self._at = now
        return self._level
