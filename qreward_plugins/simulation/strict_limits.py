"""The limits of strict servers, simulated or real: what they have admitted, and how long a refused request has to wait.

Providers use two algorithms, which need opposite behaviour of a client: a sliding window (spend it at once) and a token
bucket (pace). Both are pure: times are seconds of any one clock that never goes backwards. They do not use the client's
quotas in `qreward_plugins.quotas`, because shared code would share its mistakes. Every entry takes constant time,
amortised.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Literal

LimitKind = Literal["requests", "tokens", "concurrency"]

CONCURRENCY_RETRY_AFTER_S = 1.0
"""Retry-After of a full server, which cannot know when a place gets free."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Excess:
    """Why a request was not admitted: it is `over` units above the limit, and `retry_after_s` seconds too early."""

    over: float
    retry_after_s: float


@dataclass(frozen=True)
class Announced:
    """What an answer states of a limit."""

    limit: float
    remaining: float
    reset_s: float
    """Seconds until all of the limit is free again if nothing more comes."""


class Ledger(ABC):
    """The use of a limit. `limit` is the most that is admitted at once."""

    limit: float

    def take(self, amount: float, now_s: float) -> Excess | None:
        """Admit `amount` and record it (None), or change nothing and return how far it is over the limit."""
        excess = self.excess(amount, now_s)
        if excess is None:
            self.enter(amount, now_s)
        return excess

    @abstractmethod
    def excess(self, amount: float, now_s: float) -> Excess | None:
        """What `take` would return."""

    @abstractmethod
    def enter(self, amount: float, now_s: float) -> None:
        """Record `amount`, whether it fits or not."""

    @abstractmethod
    def give_back(self, amount: float, taken_at_s: float) -> None:
        """Undo a `take` of this amount at that time."""

    @abstractmethod
    def announced(self, now_s: float) -> Announced:
        """What an answer states."""


def ledger_of(per_minute: float | None, window_s: float, bucket: float | None = None) -> Ledger:
    """The ledger of a limit per minute: a sliding window of `window_s` that admits its part, or with `bucket` a bucket
    of that size. Without a limit, a window that admits everything.
    """
    if per_minute is not None and bucket is not None:
        return TokenBucket(per_minute / 60.0, bucket)
    return SlidingWindow(math.inf if per_minute is None else per_window(per_minute, window_s), window_s)


def per_window(per_minute: float, window_s: float) -> int:
    """The part of a limit per minute that a window admits, rounded down."""
    # Floating point may put a product like 0.7 * 60 just below the whole number.
    return math.floor(per_minute * window_s / 60.0 + _ROUNDING)


class SlidingWindow(Ledger):
    """At most `limit` admitted in any half-open window `(t - window_s, t]`."""

    def __init__(self, limit: float, window_s: float) -> None:
        self.limit = limit
        self._window_s = window_s
        self._entries: deque[list[float]] = deque()
        self._total = 0.0

    def excess(self, amount: float, now_s: float) -> Excess | None:
        over = amount - self._remaining(now_s)
        return None if over <= 0 else Excess(over, self._wait_s(over, now_s))

    def enter(self, amount: float, now_s: float) -> None:
        self._entries.append([now_s, amount])
        self._total += amount

    def give_back(self, amount: float, taken_at_s: float) -> None:
        for entry in reversed(self._entries):
            if entry[0] < taken_at_s:
                return
            if entry[0] == taken_at_s and entry[1] == amount:
                entry[1] = 0.0
                self._total -= amount
                return

    def announced(self, now_s: float) -> Announced:
        remaining = self._remaining(now_s)
        reset_s = self._entries[-1][0] + self._window_s - now_s if self._entries else 0.0
        return Announced(self.limit, remaining, reset_s)

    def _remaining(self, now_s: float) -> float:
        entries, horizon_s = self._entries, now_s - self._window_s
        while entries and entries[0][0] <= horizon_s:
            self._total -= entries.popleft()[1]
        return self.limit - self._total

    def _wait_s(self, over: float, now_s: float) -> float:
        freed = 0.0
        for at_s, amount in self._entries:
            freed += amount
            if freed >= over:
                return at_s + self._window_s - now_s
        return self._window_s  # larger than the limit itself: it never fits


class TokenBucket(Ledger):
    """A bucket of `capacity` that fills at `rate_per_s`, full at the beginning.

    An amount larger than the bucket passes when the bucket is full, and leaves it in debt; otherwise it would never
    pass.
    """

    def __init__(self, rate_per_s: float, capacity: float) -> None:
        self.limit = capacity
        self._rate_per_s = rate_per_s
        self._level = capacity
        self._level_at_s: float | None = None

    def excess(self, amount: float, now_s: float) -> Excess | None:
        missing = min(amount, self.limit) - self._fill(now_s)
        return None if missing <= _ROUNDING else Excess(missing, missing / self._rate_per_s)

    def enter(self, amount: float, now_s: float) -> None:
        self._level = self._fill(now_s) - amount

    def give_back(self, amount: float, taken_at_s: float) -> None:
        self._level = min(self.limit, self._level + amount)

    def announced(self, now_s: float) -> Announced:
        # Providers state the rate per minute, and enforce it over shorter times without a word.
        per_minute, missing = self._rate_per_s * 60.0, self.limit - self._fill(now_s)
        return Announced(per_minute, max(0.0, per_minute - missing), missing / self._rate_per_s)

    def _fill(self, now_s: float) -> float:
        if self._level_at_s is not None:
            self._level = min(self.limit, self._level + (now_s - self._level_at_s) * self._rate_per_s)
        self._level_at_s = now_s
        return self._level


class StrictLimits:
    """The limits of one server on requests, tokens and concurrency, with the requests and tokens that it has admitted.
    `concurrency` None: no limit.
    """

    def __init__(self, requests: Ledger, tokens: Ledger, concurrency: float | None) -> None:
        self.requests, self.tokens = requests, tokens
        self.concurrency = math.inf if concurrency is None else concurrency

    def broken(self, tokens: int, in_flight: int, now: float) -> tuple[LimitKind, Excess] | None:
        """Return the limit that a request of `tokens` would break, and how far it is over it; None if it fits."""
        if in_flight >= self.concurrency:
            return "concurrency", Excess(1, CONCURRENCY_RETRY_AFTER_S)
        if excess := self.requests.excess(1, now):
            return "requests", excess
        if excess := self.tokens.excess(tokens, now):
            return "tokens", excess
        return None

    def enter(self, tokens: int, now: float) -> None:
        """Count a request that is admitted."""
        self.requests.enter(1, now)
        self.tokens.enter(tokens, now)

    def give_back(self, tokens: int, entered_at: float) -> None:
        """Undo the `enter` of that time."""
        self.requests.give_back(1, entered_at)
        self.tokens.give_back(tokens, entered_at)

    def announced(self, now: float) -> dict[str, Announced]:
        """Return what an answer states of the limits on requests and tokens, if there are any."""
        ledgers = {"requests": self.requests, "tokens": self.tokens}
        return {what: ledger.announced(now) for what, ledger in ledgers.items() if ledger.limit < math.inf}
