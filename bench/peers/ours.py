"""This project's engine, through its front door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.simulation import scenario

from .base import GaveUp
from .base import Peer as BasePeer
from .stage import Item, Stage

WARM_UP_SAMPLES = 256
WARM_SEEDS = 1_000_000
"""The warm-up's samples are those of other seeds."""


class Peer(BasePeer):
    """RewardEngine with the scenario's limits as its configuration and everything else as it is by default, through
    `score_all` (streamed samples through `score`, as they come). Cold: a fresh engine, that knows the limits and
    nothing of speeds. Warm: the same engine has scored another batch of 256 before, and rested until its windows were
    empty again; faults are in the measured batch only.
    """

    def __init__(self, stage: Stage, variant: str, scored: Callable[[Item], None]) -> None:
        super().__init__(stage, variant, scored)
        config = stage.scenario.config(deadline_s=3000.0)
        self._engine = RewardEngine(config, sources=stage.servers)

    async def warm_up(self) -> None:
        of = self.stage.scenario
        await self._engine.score_all(scenario(of.name, samples=WARM_UP_SAMPLES, seed=of.seed + WARM_SEEDS).samples())

    async def batch(self, items: Sequence[Item], arrivals: Sequence[float]) -> list[Item]:
        if any(at > 0 for at in arrivals):
            return await super().batch(items, arrivals)
        outcomes = await self._engine.score_all([item.sample for item in items])
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Scored):
                self.scored(item)
        return [item for item, outcome in zip(items, outcomes, strict=True) if not isinstance(outcome, Scored)]

    async def score(self, item: Item) -> float:
        outcome = await self._engine.score(item.sample)
        if not isinstance(outcome, Scored):
            raise GaveUp
        return outcome.reward

    async def close(self) -> None:
        await self._engine.aclose()
        await asyncio.sleep(0)
