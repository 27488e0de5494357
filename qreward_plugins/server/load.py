"""The load of a server: how many samples are under way, and whether more can be done in time.

A caller that is refused at once can go elsewhere, or wait without a connection. One whose samples
would fail by their deadline has waited for nothing. So a request is refused if the samples that are under way, at the
rate of the last outcomes, take longer than its deadline.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_S = 30.0
"""Outcomes of this many seconds tell the rate."""
LEAST_OUTCOMES = 32
"""Fewest outcomes that tell a rate. With fewer, every request is admitted."""
_BUCKET_S = 1.0


class Load:
    """Samples under way, and the rate of outcomes. Times are seconds of the event loop's clock.

    `most`: most samples under way, because each needs memory.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.under_way = 0
        """Samples that were admitted and have no outcome yet."""
        self._ended: deque[list[float]] = deque()

    def retry_after_s(self, samples: int, deadline_s: float, now: float) -> float | None:
        """Return None if `samples` more may come, otherwise the seconds after which they may.

        A request that comes alone is always admitted, however large it is.
        """
        if not self.under_way:
            return None
        rate = self._per_s(now)
        waiting = self.under_way + samples
        late_s = waiting / rate - deadline_s if rate else 0.0
        crowded_s = (waiting - self._most) / rate if rate else WINDOW_S
        if late_s <= 0 and waiting <= self._most:
            return None
        return max(1.0, late_s, crowded_s if waiting > self._most else 0.0)

    def room(self, samples: int, deadline_s: float, now: float) -> int:
        """Return how many of `samples` more may come, at least 0: the rest could not be done in time."""
        if self.retry_after_s(samples, deadline_s, now) is None:
            return samples
        rate = self._per_s(now)
        room = self._most - self.under_way
        if rate and rate * deadline_s < self._most:
            room = min(room, math.floor(rate * deadline_s) - self.under_way)
        return min(samples, max(0, room))

    def began(self, samples: int) -> None:
        """Note that samples were admitted."""
        self.under_way += samples

    def ended(self, samples: int, now: float) -> None:
        """Note that samples have their outcomes."""
        self.under_way -= samples
        if self._ended and now - self._ended[-1][0] < _BUCKET_S:
            self._ended[-1][1] += samples
        else:
            self._ended.append([now, samples])

    def left(self, samples: int) -> None:
        """Note that samples ended without outcomes, because their caller has gone."""
        self.under_way -= samples

    def _per_s(self, now: float) -> float:
        """Return outcomes a second, or 0 if too few are known."""
        while self._ended and self._ended[0][0] < now - WINDOW_S:
            self._ended.popleft()
        count = math.fsum(number for _, number in self._ended)
        if count < LEAST_OUTCOMES:
            return 0.0
        return count / max(_BUCKET_S, now - self._ended[0][0])
