"""The interface of a policy, and the part that most of them share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from .stage import Item, Stage


class GaveUp(Exception):
    """The policy has ended its tries for a sample and has no score for it."""


class Peer(ABC):
    """One policy on one stage. The class docstring is its configuration, and why it is so; the bench prints it.

    `run` scores the samples and reports each by `scored`. A sample that the policy gave up is submitted again until it
    has a score, as a user would have to: a step needs all its rewards, and otherwise a policy that gives up early would
    look fast.
    """

    def __init__(self, stage: Stage, variant: str, scored: Callable[[Item], None]) -> None:
        self.stage = stage
        self.variant = variant
        self.scored = scored
        self.given_up: set[str] = set()

    async def run(self) -> None:
        """Score everything, as it arrives."""
        left = await self.batch(self.stage.items, self.stage.arrivals)
        while left:
            self.given_up.update(item.id for item in left)
            await asyncio.sleep(0.001)  # otherwise a policy that fails at once would stop the clock
            left = await self.batch(left, [0.0] * len(left))

    async def batch(self, items: Sequence[Item], arrivals: Sequence[float]) -> list[Item]:
        """Score these, each from its arrival (seconds from now) on; returns those that were given up."""

        async def one(item: Item, arrival_s: float) -> Item | None:
            if arrival_s > 0:
                await asyncio.sleep(arrival_s)
            try:
                await self.score(item)
            except GaveUp:
                return item
            self.scored(item)
            return None

        left = await asyncio.gather(*(one(item, at) for item, at in zip(items, arrivals, strict=True)))
        return [item for item in left if item is not None]

    @abstractmethod
    async def score(self, item: Item) -> float:
        """One sample's score. Raises `GaveUp`."""

    async def warm_up(self) -> None:
        """Run before the measured batch; only for policies that start late."""
        return

    async def close(self) -> None:
        """Close what was opened."""
        return


__all__ = ["GaveUp", "Peer"]
