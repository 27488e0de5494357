"""Measures how long short and long requests wait for a source. An order that favours one of them biases rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KEPT = 4096
"""Most waits that are kept. Of more, an even sample is kept, so that memory does not grow with the run."""


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest-rank percentile (`share` from 0 to 1) of `values`; NaN without any."""
    ranked = sorted(values)
    if not ranked:
        return math.nan
    return ranked[min(len(ranked) - 1, max(0, math.ceil(share * len(ranked)) - 1))]


@dataclass(frozen=True)
class WaitBySize:
    """Seconds from submission to the first attempt, of the shortest and of the longest third of the requests.

    A request that was never attempted counts with the time until it ended.
    """

    short_mean_s: float
    short_p95_s: float
    long_mean_s: float
    long_p95_s: float

    def describe(self) -> str:
        """One line for logs."""
        return (
            f"the shortest third waited {self.short_mean_s:.1f} s for a source (p95 {self.short_p95_s:.1f}), "
            f"the longest {self.long_mean_s:.1f} s (p95 {self.long_p95_s:.1f})"
        )


class Waits:
    """Collects waits: all of them at first, then every 2nd, 4th, 8th ..., so that at most `KEPT` are kept."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, float]] = []
        self._every = 1
        self._seen = 0

    def add(self, size: int, wait_s: float) -> None:
        """Note that a request of `size` bytes waited `wait_s` seconds."""
        if self._seen % self._every == 0:
            self._kept.append((size, wait_s))
            if len(self._kept) == KEPT:
                self._kept = self._kept[::2]
                self._every *= 2
        self._seen += 1

    def by_size(self) -> WaitBySize | None:
        """The waits of the shortest and the longest third; None for fewer than 3 waits, or if all are of one size."""
        sizes = sorted(size for size, _ in self._kept)
        third = len(sizes) // 3
        if not third or sizes[third - 1] == sizes[-third]:
            return None
        # Requests of one size are in the same third; otherwise chance would decide between them.
        short = [wait_s for size, wait_s in self._kept if size <= sizes[third - 1]]
        long = [wait_s for size, wait_s in self._kept if size >= sizes[-third]]
        return WaitBySize(mean(short), percentile(short, 0.95), mean(long), percentile(long, 0.95))


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)
