"""Prepares the page that compares two judges, or two runs, on the samples that both have scored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ..errors import InputError
from ..journal.comparison import Figure, Judged, JudgedPair, figures, pairs_of
from . import charts

CELLS = 20
"""Cells of the grid along each side."""
MOST = 30_000
"""Most samples of each judge that the page compares, the latest."""
SHOWN = 50
"""Most changes that are shown, the largest first."""


def choice(judges: Sequence[tuple[str, str]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return what the form of the page shows. `query` has `a` and `b`, as `name_of` names a judge of a run, and `at`,
    the reward from which on a sample is good. By default, the first two of `judges` (pairs of run and judge); `b` is ""
    if there is one only.
    """
    names = [name_of(run, judge) for run, judge in judges]
    a = query.get("a", "") if query.get("a") in names else next(iter(names), "")
    others = [name for name in names if name != a]
    b = query.get("b", "") if query.get("b") in others else next(iter(others), "")
    try:
        at = float(query.get("at", "0.5"))
    except ValueError:
        at = 0.5
    return {"names": names, "a": a, "b": b, "at": at if math.isfinite(at) else 0.5}


def comparison(paths: Sequence[str], a: tuple[str, str], b: tuple[str, str], at: float) -> dict[str, Any]:
    """Return the figures of the page for two judges, each with its run. It takes seconds. Raises `JournalError`."""
    one, other = (Judged.read(paths, *each, most=MOST) for each in (a, b))
    try:
        pairs = pairs_of(one, other)
    except InputError as error:
        return {"problem": f"{error}."}
    changed = sorted((pair for pair in pairs if pair.a != pair.b), key=lambda pair: -abs(pair.b - pair.a))
    return {
        "problem": "",
        "count": len(pairs),
        "most": MOST if len(one.samples) >= MOST else 0,
        "others": sum(not pair.same for pair in pairs),
        "failed": (one.failed, other.failed),
        "figures": [_shown(figure) for figure in figures(pairs, at)],
        "down": sum(pair.a >= at > pair.b for pair in pairs),
        "up": sum(pair.b >= at > pair.a for pair in pairs),
        "grid": _grid(pairs),
        "changes": [(pair, *map(_link, pair.places)) for pair in changed[:SHOWN]],
        "changed": len(changed),
    }


def name_of(run: str, judge: str) -> str:
    """The name of a judge in a run, for a choice and a URL."""
    return f"{judge} in {run}"


def _shown(figure: Figure) -> tuple[str, str, str]:
    def number(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.3g}"

    interval = "" if figure.low is None or figure.high is None else f"{number(figure.low)} to {number(figure.high)}"
    return figure.name, number(figure.value), interval


def _grid(pairs: Sequence[JudgedPair]) -> Markup:
    low = min(min(pair.a, pair.b) for pair in pairs)
    high = max(max(pair.a, pair.b) for pair in pairs)
    width = (high - low) / CELLS or 1.0
    counts: dict[tuple[int, int], int] = {}
    for pair in pairs:
        x, y = (min(CELLS - 1, int((value - low) / width)) for value in (pair.a, pair.b))
        counts[x, y] = counts.get((x, y), 0) + 1
    return charts.grid(counts, CELLS, low, high if high > low else low + 1.0)


def _link(place: tuple[int, int]) -> str:
    return f"/sample/{place[0]}/{place[1]}"
