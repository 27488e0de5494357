"""Computes from the declared limits how many samples an engine can score in time."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from ..samples import Sample
from .wiring import Wiring

_log = logging.getLogger("qreward_plugins.engine")


def calls_per_s(wiring: Wiring) -> float:
    """Return the calls per second that the declared limits allow in this process; infinity without limits."""
    return sum(upstream.calls_per_s for upstream in wiring.upstreams.values())


def warn_if_too_many(wiring: Wiring, batch: Sequence[Sample], deadline_s: float) -> None:
    """Log a warning if the limits do not allow all calls of `batch` within `deadline_s` seconds."""
    rate = calls_per_s(wiring)
    requests = wiring.router.calls_of(batch) if math.isfinite(rate) else 0
    if requests > rate * deadline_s + sum(
        upstream.most_calls * upstream.quota.burst for upstream in wiring.upstreams.values()
    ):
        _log.warning(
            "%d samples take about %.0f s at the %.0f requests/min that the sources allow; the deadline is %.0f s: "
            "samples will fail. Raise engine.deadline_s, or add sources.",
            len(batch),
            requests / rate,
            60 * rate,
            deadline_s,
        )


def stream_window(wiring: Wiring) -> int:
    """Return enough samples to keep every source busy, but at most what the limits allow in half a deadline."""
    if wiring.server is not None:
        return wiring.server.facts.window
    busy = 4 * sum(upstream.most_calls * upstream.quota.concurrency for upstream in wiring.upstreams.values())
    allowed = calls_per_s(wiring) * wiring.config.engine.deadline_s / 2
    return max(1, int(min(busy, allowed / wiring.router.most_calls)))
