"""The limits that a judge server enforces exactly on arriving requests.

Providers use two algorithms, which need opposite behaviour of a client: a sliding window (spend it at once) and a token
bucket (pace). Both are pure: the time is an argument, so tests run them in virtual time. They do not use the client's
quotas in `qreward_plugins.quotas`, because shared code would share its mistakes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol

LimitKind = Literal["requests", "tokens", "concurrency"]

_BUCKET_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a judge server. `None` means no limit.

    Over a limit the server answers 429 and records a violation; rejected requests do not count as used. A request
    counts when the server has read it: a server that gets no processor for a while sees requests closer together than
    they were sent. Raises `ValueError` for values that cannot be enforced.
    """

    requests_per_minute: float | None = None
    """Requests per 60 s. In a window of another length: `requests_per_minute * window_s / 60`, rounded down."""
    tokens_per_minute: float | None = None
    """Tokens per 60 s: the prompt's are charged on arrival, the completion's after the scorer has answered."""
    concurrency: int | None = None
    """Requests in flight at once."""
    window_s: float = 60.0
    """Length of the sliding window in seconds. Shorten it to keep tests short. Also the window of
    `Report.max_requests_in_window`."""
    kind: Literal["sliding", "bucket"] = "sliding"
    """"sliding": at most the limit in any `window_s`. "bucket": a token bucket refilled at the rate."""
    burst_s: float = 1.0
    """Size of the bucket, in seconds of the rate (but at least one request). For `kind="bucket"` only."""
    announce: bool = True
    """Send `x-ratelimit-limit-*`, `x-ratelimit-remaining-*` and `x-ratelimit-reset-*` with every answer. A bucket
    states the rate per minute, what is left of it, and the seconds until the bucket is full, as OpenAI and Anthropic
    do; it states nothing of its burst."""
    retry_after: Literal["seconds", "milliseconds", "none"] = "seconds"
    """What a 429 says about retrying. "seconds": `Retry-After` in whole seconds, rounded up (RFC 9110, 10.2.3).
    "milliseconds": `retry-after-ms` in addition. "none": nothing."""

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "concurrency", "window_s", "burst_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"ServerLimits.{name} must be a finite number above 0, not {value!r}")
        if self.kind not in ("sliding", "bucket"):
            raise ValueError(f"ServerLimits.kind must be 'sliding' or 'bucket', not {self.kind!r}")
        if self.retry_after not in ("seconds", "milliseconds", "none"):
            raise ValueError(
                f"ServerLimits.retry_after must be 'seconds', 'milliseconds' or 'none', not {self.retry_after!r}"
            )
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if self.kind == "sliding" and value is not None and value * self.window_s < 60:
                raise ValueError(
                    f"ServerLimits.{name}={value!r} allows less than one in window_s={self.window_s!r} s:"
                    " make the window longer"
                )

    def request_ledger(self) -> Ledger | None:
        """The ledger of the requests, or None without a limit on them."""
        return self._ledger(self.requests_per_minute)

    def token_ledger(self) -> Ledger | None:
        """The ledger of the tokens, or None without a limit on them."""
        return self._ledger(self.tokens_per_minute)

    def _ledger(self, per_minute: float | None) -> Ledger | None:
        if per_minute is None:
            return None
        if self.kind == "bucket":
            rate_per_s = per_minute / 60.0
            return TokenBucket(rate_per_s, capacity=max(1.0, rate_per_s * self.burst_s))
        # Floating point may put a product like 0.7 * 60 just below the whole number.
        return SlidingWindow(math.floor(per_minute * self.window_s / 60.0 + 1e-9), self.window_s)


@dataclass(frozen=True)
class Excess:
    """Why a request was not admitted: it is `over` units above the limit, and `retry_after_s` seconds too early."""

    over: float
    retry_after_s: float


@dataclass(frozen=True)
class Announced:
    """What the headers of an answer state of a limit."""

    limit: float
    remaining: float
    reset_s: float
    """Seconds until all of the limit is free again if nothing more comes."""


class Ledger(Protocol):
    """The use of a limit. `now_s` is any monotonic time in seconds, never less than in the last call."""

    @property
    def limit(self) -> float:
        """The most that is admitted at once."""

    def take(self, amount: float, now_s: float) -> Excess | None:
        """Admit `amount` and record it (None), or change nothing and return how far it is over the limit."""

    def give_back(self, amount: float, taken_at_s: float) -> None:
        """Undo a `take` of this amount at that time."""

    def remaining(self, now_s: float) -> float:
        """The amount that would be admitted now."""

    def reset_s(self, now_s: float) -> float:
        """Seconds until all of the limit is free again if nothing more comes."""

    def announced(self, now_s: float) -> Announced:
        """What an answer states."""


class SlidingWindow:
    """At most `limit` admitted in any half-open window `(t - window_s, t]`."""

    def __init__(self, limit: float, window_s: float) -> None:
        self._limit = limit
        self._window_s = window_s
        self._entries: deque[list[float]] = deque()
        self._total = 0.0

    @property
    def limit(self) -> float:
        return self._limit

    def take(self, amount: float, now_s: float) -> Excess | None:
        self._forget(now_s)
        over = self._total + amount - self._limit
        if over <= 0:
            self._entries.append([now_s, amount])
            self._total += amount
            return None
        return Excess(over, self._wait_s(over, now_s))

    def give_back(self, amount: float, taken_at_s: float) -> None:
        for entry in reversed(self._entries):
            if entry[0] < taken_at_s:
                return
            if entry[0] == taken_at_s and entry[1] == amount:
                entry[1] = 0.0
                self._total -= amount
                return

    def remaining(self, now_s: float) -> float:
        self._forget(now_s)
        return self._limit - self._total

    def reset_s(self, now_s: float) -> float:
        self._forget(now_s)
        return self._entries[-1][0] + self._window_s - now_s if self._entries else 0.0

    def announced(self, now_s: float) -> Announced:
        return Announced(self._limit, self.remaining(now_s), self.reset_s(now_s))

    def _forget(self, now_s: float) -> None:
        entries = self._entries
        while entries and now_s - entries[0][0] >= self._window_s:
            self._total -= entries.popleft()[1]

    def _wait_s(self, over: float, now_s: float) -> float:
        freed = 0.0
        for at_s, amount in self._entries:
            freed += amount
            if freed >= over:
                return at_s + self._window_s - now_s
        return self._window_s  # larger than the limit itself: it never fits


class TokenBucket:
    """A bucket of `capacity` that fills at `rate_per_s`, full at the beginning.

    An amount larger than the bucket passes when the bucket is full, and leaves it in debt; otherwise it would never
    pass.
    """

    def __init__(self, rate_per_s: float, capacity: float) -> None:
        self._rate_per_s = rate_per_s
        self._capacity = capacity
        self._level = capacity
        self._level_at_s: float | None = None

    @property
    def limit(self) -> float:
        return self._capacity

    def take(self, amount: float, now_s: float) -> Excess | None:
        self._fill(now_s)
        missing = min(amount, self._capacity) - self._level
        if missing <= _BUCKET_TOLERANCE:
            self._level -= amount
            return None
        return Excess(missing, missing / self._rate_per_s)

    def give_back(self, amount: float, taken_at_s: float) -> None:
        self._level = min(self._capacity, self._level + amount)

    def remaining(self, now_s: float) -> float:
        self._fill(now_s)
        return max(0.0, self._level)

    def reset_s(self, now_s: float) -> float:
        self._fill(now_s)
        return (self._capacity - self._level) / self._rate_per_s

    def announced(self, now_s: float) -> Announced:
        # Providers state the rate per minute, and enforce it over shorter times without a word.
        self._fill(now_s)
        per_minute = self._rate_per_s * 60.0
        return Announced(per_minute, max(0.0, per_minute - (self._capacity - self._level)), self.reset_s(now_s))

    def _fill(self, now_s: float) -> None:
        if self._level_at_s is not None:
            self._level = min(self._capacity, self._level + (now_s - self._level_at_s) * self._rate_per_s)
        self._level_at_s = now_s
