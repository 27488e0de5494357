"""The limits of a strict server: what it has admitted, and how long a refused request would have to wait.

This code is separate from the client's quotas in `qreward_plugins.quotas`, because shared code would share its
mistakes. Refused requests are not entered. Every entry takes constant time, amortised.

Times are seconds of one clock and never go backwards. `wait_s` is 0 if a request may enter now.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from .servers import Server

CONCURRENCY_RETRY_AFTER_S = 1.0
"""Retry-After of a full server, which cannot know when a place gets free."""
SIZE = "window as a whole"
"""The name of the limit for a request that is larger than a whole token window."""
_NOTHING: Mapping[str, float] = {}


class ServerLimits:
    """The limits of one server, with the requests and tokens that it has admitted. Times are seconds."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._requests = _request_window(server)
        per_window = server.tokens_per_window
        self._tokens = None if per_window is None else Window(per_window, server.window_s)

    def broken(self, tokens: int, in_flight: int, now: float) -> tuple[str, float]:
        """Return the limit that a request of `tokens` would break and the seconds until it fits; "" and 0 if none."""
        concurrency = self._server.concurrency
        if concurrency is not None and in_flight >= concurrency:
            return "concurrency", CONCURRENCY_RETRY_AFTER_S
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now)
            if wait_s > 0:
                return "requests", wait_s
        if self._tokens is not None:
            wait_s = self._tokens.wait_s(tokens, now)
            if wait_s > 0:
                return (SIZE if tokens > self._tokens.limit else "tokens"), wait_s
        return "", 0.0

    def enter(self, tokens: int, now: float) -> None:
        """Count a request that is admitted."""
        if self._requests is not None:
            self._requests.enter(1, now)
        if self._tokens is not None:
            self._tokens.enter(tokens, now)

    def announced(self, now: float) -> Mapping[str, float]:
        """Return the limits that an answer announces, as in `Reply.announced`."""
        if self._server.announces is None:
            return _NOTHING
        factor = 1.0 if self._server.announces == "right" else self._server.wrong_by
        announced: dict[str, float] = {}
        for what, window, limit in (
            ("requests", self._requests, self._server.requests_per_window),
            ("tokens", self._tokens, self._server.tokens_per_window),
        ):
            if window is not None and limit is not None:
                announced[f"{what}_per_window"] = factor * limit
                # A bucket states its rate and what is left of that, as providers do, and nothing of its burst.
                whole = limit if isinstance(window, RequestBucket) else window.limit
                announced[f"{what}_remaining"] = factor * max(0, whole - window.used(now))
                announced[f"{what}_reset_s"] = window.reset_s(now)
        return announced


def _request_window(server: Server) -> Window | RequestBucket | None:
    per_window = server.requests_per_window
    if per_window is None or server.requests_per_minute is None:
        return None
    if server.window == "bucket":
        return RequestBucket(server.requests_per_minute, server.burst)
    return Window(per_window, server.window_s)


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

    def _fill(self, now: float) -> float:
        if now > self._at:
            if self._at > -math.inf:
                self._level = min(float(self.limit), self._level + (now - self._at) * self._rate_per_s)
            self._at = now
        return self._level
