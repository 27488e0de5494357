"""Draws the timeline as a picture: one row of bars for each source, one bar for each attempt, and the quota windows.

Matplotlib is an optional dependency, imported only here. All bars of a colour are one collection, because a step may
have ten thousand bars.
"""

from __future__ import annotations

import heapq
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import InputError
from ..system.output_files import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


_WIDTH_IN = 13.0
_PALETTE: dict[Colour, str] = {
    "first": "#3d7ea6",
    "retry": "#f2a541",
    "hedge": "#7b4ea3",
    "failed": "#d1495b",
    "cancelled": "#c3cad3",
}
_MEANINGS: dict[Colour, str] = {
    "first": "first try",
    "retry": "another try",
    "hedge": "hedge",
    "failed": "failed",
    "cancelled": "cancelled, another was quicker",
}
_INK, _FAINT, _BAND = "#22303c", "#8a97a3", "#f1f4f7"


def check_picture(path: Path) -> None:
    """Raise `InputError` if no picture can be drawn to `path`. Call it before the plan is made, which takes long."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError('--plot needs matplotlib, which is not installed; pip install "qreward-plugins[plot]"')
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise InputError(f"{path}: a picture ends with .{', .'.join(sorted({'png', 'svg', 'pdf'} & set(known)))}")
    check_writable(path)


def draw_timeline(timeline: Timeline, path: Path, *, title: str = "", subtitle: str = "") -> None:
    """Draw `timeline` to a file, in the format that its name ends with. Raises `InputError`."""
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bands = {name: timeline.of(name) for name in timeline.sources if timeline.of(name)}
    placed = {name: rows(bars) for name, bars in bands.items()}
    deep = {name: max(found) + 1 for name, found in placed.items()}
    deepest = max(deep.values(), default=1)
    heights = [1.1, *(0.7 + 1.5 * math.sqrt(deep[name] / deepest) for name in bands)]
    figure = Figure(figsize=(_WIDTH_IN, 1.7 + sum(heights)), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    _draw_rewards(axes[0], timeline)
    for axis, (name, bars) in zip(axes[1:], bands.items(), strict=True):
        _draw_band(axis, timeline, name, bars, placed[name], deep[name])
    for axis in axes:
        _draw_end(axis, timeline, label=axis is axes[0])
    axes[-1].set_xlim(0, timeline.makespan_s * 1.06 or 1.0)
    axes[-1].set_xlabel("seconds since the step began", color=_INK)
    axes[-1].tick_params(axis="x", length=3, colors=_INK)
    _caption(figure, timeline, title or f"{timeline.samples:,} samples", subtitle)
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() in (".svg",) else None)
    except OSError as error:
        raise InputError(f"{path}: the picture cannot be written ({error.strerror or type(error).__name__})") from None


def _draw_rewards(axis: Axes, timeline: Timeline) -> None:
    """Draw the share of samples that have their reward."""
    ends = sorted(bar.end_s for bar in timeline.bars if bar.end == "answered")
    share = [100 * min(1.0, (number + 1) / timeline.samples) for number in range(len(ends))]
    axis.fill_between([0.0, *ends], [0.0, *share], step="post", color="#2a9d8f", alpha=0.25, linewidth=0)
    axis.step([0.0, *ends], [0.0, *share], where="post", color="#2a9d8f", linewidth=1.6)
    axis.set_ylim(0, 104)
    axis.set_yticks([0, 50, 100], ["0", "50", "100 %"])
    _dress(axis, "rewards in")


def _draw_band(axis: Axes, timeline: Timeline, name: str, bars: list[Bar], placed: list[int], deep: int) -> None:
    from matplotlib.collections import PolyCollection

    window_s = timeline.windows_s.get(name)
    if window_s is not None and timeline.makespan_s / window_s < 200:
        for number in range(int(timeline.makespan_s // window_s) + 1):
            if number % 2:
                axis.axvspan(number * window_s, (number + 1) * window_s, color=_BAND, zorder=0, linewidth=0)
            if number:
                axis.axvline(number * window_s, color=_FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    gap = 0.12 if deep <= 80 else 0.0
    for colour in COLOURS:
        boxes = [
            [(bar.start_s, row + gap), (bar.end_s, row + gap), (bar.end_s, row + 1 - gap), (bar.start_s, row + 1 - gap)]
            for bar, row in zip(bars, placed, strict=True)
            if bar.colour == colour
        ]
        if boxes:
            edges: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.35} if deep <= 80 else {"linewidths": 0}
            zorder = 2.0 if colour == "first" else 2.5
            axis.add_collection(PolyCollection(boxes, facecolors=_PALETTE[colour], zorder=zorder, **edges))
    axis.set_ylim(0, deep + 0.02 * deep)
    axis.set_yticks([deep], [f"{deep:,}"])
    vain = sum(bar.end != "answered" for bar in bars)
    _dress(axis, name, f"{len(bars):,} requests" + (f"\n{vain:,} in vain" if vain else ""))


def _draw_end(axis: Axes, timeline: Timeline, *, label: bool) -> None:
    axis.axvline(timeline.makespan_s, color=_INK, linewidth=1.6, zorder=3)
    if label:
        axis.annotate(
            f" {timeline.makespan_s:.1f} s",
            (timeline.makespan_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=11,
            fontweight="bold",
            color=_INK,
        )


def _dress(axis: Axes, name: str, detail: str = "") -> None:
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_FAINT)
    axis.tick_params(axis="y", length=0, labelsize=8, colors=_FAINT)
    axis.tick_params(axis="x", length=0, colors=_INK)
    where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right"}
    shown = name if len(name) <= 18 else name[:17] + "…"
    axis.annotate(shown, (0, 0.5), xytext=(-44, 2), fontsize=11, fontweight="bold", color=_INK, **where)
    if detail:
        axis.annotate(detail, (0, 0.5), xytext=(-44, -4), va="top", fontsize=8, color=_FAINT, **where)


def _caption(figure: Figure, timeline: Timeline, title: str, subtitle: str) -> None:
    from matplotlib.patches import Patch

    height_in = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.15, right=0.98, top=1 - 0.95 / height_in, bottom=0.85 / height_in, hspace=0.14)
    figure.text(0.15, 1 - 0.36 / height_in, title, fontsize=15, fontweight="bold", color=_INK)
    figure.text(0.15, 1 - 0.62 / height_in, subtitle, fontsize=10, color=_FAINT)
    there = {bar.colour for bar in timeline.bars}
    keys = [Patch(color=_PALETTE[colour], label=_MEANINGS[colour]) for colour in COLOURS if colour in there]
    figure.legend(
        handles=keys, loc="lower left", bbox_to_anchor=(0.14, 0.0), ncols=len(keys), frameon=False, fontsize=9
    )
