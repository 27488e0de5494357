"""QReward's OpenAIChatProxyManager (0.1.7) and its `schedule` decorator, the real code."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

from qreward.client import LoadBalanceStrategy, OpenAIChatProxy, OpenAIChatProxyManager
from qreward.utils.scheduler import LimiterPool, RunningTaskPool, schedule

from .base import GaveUp
from .base import Peer as BasePeer
from .stage import TIMEOUT_S, Item, Stage
from .wire import SimulatedTransport

SCHEDULE: dict[str, Any] = {
    "retry_times": 9,
    "retry_interval": 1,
    "hedged_request_time": 20,
    "hedged_request_max_times": 2,
    "hedged_request_proportion": 0.1,
}


class Peer(BasePeer):
    """One OpenAIChatProxy a source with its own max_concurrent (64 where none is declared) and a rate limiter of rpm
    in 60 s (no limit where rpm is not declared; faster than rpm/60 a second in three of the four cases tried, 3 %
    slower in one); the manager chooses by weighted round robin over what the limits let through (LEAST_CONNECTIONS is
    round robin in 0.1.7). Around the call QReward's schedule decorator with retry_times=9 on top of the proxy's own 5
    tries 2-4 s apart, and up to 2 hedges after 20 s for 10 % of the calls (the lowest mean of four scenarios among
    none, 10, 20 and 30 s). A time-out of 60 s a try (20 and 30 s were slower in the mean of five scenarios). It has no
    token limits, reads no Retry-After, and marks no proxy unhealthy by itself.
    """

    def __init__(self, stage: Stage, variant: str, scored: Callable[[Item], None]) -> None:
        super().__init__(stage, variant, scored)
        # Its pools are global and keyed by the function's name: each run needs them anew.
        LimiterPool.global_limiter_pool.clear()
        _clear(RunningTaskPool)
        self._manager = OpenAIChatProxyManager(strategy=LoadBalanceStrategy.WEIGHTED_ROUND_ROBIN)
        transport = SimulatedTransport(stage)
        weights = stage.weights()
        for name, known in stage.known.items():
            proxy = OpenAIChatProxy(
                base_url=f"http://{name}/v1",
                api_key="simulated",
                max_concurrent=known.in_flight,
                rate_limiter_bucket_size=known.requests_per_minute or 1e9,
                rate_limiter_bucket_period=60.0,
                timeout=TIMEOUT_S,
            )
            proxy.client._client._transport = transport
            proxy.client._client._mounts = {}
            self._manager.add_proxy(name, proxy, weight=weights[name])

        @schedule(**SCHEDULE)
        async def ask(item: Item) -> float:
            proxy = self._manager.select_proxy()
            text = await proxy.chat_completion(list(item.messages), "judge", timeout=TIMEOUT_S)
            return float(json.loads(text)["score"])

        self._ask = ask

    async def score(self, item: Item) -> float:
        try:
            score = await self._ask(item)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise GaveUp from error
        if not math.isfinite(score):
            raise GaveUp
        return score

    async def close(self) -> None:
        await self._manager.close()


def _clear(pool: type) -> None:
    for value in vars(pool).values():
        if isinstance(value, dict):
            value.clear()
