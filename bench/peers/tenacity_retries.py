"""What most people write: a semaphore and tenacity."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import tenacity

from .base import Peer as BasePeer
from .stage import HTTPFailure, Item, NetworkFailure, Stage, weighted_cycle

_jittered = tenacity.wait_random_exponential(multiplier=1, max=30)


def _wait(state: tenacity.RetryCallState) -> float:
    """Retry-After where the server gave one, and up to a second more; else full jitter up to 1, 2, 4 ... 30 s."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, HTTPFailure) and error.retry_after_s is not None:
        return error.retry_after_s + random.random()
    return _jittered(state)


class Peer(BasePeer):
    """One asyncio.Semaphore of the sum of the sources' concurrency (64 for a source that declares none), given back
    while a sample waits for its next try; tenacity with wait_random_exponential(max=30), Retry-After (plus up to 1 s)
    honoured, and no end of tries; each try goes to the next source of a round robin weighted by concurrency, which is
    what keeps them all as full as one semaphore can.
    """

    def __init__(self, stage: Stage, variant: str, scored: Callable[[Item], None]) -> None:
        super().__init__(stage, variant, scored)
        self._semaphore = asyncio.Semaphore(stage.in_flight)
        self._sources = weighted_cycle({name: known.in_flight for name, known in stage.known.items()})

    @tenacity.retry(
        wait=_wait,
        retry=tenacity.retry_if_exception_type((HTTPFailure, NetworkFailure, asyncio.TimeoutError, ValueError)),
    )
    async def score(self, item: Item) -> float:
        async with self._semaphore:
            return (await self.stage.ask(next(self._sources), item)).score
