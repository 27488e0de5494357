"""Budgets: what a source, or all sources together, may spend.

A budget is the quota of a token limit whose tokens are millionths of a dollar. So what holds for a limit holds for it:
processes share it by their keeper, an attempt reserves the most that it can cost before it is sent, and settles what it
did cost. No more than the budget is spent, however many attempts are in flight in however many processes.

A call for which too much is spent does not wait: it goes to another source, or fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ..config import Budget
from ..quotas.quota import Quota
from ..quotas.reservation import Reservation
from .breaker import Breaker
from .latency import Speed

if TYPE_CHECKING:
    from .jobs import Job
    from .pauses import Pauses
    from .upstream import Upstream

SPENT: Final = "budget"
"""The reason of a call that fails because a budget is spent."""
ENDS_RUN: Final = "budget_ends_run"
"""The same with `on_spent: raise`."""

UNITS = 1e6
"""Units of a dollar in which a quota counts; the smallest amount that processes share is one."""
HOUR_S = 3600.0


class DollarBudget:
    """The budget of one source, or of the run. Amounts are US dollars, times seconds of the event loop's clock.

    It is shared as an upstream is: no circuit of its own opens, and no pause holds it.
    """

    def __init__(self, whose: str, budget: Budget, quota: Quota, pauses: Pauses) -> None:
        self.quota = quota
        self.per = budget.per
        self.reason = SPENT if budget.on_spent == "stop" else ENDS_RUN
        per = "an hour" if budget.per == "hour" else "a run"
        self.problem = f"the budget of {whose} is spent ({budget.usd:g} USD {per})"
        self.breaker, self.pauses, self.speed = Breaker(), pauses, Speed()
        self.live: dict[Any, None] = {}

    def wait_s(self, usd: float, now: float) -> float:
        """Return the seconds until `usd` may be spent; infinity if that depends on attempts in flight or the keeper."""
        wait_s = self.quota.wait_s(usd * UNITS, now, shares_request=True)
        return wait_s if wait_s <= HOUR_S else math.inf

    def lacks(self, usd: float, now: float) -> bool:
        """Whether too much is spent for `usd`, whatever the attempts in flight cost."""
        return self.quota.lacks(usd * UNITS, now)

    def reserve(self, usd: float, now: float) -> Reservation:
        """Set `usd` aside until `settle`."""
        return self.quota.reserve(0.0, usd * UNITS, now, shares_request=True)

    def left_usd(self, now: float) -> float | None:
        """Return what nobody has spent yet; None if the keeper has not said it."""
        left = self.quota.left(now)
        return max(0.0, left / UNITS) if left < math.inf else None

    def demand(self, waiting: Iterable[tuple[Upstream, int, float]]) -> tuple[int, float, float]:
        """Return what waits for it, see `Dispatcher.waiting_for`. `waiting`: for each source the number of its calls,
        and the most that one of them can cost.
        """
        mine = [(count, usd * UNITS) for upstream, count, usd in waiting if self in upstream.budgets]
        most = max((units for _, units in mine), default=0.0)
        return sum(count for count, _ in mine), sum(count * units for count, units in mine), most


def over_budget(job: Job, upstreams: Mapping[str, Upstream], now: float) -> dict[str, DollarBudget]:
    """Return the sources of `job` that have spent too much for it, each with the budget."""
    found = {name: upstreams[name].over_budget(job.request, now) for name in job.call.sources if name not in job.barred}
    return {name: budget for name, budget in found.items() if budget is not None}


def settle(reserved: Iterable[Reservation], usd: float | None, now: float) -> None:
    """Replace what was set aside by what was spent; None: that is not known, and all of it counts."""
    for reservation in reserved:
        reservation.release(now, completion_tokens=None if usd is None else usd * UNITS)
