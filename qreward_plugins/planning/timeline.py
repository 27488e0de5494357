"""The timeline of a step: every attempt as a bar in its source's lane, free of any drawing."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

BarKind = Literal["first", "retry", "hedge"]
BarEnd = Literal["answered", "failed", "throttled", "cancelled"]
Colour = Literal["first", "retry", "hedge", "failed", "cancelled"]
COLOURS: tuple[Colour, ...] = get_args(Colour)


@dataclass(frozen=True, slots=True)
class Bar:
    """One attempt: at which source, what it was to its sample, how it ended, and from when to when in seconds."""

    source: str
    kind: BarKind
    end: BarEnd
    start_s: float
    end_s: float
    tokens: int = 0

    @property
    def colour(self) -> Colour:
        """What a bar is shown as: its end where that was in vain, else its kind."""
        if self.end == "answered":
            return self.kind
        return "cancelled" if self.end == "cancelled" else "failed"


@dataclass(frozen=True)
class Timeline:
    """One step of `makespan_s` seconds. `windows_s` are the lengths of the windows of the sources that have limits, the
    others what they admit in one.
    """

    sources: tuple[str, ...]
    bars: tuple[Bar, ...]
    makespan_s: float
    samples: int
    seed: int
    windows_s: Mapping[str, float]
    requests_per_window: Mapping[str, float]
    tokens_per_window: Mapping[str, float]

    def of(self, source: str) -> list[Bar]:
        """The bars of one source, by their start."""
        return sorted((bar for bar in self.bars if bar.source == source), key=lambda bar: (bar.start_s, bar.end_s))


def rows(bars: Sequence[Bar]) -> list[int]:
    """The row of each bar, lowest first, such that none overlap; `bars` are sorted by their start."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    found = []
    for bar in bars:
        while busy and busy[0][0] <= bar.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (bar.end_s, row))
        found.append(row)
    return found


def most_in_window(times_s: Sequence[float], window_s: float, weights: Sequence[float] | None = None) -> float:
    """The most that any half-open window of this length holds of `times_s` (ascending), each of its weight (or 1)."""
    most = held = 0.0
    first = 0
    for number, time_s in enumerate(times_s):
        held += 1.0 if weights is None else weights[number]
        while times_s[first] <= time_s - window_s:
            held -= 1.0 if weights is None else weights[first]
            first += 1
        most = max(most, held)
    return most
