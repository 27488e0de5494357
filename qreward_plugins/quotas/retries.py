"""How many retries a source is worth: a share of its successes and a floor, so that a failing source is not buried.

A retry is never forbidden, because every sample has its own bound on attempts and its deadline; it is put off until it
is covered. What is taken beyond the balance is debt, and the next retry waits longer: a thousand requests that fail at
once come back at ten a second, not in one wave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PER_SUCCESS = 0.2
FLOOR_PER_S = 10.0
RESERVE = 100.0


@dataclass(frozen=True)
class RetryUse:
    """A snapshot. `balance`: retries covered in advance; negative: those that still wait for theirs."""

    balance: float
    successes: int
    retries: int
    put_off: int
    longest_wait_s: float


class RetryBudget:
    """The retries of one source. It starts with a full reserve. Times are seconds of one monotonic clock.

    In any stretch of `t` seconds with `s` successes at most `RESERVE + FLOOR_PER_S * t + PER_SUCCESS * s` retries
    become due that the budget was asked for in it.
    """

    __slots__ = ("_at", "_balance", "_longest_wait_s", "_put_off", "_retries", "_successes")

    def __init__(self) -> None:
        self._balance = RESERVE
        self._at = -math.inf
        self._successes = 0
        self._retries = 0
        self._put_off = 0
        self._longest_wait_s = 0.0

    def earn(self, now: float) -> None:
        """Note a success."""
        self._accrue(now)
        self._balance = min(RESERVE, self._balance + PER_SUCCESS)
        self._successes += 1

    def withdraw(self, now: float) -> float:
        """Take one retry; return the seconds until it is covered, 0 for at once."""
        self._accrue(now)
        self._balance -= 1.0
        self._retries += 1
        if self._balance >= -1e-9:
            return 0.0
        wait_s = -self._balance / FLOOR_PER_S
        self._put_off += 1
        self._longest_wait_s = max(self._longest_wait_s, wait_s)
        return wait_s

    def use(self, now: float) -> RetryUse:
        """A snapshot."""
        self._accrue(now)
        return RetryUse(self._balance, self._successes, self._retries, self._put_off, self._longest_wait_s)

    def _accrue(self, now: float) -> None:
        if now > self._at:
            self._balance = min(RESERVE, self._balance + FLOOR_PER_S * (now - self._at))
            self._at = now
