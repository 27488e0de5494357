"""Draws charts in SVG. Colours and fonts come from the style sheet, so that they follow the theme.

Charts hold no foreign text but what they are given as titles, which is escaped. Each has its numbers in words beside it
or in a table, so it is hidden from screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

from markupsafe import Markup, escape

from ..secrets import one_line
from .samples import Bin, SampleWait
from .totals import StepSummary

WIDTH, HEIGHT = 720, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 22
_ACROSS, _UP = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_SECONDS_WIDTH = 640


def _share(cause: str) -> Callable[[StepSummary], float]:
    return lambda step: step.causes.get(cause, 0) / step.samples


_Line: TypeAlias = tuple[str, str, Callable[[StepSummary], float | None] | None]

FIGURES: Sequence[tuple[str, str, Sequence[_Line]]] = (
    (
        "reward",
        "Reward",
        (("accent", "mean", attrgetter("mean")), ("c1", "p50", attrgetter("p50")), ("area", "p10 to p90", None)),
    ),
    (
        "failed",
        "Without a reward, by cause, or with a floor",
        (
            *((f"c{number}", cause, _share(cause)) for number, cause in enumerate(("infra", "verdict", "policy"), 1)),
            ("c4", "floor", lambda step: step.floors / step.samples),
        ),
    ),
    ("flat", "Share of groups whose rewards are all equal", (("c1", "share", attrgetter("flat_rate")),)),
    (
        "latency",
        "Seconds from submission to outcome",
        (("c1", "p50", attrgetter("latency_p50_s")), ("c2", "p95", attrgetter("latency_p95_s"))),
    ),
    ("cost", "US dollars a step", (("c1", "US dollars", attrgetter("cost_usd")),)),
)
"""The charts of a trend: key, heading, and of each line its style, its name, and its number in a step; that of rewards
has an area, too."""


@dataclass(frozen=True)
class Series:
    """A line of a chart: a number for each step, None where there is none. `style` is a class of the style sheet."""

    name: str
    style: str
    values: Sequence[float | None]


def of_run(
    steps: Sequence[StepSummary], names: Sequence[str], links: Sequence[str], marks: Mapping[int, str]
) -> dict[str, Markup]:
    """The charts of a trend, by the keys of `FIGURES`. `marks`: texts for lines at steps, by their places."""
    made = {}
    for key, _, legend in FIGURES:
        if key == "cost" and not any(step.cost_usd for step in steps):
            continue
        lines = [Series(name, style, [of(step) for step in steps]) for style, name, of in legend if of is not None]
        of_rewards = key == "reward"
        band = [(step.p10, step.p90) for step in steps] if of_rewards else []
        made[key] = _trend(names, lines, links, band, marks, low=math.inf if of_rewards else 0.0)
    return made


def _trend(
    names: Sequence[str],
    lines: Sequence[Series],
    links: Sequence[str],
    band: Sequence[tuple[float | None, float | None]],
    marks: Mapping[int, str],
    *,
    low: float,
) -> Markup:
    """Draw lines over steps. A step is a link, whose title has its numbers. `band`: the edges of an area. The axis
    begins at `low`, or at a lower number.
    """
    edges = [edge for both in band for edge in both]
    numbers = [value for values in (*(line.values for line in lines), edges) for value in values if value is not None]
    scale = _Scale(min([*numbers, low]) if numbers else 0.0, max(numbers, default=1.0), len(names))
    parts = [*scale.grid(), *scale.step_names(names), *_area(scale, band)]
    for line in lines:
        parts += _path(scale, line)
    for place, text in marks.items():
        x = scale.slot(place)[0]
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + _UP}"/>')
        parts.append(f'<text class="mark" x="{x + 3:.1f}" y="{_TOP + 9}">{escape(text)}</text>')
    for place, (step, link) in enumerate(zip(names, links, strict=True)):
        told = ", ".join(f"{line.name} {shown(line.values[place])}" for line in lines)
        left, right = scale.slot(place)
        area = _rect("slot", left, _TOP, right - left, _UP)
        title = f"<title>step {escape(step)}: {escape(told)}</title>"
        parts.append(f'<a href="{escape(link)}" tabindex="-1">{title}{area}</a>')
    return _svg(WIDTH, HEIGHT, parts)


def histogram(bins: Sequence[Bin], links: Sequence[str], chosen: float | None) -> Markup:
    """Draw the bars of a histogram. Each is a link; `chosen` is the low edge of the one that is chosen."""
    most, width = max((each.count for each in bins), default=1), _ACROSS / max(1, len(bins))
    parts = []
    for place, (each, link) in enumerate(zip(bins, links, strict=True)):
        height = max(1.0, _UP * each.count / most) if each.count else 0.0
        x, style = _LEFT + place * width, "bar on" if each.low == chosen else "bar"
        label = f"{shown(each.low)} to {shown(each.high)}: {each.count:,}"
        bar = _rect(style, x + 1, _TOP + _UP - height, width - 2, height)
        slot = _rect("slot", x, _TOP, width, _UP)
        parts.append(f'<a href="{escape(link)}"><title>{label}</title>{bar}{slot}</a>')
    ends = [(0, bins[0].low), (len(bins), bins[-1].high)] if len(bins) > 1 else [(0, each.low) for each in bins]
    for place, text in ends:
        anchor = "start" if place == 0 else "end"
        x = _LEFT + place * width
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{shown(text)}</text>')
    parts.append(f'<text x="{_LEFT - 6}" y="{_TOP + 9}" text-anchor="end">{most:,}</text>')
    return _svg(WIDTH, HEIGHT, parts)


def attempts(history: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw attempts on a time line: lighter until the request was written. Times are seconds since the call."""
    end = max((attempt["ended_s"] for attempt in history), default=0.0) or 1.0
    row, parts = 22, []
    for number, attempt in enumerate(history):
        start, sent, last = (
            _SECONDS_WIDTH * (attempt[name] if attempt[name] is not None else attempt["started_s"]) / end
            for name in ("started_s", "sent_s", "ended_s")
        )
        y, style = 4 + number * row, escape(attempt["result"])
        parts.append(_rect("before", start, y, max(0.0, sent - start), 14))
        parts.append(_rect(f"attempt {style}", sent, y, max(2.0, last - sent), 14))
        parts.append(f'<text x="{_SECONDS_WIDTH + 8}" y="{y + 11}">{number + 1}</text>')
    y = 4 + len(history) * row + 8
    parts.append(f'<text x="0" y="{y}">0 s</text>')
    parts.append(f'<text x="{_SECONDS_WIDTH}" y="{y}" text-anchor="end">{end:.2f} s</text>')
    return _svg(_SECONDS_WIDTH + 24, y + 6, parts)


def waits(samples: Sequence[tuple[str, SampleWait]]) -> Markup:
    """Draw samples on one time line, each a link: from submission to outcome, with its attempts. Empty for none."""
    if not samples:
        return Markup()
    row, parts, end = 18, [], max(wait.ended_s for _, wait in samples) or 1.0

    def x(seconds: float) -> float:
        return _LEFT + _ACROSS * max(0.0, seconds) / end

    for number, (link, wait) in enumerate(samples):
        y = 4 + number * row
        drawn = [_rect("before", x(wait.began_s), y, max(2.0, x(wait.ended_s) - x(wait.began_s)), 12)]
        for attempt in wait.attempts:
            start, last = (wait.began_s + attempt[name] for name in ("started_s", "ended_s"))
            if attempt["sent_s"] is not None:
                start = wait.began_s + attempt["sent_s"]
                drawn.append(
                    _rect(f"attempt {escape(attempt['result'])}", x(start), y, max(2.0, x(last) - x(start)), 12)
                )
        took, slot = wait.ended_s - wait.began_s, _rect("slot", _LEFT, y - 2, _ACROSS, row - 2)
        title = f"<title>{escape(one_line(wait.name, 80))}: {took:.2f} s, {len(wait.attempts)} attempts</title>"
        parts.append(f'<a href="{escape(link)}">{title}{"".join(drawn)}{slot}</a>')
    y = 4 + len(samples) * row + 12
    parts.append(f'<text x="{_LEFT}" y="{y}">0 s</text>')
    parts.append(f'<text x="{_LEFT + _ACROSS}" y="{y}" text-anchor="end">{end:.2f} s</text>')
    return _svg(WIDTH, y + 6, parts)


def grid(counts: Mapping[tuple[int, int], int], cells: int, low: float, high: float) -> Markup:
    """Draw how many pairs are in each cell, with the line on which both are equal. `low` and `high`: the edges."""
    side, left, top = 24.0, 46.0, 6.0
    size, most = cells * side, max(counts.values())
    parts = [f'<rect class="before" x="{left}" y="{top}" width="{size}" height="{size}" fill-opacity="0.35"/>']
    for (x, y), count in sorted(counts.items()):
        share = 0.15 + 0.85 * math.log1p(count) / math.log1p(most)
        title = f"<title>{count:,} sample{'' if count == 1 else 's'}</title>"
        place = f'x="{left + x * side:.1f}" y="{top + size - (y + 1) * side:.1f}" width="{side}" height="{side}"'
        parts.append(f'<rect class="bar" {place} fill-opacity="{share:.2f}">{title}</rect>')
    parts.append(f'<path class="line c4" d="M{left} {top + size} L{left + size} {top}"/>')
    for value, at in ((low, 0.0), (high, size)):
        anchor = "start" if not at else "end"
        parts.append(f'<text x="{left + at}" y="{top + size + 14}" text-anchor="{anchor}">{shown(value)}</text>')
        parts.append(
            f'<text x="{left - 4}" y="{top + size - at + (0 if not at else 9)}" text-anchor="end">{shown(value)}</text>'
        )
    parts.append(f'<text x="{left + size / 2}" y="{top + size + 14}" text-anchor="middle">A</text>')
    parts.append(f'<text x="{left - 20}" y="{top + size / 2}" text-anchor="end">B</text>')
    return _svg(left + size + 6, top + size + 20, parts)


def _rect(style: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def shown(value: float | None) -> str:
    """A number in few characters; "-" for None, NaN and infinity."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"


class _Scale:
    """Places numbers and steps in a chart."""

    def __init__(self, low: float, high: float, steps: int) -> None:
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            # Means of equal numbers differ by their rounding.
            high = low + max(1.0, abs(low))
        self.unit: float = 10.0 ** math.floor(math.log10((high - low) / 2.5))
        self.unit *= next(unit for unit in (1, 2, 5, 10) if (high - low) / (self.unit * unit) <= 5)
        self.low, self.high = math.floor(low / self.unit) * self.unit, math.ceil(high / self.unit) * self.unit
        self.steps = steps

    def y(self, value: float) -> float:
        return _TOP + _UP * (1 - (value - self.low) / (self.high - self.low))

    def x(self, place: int) -> float:
        left, right = self.slot(place)
        return (left + right) / 2

    def slot(self, place: int) -> tuple[float, float]:
        return _LEFT + _ACROSS * place / self.steps, _LEFT + _ACROSS * (place + 1) / self.steps

    def grid(self) -> Iterable[str]:
        for number in range(round((self.high - self.low) / self.unit) + 1):
            value = self.low + number * self.unit
            y = self.y(value)
            yield f'<line class="gridline" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown(round(value, 12))}</text>'

    def step_names(self, steps: Sequence[Any]) -> Iterable[str]:
        every = max(1, -(-len(steps) // 10))
        for place in range(0, len(steps), every):
            yield f'<text x="{self.x(place):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(steps[place])}</text>'


def _path(scale: _Scale, line: Series) -> Iterable[str]:
    """A line with gaps where there is no number. A number without neighbours is a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for place, value in enumerate(line.values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((scale.x(place), scale.y(value)))
    for piece in pieces:
        if len(piece) == 1:
            yield f'<circle class="dot {line.style}" cx="{piece[0][0]:.1f}" cy="{piece[0][1]:.1f}" r="3"/>'
        elif piece:
            yield f'<path class="line {line.style}" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in piece)}"/>'


def _area(scale: _Scale, band: Sequence[tuple[float | None, float | None]]) -> Iterable[str]:
    there = [(place, low, high) for place, (low, high) in enumerate(band) if low is not None and high is not None]
    upper = [f"{scale.x(place):.1f} {scale.y(high):.1f}" for place, _, high in there]
    lower = [f"{scale.x(place):.1f} {scale.y(low):.1f}" for place, low, _ in reversed(there)]
    if there:
        yield f'<path class="band" d="M{" L".join([*upper, *lower])}Z"/>'


def _svg(width: float, height: float, parts: Iterable[str]) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" aria-hidden="true" focusable="false">{"".join(parts)}</svg>'
    )
