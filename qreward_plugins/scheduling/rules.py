"""Fixed rules of a call, for callers that state how often and when it is asked again.

Without them, the scheduler decides by what it learns of its sources: it asks as often as it takes, and a failure that
no sample can have caused does not count. That suits questions. A function of the user is called as often as the user
said, and not once more.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

OPEN = "circuit_open"
"""The reason of a call that was refused because the circuit of its source is open."""
FAILED = "failed"
"""The reason of a call whose last attempt failed."""
LEAST_ENDS = 5
"""Fewest attempts that tell the share of errors."""
MOST_ENDS = 50
"""Attempts that the share of errors is taken of."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How one call is asked again. The first attempt, the retries and the hedges are all that it may have.

    `timeout_s` is for each attempt; infinity: none. An attempt that took that long is retried if `retry_timeouts`.
    Errors of the class `PermanentError` are not retried. A call whose source has an open circuit fails at once
    (`OPEN`). A call fails with its last error (`FAILED`) as soon as no attempt may follow.
    """

    retries: int = 0
    timeout_s: float = math.inf
    retry_timeouts: bool = True
    retry_cancelled: bool = True
    """Whether an attempt that was cancelled by something else than the scheduler is retried."""
    interval_s: float = 0.0
    """Seconds from a failure to the next attempt."""
    backoff: float = 1.0
    """Factor from one interval to the next."""
    longest_interval_s: float = math.inf
    jitter: float = 0.0
    """Share of each interval that is random: 0 none, 1 all of it."""
    hedges: int = 0
    """Most attempts beside the first one, for an attempt that takes long. A hedge that fails counts as a retry instead,
    as long as retries are left."""
    hedge_after_s: float | None = None
    """Age of an attempt, in seconds, from which it is hedged; None: learned from the latencies of the source."""
    hedge_budget: float = 1.0
    """Most hedges of a batch, as a share of its calls; a small batch may have `hedging.LEAST_HEDGES`."""

    def wait_s(self, failures: int, rng: random.Random) -> float:
        """Seconds from the n-th failure to the next attempt."""
        try:
            wait_s = min(self.interval_s * self.backoff ** (failures - 1), self.longest_interval_s)
        except OverflowError:
            wait_s = self.longest_interval_s
        return wait_s * (1.0 - self.jitter * rng.random()) if self.jitter else wait_s


class ErrorShare:
    """The share of errors among the last attempts of a source, as a sign of overload. `most`: the share that is one."""

    def __init__(self, most: float) -> None:
        self.most = most
        self._failed: deque[bool] = deque(maxlen=MOST_ENDS)

    def note(self, failed: bool) -> bool:
        """Note the end of an attempt; return whether the share is too large. The count then starts anew."""
        self._failed.append(failed)
        count = len(self._failed)
        if not failed or count < LEAST_ENDS or sum(self._failed) <= self.most * count:
            return False
        self._failed.clear()
        return True
