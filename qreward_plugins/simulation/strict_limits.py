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
from collections.abc import Mapping
from dataclasses import dataclass

from .servers import Server

CONCURRENCY_RETRY_AFTER_S = 1.0
"""Retry-After of a full server, which cannot know when a place gets free."""
SHORTEST_WAIT_S = 0.01
"""The shortest wait that a simulated server asks for."""
SIZE = "window as a whole"
"""The name of the limit for a request that is larger than a whole token window."""
_NOTHING: Mapping[str, float] = {}
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


def ledger_of(per_minute: float | None, window_s: float, bucket: float | None = None) -> Ledger | None:
    """The ledger of a limit per minute, or None without a limit: a sliding window of `window_s` that admits its part,
    rounded down, or with `bucket` a bucket of that size.
    """
    if per_minute is None:
        return None
    if bucket is not None:
        return TokenBucket(per_minute / 60.0, bucket)
    # Floating point may put a product like 0.7 * 60 just below the whole number.
    return SlidingWindow(math.floor(per_minute * window_s / 60.0 + _ROUNDING), window_s)


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


class SimulatedLimits:
    """The limits of one simulated server, with the requests and tokens that it has admitted."""

    def __init__(self, server: Server) -> None:
        self._server = server
        bucket = float(server.burst) if server.window == "bucket" else None
        self._requests = ledger_of(server.requests_per_minute, server.window_s, bucket)
        self._tokens = ledger_of(server.tokens_per_minute, server.window_s)

    def broken(self, tokens: int, in_flight: int, now: float) -> tuple[str, float]:
        """Return the limit that a request of `tokens` would break and the seconds until it fits; "" and 0 if none."""
        concurrency = self._server.concurrency
        if concurrency is not None and in_flight >= concurrency:
            return "concurrency", CONCURRENCY_RETRY_AFTER_S
        if self._requests is not None and (excess := self._requests.excess(1, now)):
            return "requests", max(SHORTEST_WAIT_S, excess.retry_after_s)
        if self._tokens is not None and (excess := self._tokens.excess(tokens, now)):
            name = SIZE if tokens > self._tokens.limit else "tokens"
            return name, max(SHORTEST_WAIT_S, excess.retry_after_s)
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
        for what, ledger in (("requests", self._requests), ("tokens", self._tokens)):
            if ledger is not None:
                stated = ledger.announced(now)
                announced[f"{what}_per_window"] = factor * stated.limit
                announced[f"{what}_remaining"] = factor * math.floor(stated.remaining + _ROUNDING)
                announced[f"{what}_reset_s"] = stated.reset_s
        return announced
