"""How long short and long requests waited for a source: an order that is unfair to either would bias the rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KEPT = 4096
"""Waits that are kept at most: of more, an even share is, because memory must not grow with the length of a run."""


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest-rank percentile (`share` from 0 to 1) of `values`; NaN where there are none."""
    ranked = sorted(values)
    if not ranked:
        return math.nan
    return ranked[min(len(ranked) - 1, max(0, math.ceil(share * len(ranked)) - 1))]


@dataclass(frozen=True)
class WaitBySize:
    """Seconds from submission to the first attempt, of the shortest and of the longest third of the requests.

    Requests that no source took before they ended waited until then.
    """

    short_mean_s: float
    short_p95_s: float
    long_mean_s: float
    long_p95_s: float

    def describe(self) -> str:
        """Say in a few words who waited how long."""
        return (
            f"the shortest third waited {self.short_mean_s:.1f} s for a source (p95 {self.short_p95_s:.1f}), "
            f"the longest {self.long_mean_s:.1f} s (p95 {self.long_p95_s:.1f})"
        )


class Waits:
    """Collects waits, every one of them at first, and every 2nd, 4th, 8th ... as they become too many to be kept."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, float]] = []
        self._every = 1
        self._seen = 0

    def add(self, size: int, wait_s: float) -> None:
        """Note how long a request of `size` bytes waited."""
        if self._seen % self._every == 0:
            self._kept.append((size, wait_s))
            if len(self._kept) == KEPT:
                self._kept = self._kept[::2]
                self._every *= 2
        self._seen += 1

    def by_size(self) -> WaitBySize | None:
        """The waits of the shortest and of the longest; None: there are too few, or none is longer than another."""
        sizes = sorted(size for size, _ in self._kept)
        third = len(sizes) // 3
        if not third or sizes[third - 1] == sizes[-third]:
            return None
        # All of the same size are in the same part, or which of them are would depend on how they waited.
        short = [wait_s for size, wait_s in self._kept if size <= sizes[third - 1]]
        long = [wait_s for size, wait_s in self._kept if size >= sizes[-third]]
        return WaitBySize(_mean(short), percentile(short, 0.95), _mean(long), percentile(long, 0.95))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
