"""slime's remote reward model client, THUDM/slime at 624b824a (0.3.1), slime/rollout/rm_hub/__init__.py `remote_rm`.

slime installs with a whole training stack and its module imports that, so the policy is rebuilt here after the source:
one shared aiohttp session of 64 connections whose total time-out of 120 s includes the wait for a connection, 10 tries
whatever the failure, min(2^k, 30) s plus up to 1 s between them, Retry-After unread. The last failure is raised.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from .base import GaveUp
from .base import Peer as BasePeer
from .stage import HTTPFailure, Item, NetworkFailure, Stage, weighted_cycle

CONNECTIONS = 64
TOTAL_TIMEOUT_S = 120.0
TRIES = 10
LONGEST_WAIT_S = 30


class Peer(BasePeer):
    """As it is in slime: 64 connections, 120 s, 10 tries. It knows one URL; behind that stands a load balancer that
    sends each try to the next source, weighted by what their limits let through. slime has no limits to set.
    """

    def __init__(self, stage: Stage, variant: str, scored: Callable[[Item], None]) -> None:
        super().__init__(stage, variant, scored)
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._sources = weighted_cycle(stage.weights())

    async def score(self, item: Item) -> float:
        for attempt in range(TRIES):
            try:
                return await asyncio.wait_for(self._post(item), TOTAL_TIMEOUT_S)
            except (HTTPFailure, NetworkFailure, asyncio.TimeoutError, ValueError) as error:
                if attempt + 1 >= TRIES:
                    raise GaveUp from error
                await asyncio.sleep(min(2**attempt, LONGEST_WAIT_S) + random.random())
        raise AssertionError("unreachable")

    async def _post(self, item: Item) -> float:
        async with self._connections:
            return (await self.stage.ask(next(self._sources), item, timeout_s=TOTAL_TIMEOUT_S)).score
