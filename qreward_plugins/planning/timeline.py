"""Defines the timeline of a step: every attempt is a bar of its source. Drawing is in `picture`."""

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
    """One request: its source, its kind, its end, its start and end times in seconds, its tokens, and the number of
    calls that it carries. The kind is that of the attempt of its first call.
    """

    source: str
    kind: BarKind
    end: BarEnd
    start_s: float
    end_s: float
    tokens: int = 0
    calls: int = 1

    @property
    def colour(self) -> Colour:
        """The colour: by kind for an answered attempt, otherwise by its end."""
        if self.end == "answered":
            return self.kind
        return "cancelled" if self.end == "cancelled" else "failed"


@dataclass(frozen=True)
class Timeline:
    """One step of `makespan_s` seconds. `windows_s` has the window length of each source with limits."""

    sources: tuple[str, ...]
    bars: tuple[Bar, ...]
    makespan_s: float
    samples: int
    seed: int
    windows_s: Mapping[str, float]

    def of(self, source: str) -> list[Bar]:
        """Return the bars of one source, sorted by start."""
        return sorted((bar for bar in self.bars if bar.source == source), key=lambda bar: (bar.start_s, bar.end_s))


def rows(bars: Sequence[Bar]) -> list[int]:
    """Assign each bar to the lowest free row, so that bars in a row do not overlap. `bars` are sorted by start."""
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
    """Return the largest sum of weights (default: 1 each) of `times_s` (ascending) in any half-open window."""
    most = held = 0.0
    first = 0
    for number, time_s in enumerate(times_s):
        held += 1.0 if weights is None else weights[number]
        while times_s[first] <= time_s - window_s:
            held -= 1.0 if weights is None else weights[first]
            first += 1
        most = max(most, held)
    return most
