"""Formats numbers in a few characters, because a terminal has 80 columns."""

from __future__ import annotations

import datetime
import math

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_MEASURED_WIDTH = 1_000


def seconds(value: float | None) -> str:
    """Format seconds with three digits: "0.42s", "12.3s", "123s"; "-" for None."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}s"


def clock(value: float | None) -> str:
    """Format seconds as "h:mm:ss"; "?" for None."""
    return "?" if value is None else str(datetime.timedelta(seconds=round(value)))


def short(count: float) -> str:
    """Format a count in at most six characters: "999", "12.3k", "4.5M"."""
    for limit, unit, divisor in ((9_999.5, "", 1), (999_950, "k", 1e3), (999_950_000, "M", 1e6)):
        if count < limit:
            return f"{count / divisor:.1f}{unit}" if unit else f"{count:.0f}"
    return f"{count / 1e9:.1f}G"


def number_of(count: int, noun: str) -> str:
    """ "1 source", "2 sources"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_whole(console: Console, table: Table, *, widest: int = 120) -> None:
    """Print a table as wide as it is, up to `widest` columns: in a narrow terminal it wraps, and no number is cut."""
    needed = Measurement.get(console, console.options.update(width=_MEASURED_WIDTH), table).maximum
    if needed > console.width:
        table.width = max(console.width, min(needed, widest))
    console.print(table, crop=False)
