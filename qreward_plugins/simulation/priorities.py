"""Draws priorities for the trials of some seeds: by split, judge, route and call, and latency-sensitive routes.

Its generator is apart from that of the trial, so the servers, judges and samples of a seed stay as they were.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

SHARE_OF_TRIALS = 0.3
_PRIORITIES: tuple[str | int, ...] = ("high", "normal", "low", 3, -40)


class Priorities:
    """Draws the priorities of one trial."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def configured(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with priorities of splits, judges and routes."""
        rng, made = self._rng, deepcopy(dict(config))
        made["engine"]["priority"] = {split: rng.choice(_PRIORITIES) for split in ("train", "validation")}
        for judge in made["judges"].values():
            if rng.random() < 0.3:
                judge["priority"] = rng.choice(_PRIORITIES)
        for pattern, judge in made["routes"].items():
            route = {"judge": judge, "latency_sensitive": rng.random() < 0.4}
            if rng.random() < 0.4:
                route["priority"] = rng.choice(_PRIORITIES)
            made["routes"][pattern] = route
        return made

    def split(self) -> Literal["train", "val"]:
        """The split of a sample."""
        return "val" if self._rng.random() < 0.3 else "train"

    def of_call(self, priority: int) -> int | None:
        """The priority of a call that had `priority`. None: as the configuration says."""
        return self._rng.choice((None, None, priority, 7))


def random_priorities(seed: int) -> Priorities | None:
    """What draws the priorities of this seed's trial; None for most trials."""
    rng = random.Random(f"priorities {seed}")
    return Priorities(rng) if rng.random() < SHARE_OF_TRIALS else None
