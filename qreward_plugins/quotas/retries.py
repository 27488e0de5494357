"""The retry budget of a source: a fraction of its successes and a constant rate, so that retries do not overload it.

The budget delays retries and never forbids one, because the number of attempts and the deadline of a call bound them
already. A retry beyond the balance is a debt, and each further one waits longer: after a thousand simultaneous failures
the retries are sent at `FLOOR_PER_S`, not all at once. The scheduler asks for the wait when it takes a retry, so a
success shortens the waits of later retries only.
"""

from __future__ import annotations

import math

PER_SUCCESS = 0.2
"""Retries that each success adds."""
FLOOR_PER_S = 10.0
"""Retries per second that are added whatever succeeds."""
RESERVE = 100.0
"""Largest balance."""
_ROUNDING = 1e-9


class RetryBudget:
    """The retry budget of one source. It starts full. Times are seconds of one monotonic clock.

    In any `t` seconds with `s` successes, at most `RESERVE + FLOOR_PER_S * t + PER_SUCCESS * s` of the retries that are
    requested in them become due.
    """

    def __init__(self) -> None:
        self._balance = RESERVE
        self._at = -math.inf
        self.retries = 0
        """Number of retries so far."""

    def earn(self, now: float) -> None:
        """Record a success."""
        if self._balance >= RESERVE:  # mostly: it has no room for more
            self._at = max(self._at, now)
            return
        self._accrue(now)
        self._balance = min(RESERVE, self._balance + PER_SUCCESS)

    def withdraw(self, now: float) -> int:
        """Take one retry; return its number, for `wait_s`."""
        self._accrue(now)
        self._balance -= 1.0
        self.retries += 1
        return self.retries

    def wait_s(self, number: int, now: float) -> float:
        """Return the seconds until this retry may be sent, 0 for at once. Successes before `now` have made it less.
        Retries become due in the order in which they were taken.
        """
        self._accrue(now)
        balance = self._balance + (self.retries - number)
        return 0.0 if balance >= -_ROUNDING else -balance / FLOOR_PER_S

    def _accrue(self, now: float) -> None:
        if now > self._at:
            self._balance = min(RESERVE, self._balance + FLOOR_PER_S * (now - self._at))
            self._at = now
