"""Budgets: the dollars that a source, or all sources together, may spend, and the retries of a source.

A budget of dollars is the quota of a token limit whose tokens are millionths of a dollar. So what holds for a limit
holds for it: processes share it by their keeper, an attempt reserves the most that it can cost before it is sent, and
settles what it did cost. So no more than the budget is spent, however many attempts are in flight in however many
processes; only a model that writes more than its longest completion costs more than was set aside.

A call for which too much is spent does not wait: it goes to another source, or fails.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from .pauses import Breaker, Pauses
from .quota import Quota, Reservation

if TYPE_CHECKING:
    from ..config.source_models import Budget

SPENT: Final = "budget"
"""The reason of a call that fails because a budget is spent."""
ENDS_RUN: Final = "budget_ends_run"
"""The same with `on_spent: raise`."""

UNITS = 1e6
"""Units of a dollar in which a quota counts; the smallest amount that processes share is one."""
_ROUNDING = 1e-6
HOUR_S = 3600.0

RETRIES_PER_ANSWER = 0.2
"""Retries that each answer of a source adds to its budget."""
RETRIES_PER_S = 10.0
"""Retries per second that are added whatever is answered."""
MOST_RETRIES = 100.0
"""Largest balance of the budget, with which it begins."""


class DollarBudget:
    """The budget of one source, or of the run. Amounts are US dollars, times seconds of the event loop's clock.

    It is shared as an upstream is: no circuit of its own opens, and no pause holds it.
    """

    def __init__(self, whose: str, budget: Budget, quota: Quota) -> None:
        self.quota = quota
        self.per = budget.per
        self.reason = SPENT if budget.on_spent == "stop" else ENDS_RUN
        self._usd = budget.usd
        self._whose, self._amount = whose, f"{budget.usd:g} USD {'an hour' if budget.per == 'hour' else 'a run'}"
        self.breaker, self.pauses = Breaker(), Pauses()
        self.live: dict[Any, None] = {}

    def wait_s(self, usd: float, now: float) -> float:
        """Return the seconds until `usd` may be spent; infinity if that depends on attempts in flight or the keeper."""
        wait_s = self.quota.wait_s(usd * UNITS, now, shares_request=True)
        return wait_s if wait_s <= HOUR_S else math.inf

    def lacks(self, usd: float, now: float) -> bool:
        """Whether too much is spent for `usd`, whatever the attempts in flight cost."""
        return usd * UNITS > self.quota.left(now) + _ROUNDING

    def problem(self, usd: float) -> str:
        """Say why `usd` may not be spent."""
        if usd > self._usd:
            return f"the budget of {self._whose} ({self._amount}) is below the price of one call (up to {usd:.2g} USD)"
        rest = f"the rest does not pay for one more call, which may cost {usd:.2g} USD"
        return f"the budget of {self._whose} is spent ({self._amount}): {rest}"

    def reserve(self, usd: float, now: float) -> Reservation:
        """Set `usd` aside, until what was spent in its place is known."""
        return self.quota.reserve(0.0, usd * UNITS, now, shares_request=True)

    def left_usd(self, now: float) -> float | None:
        """Return what nobody has spent yet; None if the keeper has not said it."""
        left = self.quota.left(now)
        return max(0.0, left / UNITS) if left < math.inf else None


class RetryBudget:
    """The retry budget of a source: a part of its answers and a constant rate, so that retries do not overload it.
    Times are seconds of one monotonic clock.

    It delays retries and never forbids one, because the number of attempts and the deadline of a call bound them
    already. A retry beyond the balance is a debt, and each further one waits longer: after a thousand failures at once,
    the retries go at `RETRIES_PER_S`. In `t` seconds with `n` answers, at most
    `MOST_RETRIES + RETRIES_PER_S * t + RETRIES_PER_ANSWER * n` of the retries that are requested in them become due.
    """

    def __init__(self) -> None:
        self._balance = MOST_RETRIES
        self._at = -math.inf
        self._answers = 0
        self.retries = 0
        """Number of retries so far."""

    def withdraw(self, answers: int, now: float) -> float:
        """Take one retry; return the seconds until it may be sent. `answers`: all that the source has given so far."""
        added = RETRIES_PER_ANSWER * (answers - self._answers)
        if now > self._at:
            added += RETRIES_PER_S * (now - self._at)
            self._at = now
        self._answers = answers
        self._balance = min(MOST_RETRIES, self._balance + added) - 1.0
        self.retries += 1
        return 0.0 if self._balance >= -_ROUNDING else -self._balance / RETRIES_PER_S
