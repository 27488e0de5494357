"""Draws the timeline as a picture: one row of bars for each source, one bar for each attempt.

Matplotlib is an optional dependency, imported only here. All bars of a colour are one collection, because a step may
have ten thousand bars.
"""

from __future__ import annotations

import heapq
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import InputError
from ..system.output_files import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BarEnd = Literal["answered", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Bar:
    """One request: its source, its end, its start and end times in seconds, and its tokens."""

    source: str
    end: BarEnd
    start_s: float
    end_s: float
    tokens: int = 0


@dataclass(frozen=True)
class Timeline:
    """One step of `makespan_s` seconds."""

    sources: tuple[str, ...]
    bars: tuple[Bar, ...]
    makespan_s: float
    samples: int

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


def most_in_window(times_s: Sequence[float], window_s: float, weights: Sequence[float]) -> float:
    """Return the largest sum of the weights of `times_s` (ascending) in any half-open window."""
    most = held = 0.0
    first = 0
    for number, time_s in enumerate(times_s):
        held += weights[number]
        while times_s[first] <= time_s - window_s:
            held -= weights[first]
            first += 1
        most = max(most, held)
    return most


_COLOURS: Mapping[BarEnd, tuple[str, str]] = {
    "answered": ("#3d7ea6", "answered"),
    "failed": ("#d1495b", "failed"),
    "cancelled": ("#c3cad3", "cancelled, another was quicker"),
}
"""The colour of a bar by its end, and what it means."""


_FORMATS = (".pdf", ".png", ".svg")


def check_picture(path: Path) -> None:
    """Raise `InputError` if no picture can be drawn to `path`. Call it before the plan is made, which takes long."""
    if path.suffix.lower() not in _FORMATS:
        raise InputError(f"{path}: a picture ends with {', '.join(_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError('--plot needs matplotlib, which is not installed; pip install "qreward-plugins[plot]"')
    check_writable(path)


def draw_timeline(timeline: Timeline, path: Path, *, title: str = "", subtitle: str = "") -> None:
    """Draw `timeline` to a file, in the format that its name ends with. Raises `InputError`."""
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bands = {name: bars for name in timeline.sources if (bars := timeline.of(name))}
    figure = Figure(figsize=(13.0, 3.0 + 2.0 * len(bands)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    first, *others = figure.subplots(len(bands) + 1, 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(title or f"{timeline.samples:,} samples", fontsize=15, fontweight="bold")
    first.set_title(subtitle, fontsize=10)
    _draw_rewards(first, timeline)
    for axis, (name, bars) in zip(others, bands.items(), strict=True):
        _draw_band(axis, name, bars)
    for axis in (first, *others):
        axis.axvline(timeline.makespan_s, color="black", linewidth=1.5)
        axis.spines[["top", "right", "left"]].set_visible(False)
    last = (first, *others)[-1]
    last.set_xlim(0, timeline.makespan_s * 1.06 or 1.0)
    last.set_xlabel(f"seconds since the step began; the last reward comes after {timeline.makespan_s:.1f} s")
    keys = [Patch(color=colour, label=meaning) for colour, meaning in _COLOURS.values()]
    figure.legend(handles=keys, loc="outside lower left", ncols=len(keys), frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() in (".svg",) else None)
    except OSError as error:
        raise InputError(f"{path}: the picture cannot be written ({error.strerror or type(error).__name__})") from None


def _draw_rewards(axis: Axes, timeline: Timeline) -> None:
    """Draw the share of samples that have their reward."""
    ends = sorted(bar.end_s for bar in timeline.bars if bar.end == "answered")
    share = [100 * min(1.0, (number + 1) / timeline.samples) for number in range(len(ends))]
    axis.fill_between([0.0, *ends], [0.0, *share], step="post", color="#2a9d8f", alpha=0.4)
    axis.set_yticks([0, 50, 100], ["0", "50", "100 %"])
    axis.set_ylabel("rewards in")


def _draw_band(axis: Axes, name: str, bars: list[Bar]) -> None:
    from matplotlib.collections import PolyCollection

    placed = rows(bars)
    for end, (colour, _) in _COLOURS.items():
        boxes = [
            [(bar.start_s, row), (bar.end_s, row), (bar.end_s, row + 0.8), (bar.start_s, row + 0.8)]
            for bar, row in zip(bars, placed, strict=True)
            if bar.end == end
        ]
        axis.add_collection(PolyCollection(boxes, facecolors=colour, zorder=2.0))
    deep = max(placed) + 1
    axis.set_ylim(0, deep)
    axis.set_yticks([deep], [f"{deep:,}"])
    vain = sum(bar.end != "answered" for bar in bars)
    shown = (name if len(name) <= 18 else name[:17] + "…").replace("$", r"\$")
    axis.set_ylabel(f"{shown}\n{len(bars):,} requests" + (f"\n{vain:,} in vain" if vain else ""))
