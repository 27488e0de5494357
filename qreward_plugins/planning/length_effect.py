"""Which part of a latency is in proportion to the length of a rollout, as a journal shows it.

It matters where sources differ: long requests go to the fast ones. Then the times on record are of the requests that a
source got, and what an average request takes there follows only by way of this share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from .recorded import FEWEST, Recorded

LENGTH_SHARE = 0.5
"""What is assumed where no journal tells."""
_SIGMA = 0.3
"""How far from that it may well be. Few verdicts, or of one length, move the assumption accordingly little."""
_LEAST_NOISE = 1e-6

Rows = Sequence[tuple[float, float]]
"""The length of what was judged, in units of the mean length, and the seconds that it took."""


def journal_rows(recorded: Mapping[str, Recorded], own_tokens: int) -> dict[str, Rows]:
    """The rows of every source that has enough of them, without the `own_tokens` that a judge adds to each request."""
    lengths = {name: [max(1, tokens - own_tokens) for tokens, _ in one.timed] for name, one in recorded.items()}
    lengths = {name: one for name, one in lengths.items() if len(one) >= FEWEST}
    if not lengths:
        return {}
    usual = fmean(length for one in lengths.values() for length in one)
    return {
        name: [(length / usual, seconds) for length, (_, seconds) in zip(one, recorded[name].timed, strict=True)]
        for name, one in lengths.items()
    }


def length_share(rows: Mapping[str, Rows]) -> float | None:
    """The share by least squares over each source, weighted by how certain each is; None if no rows tell it."""
    weight = weighted = 0.0
    for one in rows.values():
        mean_x, mean_s = fmean(x for x, _ in one), fmean(seconds for _, seconds in one)
        scatter = math.fsum((x - mean_x) ** 2 for x, _ in one)
        if scatter < _LEAST_NOISE:
            continue
        slope = math.fsum((x - mean_x) * (seconds / mean_s - 1) for x, seconds in one) / scatter
        noise = math.fsum((seconds / mean_s - 1 - slope * (x - mean_x)) ** 2 for x, seconds in one) / len(one)
        certainty = scatter / max(noise, _LEAST_NOISE)
        weight += certainty
        # Of the time of an average request, and not of those that went here.
        weighted += certainty * slope / max(0.1, 1 + slope * (1 - mean_x))
    if not weight:
        return None
    assumed = 1 / _SIGMA**2
    return min(1.0, max(0.0, (weighted + assumed * LENGTH_SHARE) / (weight + assumed)))


def relative_work(rows: Rows, share: float) -> float:
    """How long the requests of these rows take, as a multiple of an average request."""
    return max(0.01, 1 - share + share * fmean(x for x, _ in rows)) if rows else 1.0


__all__ = ["LENGTH_SHARE", "journal_rows", "length_share", "relative_work"]
