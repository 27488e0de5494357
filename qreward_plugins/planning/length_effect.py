"""Estimates from a journal which part of a latency is proportional to the length of the rollout.

It matters if sources differ: long requests go to the fast sources, so the recorded times of a source are not those of
an average request. This share converts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from .recorded import FEWEST, Recorded

LENGTH_SHARE = 0.5
"""The assumption without a journal."""
_SIGMA = 0.3
"""Standard deviation of the assumption. Few verdicts, or verdicts of similar lengths, change the assumption little."""
_LEAST_NOISE = 1e-6

Rows = Sequence[tuple[float, float]]
"""Pairs of the length of a request, in units of the mean length, and its seconds."""


def journal_rows(recorded: Mapping[str, Recorded], own_tokens: int) -> dict[str, Rows]:
    """Return the rows of every source with enough of them, without the `own_tokens` that a judge adds to a request."""
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
    """Estimate the share by least squares for each source, weighted by certainty; None if no rows allow it."""
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
        # Relative to the time of an average request, not of the requests that this source got.
        weighted += certainty * slope / max(0.1, 1 + slope * (1 - mean_x))
    if not weight:
        return None
    assumed = 1 / _SIGMA**2
    return min(1.0, max(0.0, (weighted + assumed * LENGTH_SHARE) / (weight + assumed)))


def relative_work(rows: Rows, share: float) -> float:
    """Return the duration of the requests of these rows, as a multiple of an average request."""
    return max(0.01, 1 - share + share * fmean(x for x, _ in rows)) if rows else 1.0
