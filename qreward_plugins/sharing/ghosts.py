"""What was spent, or may have been, by those who cannot be asked any more: it stays spent until it left the window."""

from __future__ import annotations

import heapq
import math


class Ghosts:
    """Amounts of one limit that nobody who is heard holds. Times are seconds of the keeper's monotonic clock."""

    __slots__ = ("_amounts", "_endings", "_phantom", "_phantom_until", "_total")

    def __init__(self) -> None:
        self._amounts: dict[str, tuple[float, float]] = {}
        self._endings: list[tuple[float, str]] = []
        self._total = 0.0
        self._phantom = 0.0
        self._phantom_until = -math.inf

    def __contains__(self, name: str) -> bool:
        return name in self._amounts

    def total(self, now: float) -> float:
        """All that counts as spent."""
        while self._endings and self._endings[0][0] <= now:
            until, name = heapq.heappop(self._endings)
            if self._amounts.get(name, (math.inf, 0.0))[0] <= until:
                self.banish(name)
        if self._phantom_until <= now:
            self._phantom = 0.0
        return self._total + self._phantom

    def haunt(self, name: str, until: float, amount: float) -> None:
        """Count an amount until then."""
        self.banish(name)
        if amount > 0:
            self._amounts[name] = (until, amount)
            self._total += amount
            heapq.heappush(self._endings, (until, name))

    def banish(self, name: str) -> None:
        """Count it no longer."""
        _, amount = self._amounts.pop(name, (0.0, 0.0))
        self._total = self._total - amount if self._amounts else 0.0

    def haunt_all(self, limit: float, until: float) -> None:
        """Count a whole limit until then: an earlier keeper gave it away, and nobody knows to whom."""
        self._phantom, self._phantom_until = limit, until

    def turns_out(self, amount: float) -> None:
        """Count so much less of it: somebody says that he holds it."""
        self._phantom = max(0.0, self._phantom - amount)

    def next_end(self, now: float) -> float:
        """When less counts; infinity: never."""
        self.total(now)
        times = [self._phantom_until] if self._phantom else []
        times += [self._endings[0][0]] if self._endings else []
        return min(times, default=math.inf)
