"""Formats numbers in a few characters, because a terminal has 80 columns."""

from __future__ import annotations

import datetime
import math


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
