"""Amounts of a limit that lost workers may have spent. They count as spent until they have left the window."""

from __future__ import annotations

import heapq
import math


class LostWorkers:
    """Amounts of one limit that count as spent without a worker. Times are seconds of the keeper's monotonic clock."""

    def __init__(self) -> None:
        self._amounts: dict[str, tuple[float, float]] = {}
        self._endings: list[tuple[float, str]] = []
        self._total = 0.0
        self._unknown = 0.0
        self._unknown_until = -math.inf

    def __contains__(self, name: str) -> bool:
        return name in self._amounts

    def total(self, now: float) -> float:
        """Return the sum of the amounts that count as spent."""
        while self._endings and self._endings[0][0] <= now:
            until, name = heapq.heappop(self._endings)
            if self._amounts.get(name, (math.inf, 0.0))[0] <= until:
                self.release(name)
        if self._unknown_until <= now:
            self._unknown = 0.0
        return self._total + self._unknown

    def hold(self, name: str, until: float, amount: float) -> None:
        """Count `amount`, which the worker `name` may have spent, until `until`."""
        self.release(name)
        if amount > 0:
            self._amounts[name] = (until, amount)
            self._total += amount
            heapq.heappush(self._endings, (until, name))

    def release(self, name: str) -> None:
        """Stop counting the amount of a worker."""
        _, amount = self._amounts.pop(name, (0.0, 0.0))
        self._total = self._total - amount if self._amounts else 0.0

    def hold_all(self, limit: float, until: float) -> None:
        """Count the whole limit until `until`: an earlier keeper gave it to unknown workers."""
        self._unknown, self._unknown_until = limit, until

    def end_by(self, name: str, until: float) -> None:
        """Count the amount of a worker until `until` at most."""
        if name in self._amounts:
            before, amount = self._amounts[name]
            self.hold(name, min(before, until), amount)

    def end_all_by(self, until: float) -> None:
        """Count the amount of unknown workers until `until` at most."""
        self._unknown_until = min(self._unknown_until, until)

    def claimed(self, amount: float) -> None:
        """Reduce the amount of unknown workers by what a worker now reports to hold."""
        self._unknown = max(0.0, self._unknown - amount)

    def amounts(self, now: float) -> tuple[dict[str, tuple[float, float]], tuple[float, float]]:
        """Return (until, amount) for each name, and for the unknown workers together."""
        self.total(now)
        return dict(self._amounts), (self._unknown_until, self._unknown)

    def next_end(self, now: float) -> float:
        """Return when the total next decreases; infinity if never."""
        self.total(now)
        times = [self._unknown_until] if self._unknown else []
        times += [self._endings[0][0]] if self._endings else []
        return min(times, default=math.inf)
