"""Draws charts in SVG. Colours and fonts come from the style sheet, so that they follow the theme.

Charts hold no foreign text but what they are given as titles, which is escaped. Each has its numbers in words beside it
or in a table, so it is hidden from screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from .samples import Bin

WIDTH, HEIGHT = 720, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 22
_ACROSS, _UP = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_SECONDS_WIDTH = 640


@dataclass(frozen=True)
class Series:
    """A line of a chart: a number for each step, None where there is none. `style` is a class of the style sheet."""

    name: str
    style: str
    values: Sequence[float | None]


def trend(
    steps: Sequence[Any],
    lines: Sequence[Series],
    *,
    links: Sequence[str],
    band: tuple[Sequence[float | None], Sequence[float | None]] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Markup:
    """Draw lines over steps. A step is a link, whose title has its numbers. `band`: the edges of an area.

    `low` and `high` widen the range of the axis; it holds all numbers anyway.
    """
    numbers = [value for line in lines for value in line.values if value is not None]
    numbers += [value for edge in band or () for value in edge if value is not None]
    scale = _Scale(min([*numbers, *_given(low)], default=0.0), max([*numbers, *_given(high)], default=1.0), len(steps))
    parts = [*scale.grid(), *scale.step_names(steps)]
    if band is not None:
        parts += [_area(scale, band)]
    for line in lines:
        parts += _path(scale, line)
    for place, (step, link) in enumerate(zip(steps, links, strict=True)):
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


def _rect(style: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def shown(value: float | None) -> str:
    """A number in few characters; "-" for None."""
    return "-" if value is None else f"{value:.4g}"


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


def _given(value: float | None) -> list[float]:
    return [] if value is None else [value]


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


def _area(scale: _Scale, edges: tuple[Sequence[float | None], Sequence[float | None]]) -> str:
    there = [(place, low, high) for place, (low, high) in enumerate(zip(*edges, strict=True)) if low is not None]
    upper = [f"{scale.x(place):.1f} {scale.y(high or 0.0):.1f}" for place, _, high in there]
    lower = [f"{scale.x(place):.1f} {scale.y(low):.1f}" for place, low, _ in reversed(there)]
    return f'<path class="band" d="M{" L".join([*upper, *lower])}Z"/>' if there else ""


def _svg(width: float, height: float, parts: Iterable[str]) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" aria-hidden="true" focusable="false">{"".join(parts)}</svg>'
    )
