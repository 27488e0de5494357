"""Even pacing for servers that use a token bucket, and the detection of such servers.

A server that repeatedly throttles a client clearly below its limits within one window uses a token bucket, not a
sliding window. A 429 storm, or another client with the same API key, looks alike for a while, and pacing costs a third
of the speed. So pacing ends after two windows as a trial. If the server throttles again, pacing returns for twice as
long.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from .window_limit import MARGIN_S

if TYPE_CHECKING:
    from ..config.source_models import Limits
    from .shares import Shares

JITTER_S = 0.05
"""How much the network delays of two requests may differ, in seconds: a bucket rejects a request that comes early."""

_ROUNDING = 1e-9
_SLOWER = 0.05
"""Part of the speed that the full margin may cost."""
_THROTTLES = 3
"""Unexplained 429s within a window that show a token bucket."""
_FIRST_TERM_WINDOWS = 2
_LONGEST_TERM_WINDOWS = 1024
"""Windows for which a source is paced: they double from trial to trial, from the first to the longest."""


class Pace:
    """Paces requests with a small burst by the generic cell rate algorithm (ITU-T I.371), whose state is one time.

    It allows `rate_per_s` requests per second, and `burst` of them at once. `jitter_s`: how much later a request may
    reach the server than it is sent here. Where that costs less than `_SLOWER` of the speed, it allows for `MARGIN_S`,
    as windows do. 0: no margin.

    A request counts from when it is written, as the server counts it. Until then it is held: it may be written at any
    time, because it waits for a connection, or its process is stopped. `held` is the number of such requests.
    """

    def __init__(self, rate_per_s: float, burst: int, *, jitter_s: float = JITTER_S) -> None:
        self._jitter_s = jitter_s
        self._set(rate_per_s, burst)
        self._due = -math.inf
        self.until = math.inf
        """When its quota stops to pace: a trial ends."""

    def wait_s(self, now: float, held: float = 0.0) -> float:
        """Return the seconds until the next request may be sent, if those that are held are written now."""
        wait = self._due_after(held, now) - self._tolerance_s - now
        return wait if wait > _ROUNDING else 0.0

    def capacity(self, until: float, now: float, held: float = 0.0) -> float:
        """Return how many requests may be sent in [now, until], if those that are held are written now."""
        if until < now:
            return 0.0
        spare_s = until + self._tolerance_s - max(self._due_after(held, now), now)
        return max(0.0, math.floor(spare_s / self._interval_s + _ROUNDING) + 1.0)

    def refilled_in_s(self, now: float) -> float:
        """Return the seconds until the bucket is full, if nothing more is written."""
        return max(0.0, self._due - now)

    def drained(self, now: float) -> float:
        """Return how many requests the bucket is below full."""
        return max(0.0, self._due - now) / self._interval_s

    def spend(self, now: float, requests: float = 1.0) -> None:
        """Record that a request is written at `now`."""
        self._due = max(self._due, now) + requests * self._interval_s

    def change(self, rate_per_s: float, burst: int, now: float) -> None:
        """Change rate and burst. Requests that were sent before still count."""
        drained = self.drained(now)
        self._set(rate_per_s, burst)
        self._due = now + drained * self._interval_s

    def _due_after(self, held: float, now: float) -> float:
        """When the bucket is full again, if the requests that are held are written now."""
        return max(self._due, now) + held * self._interval_s if held > 0 else self._due

    def _set(self, rate_per_s: float, burst: int) -> None:
        self._interval_s = 1.0 / rate_per_s
        burst_s = (burst - 1) * self._interval_s
        margin_s = max(MARGIN_S, self._jitter_s) if self._jitter_s > 0 else 0.0
        # A burst too small to absorb the jitter needs a slower pace.
        slower_s = min(margin_s, max(self._jitter_s, _SLOWER * self._interval_s))
        self._interval_s += max(0.0, slower_s - burst_s)
        self._tolerance_s = max(0.0, burst_s - margin_s)


class Pacing:
    """Whether a quota paces its requests: always (`window: bucket`), never (`sliding`), or on trial after 429s that no
    other limit explains (`auto`).
    """

    def __init__(self, *, jitter_s: float) -> None:
        self._jitter_s = jitter_s
        self._forget()

    def _forget(self) -> None:
        self.pace: Pace | None = None
        """How requests are paced; None if they never were."""
        self.rejects_all = False
        """Whether a 429 came with no other request in flight, and no request was answered since."""
        self._throttled_at: deque[float] = deque(maxlen=_THROTTLES)
        self._term_windows = _FIRST_TERM_WINDOWS
        self._trial = False
        self._paced_until = -math.inf

    def active(self, now: float) -> bool:
        """Whether requests are paced now."""
        return self.pace is not None and now < self.pace.until

    def declare(self, limits: Limits, shares: Shares, now: float) -> None:
        """Pace as the declared limits say. What was sent before counts; a trial goes on."""
        if limits.window == "sliding" or shares.requests == math.inf:
            self._forget()
        elif limits.window == "auto" and self.pace is not None and self.pace.until == math.inf:
            self.pace = None
        if self.pace is not None:
            self.pace.change(shares.pace_per_s, shares.burst, now)
        if limits.window == "bucket":
            self._pace_until(math.inf, shares)

    def throttled(self, now: float, sent_at: float, shares: Shares) -> str | None:
        """Note a 429 that no other limit explains. Return a log message if requests are paced from now on, else None.
        Of the 429s between which no request is accepted, one counts: a bucket refills, while an outage rejects all.
        """
        throttled_at = self._throttled_at
        if throttled_at and (self.rejects_all or sent_at <= throttled_at[-1]):
            return None
        throttled_at.append(now)
        self.rejects_all = False
        if len(throttled_at) < _THROTTLES or now - throttled_at[0] > shares.window_s:
            return None
        throttled_at.clear()
        if self._trial and now - self._paced_until <= self._term_windows * shares.window_s:
            self._term_windows = min(2 * self._term_windows, _LONGEST_TERM_WINDOWS)
        else:
            self._term_windows = _FIRST_TERM_WINDOWS
        self._trial = True
        self._paced_until = now + self._term_windows * shares.window_s
        self.pace = None
        self._pace_until(self._paced_until, shares)
        return (
            "throttled below its declared limits, as by a token bucket: requests are paced for"
            f" {self._paced_until - now:.0f} s (set `window: bucket` to pace from the start)"
        )

    def _pace_until(self, until: float, shares: Shares) -> None:
        if shares.requests < math.inf:
            if self.pace is None:
                self.pace = Pace(shares.pace_per_s, shares.burst, jitter_s=self._jitter_s)
            self.pace.until = until
