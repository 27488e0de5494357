"""The latency of a judge server: lognormal with stragglers, as LLM endpoints have it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Latency:
    """Time between a request and its answer, besides the scorer's own. Raises `ValueError` for invalid values."""

    median_s: float = 0.0
    """Median in seconds. 0 answers at once."""
    sigma: float = 0.0
    """Standard deviation of the logarithm: 0 is constant, 0.6 is usual for LLM judges."""
    stragglers: float = 0.0
    """Share of the requests, 0 to 1, that take `straggler_factor` times as long."""
    straggler_factor: float = 10.0

    each_s: float = 0.0
    """Seconds that are added for each text of a request to a reward model."""

    def __post_init__(self) -> None:
        for name in ("median_s", "sigma", "straggler_factor", "each_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Latency.{name} must be a finite number of at least 0, not {value!r}")
        if not 0 <= self.stragglers <= 1:
            raise ValueError(f"Latency.stragglers is a share between 0 and 1, not {self.stragglers!r}")

    def draw(self, rng: random.Random) -> float:
        """Draw one latency in seconds. It always draws as many numbers from `rng`, whatever the settings."""
        spread = rng.gauss(0.0, 1.0)
        straggles = rng.random() < self.stragglers
        return self.median_s * math.exp(self.sigma * spread) * (self.straggler_factor if straggles else 1.0)
