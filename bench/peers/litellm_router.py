"""litellm's Router, the real code."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
from collections.abc import Callable
from typing import Any

import httpx

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import uses the network

import litellm
import litellm.litellm_core_utils.litellm_logging
import litellm.utils
from litellm import Router

from . import clock
from .base import GaveUp
from .base import Peer as BasePeer
from .stage import TIMEOUT_S, Item, Stage
from .wire import SimulatedTransport

litellm.suppress_debug_info = True
litellm.telemetry = False
logging.getLogger("LiteLLM Router").setLevel(logging.CRITICAL)
logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)

TRIES = 20
LONGEST_WAIT_S = 8.0
OPTIONS: dict[str, Any] = {
    "routing_strategy": "latency-based-routing",
    "num_retries": 3,
    "retry_after": 1,
    "cooldown_time": 1,
}


class Peer(BasePeer):
    """One deployment a source with its rpm and tpm, latency-based-routing, num_retries=3, retry_after=1,
    cooldown_time=1, a time-out of 60 s. Tried were simple-shuffle weighted by the limits, least-busy, usage-based-v2
    and latency-based routing (with and without a buffer), with cooldowns of 1 or 5 s and without;
    this one had the lowest mean at 512 samples, least-busy with the same cooldown came next. The Router raises where
    all deployments are cooling down or over their limits, and its own max_parallel_requests raises, too, rather than
    wait; so the user's part is a semaphore of the sum of the sources' concurrency (64 for a source that declares none),
    and up to 20 tries around the Router's own with a full-jittered wait of 1, 2, 4, 8 s.
    """

    def __init__(self, stage: Stage, variant: str, scored: Callable[[Item], None]) -> None:
        super().__init__(stage, variant, scored)
        _virtual()
        litellm.in_memory_llm_clients_cache.flush_cache()
        litellm.aclient_session = httpx.AsyncClient(transport=SimulatedTransport(stage))
        litellm.callbacks = []
        litellm.success_callback = []
        litellm.failure_callback = []
        litellm._async_success_callback = []
        litellm._async_failure_callback = []
        litellm.input_callback = []
        deployments = []
        weights = stage.weights()
        for name, known in stage.known.items():
            parameters = {
                "model": "openai/judge",
                "api_base": f"http://{name}/v1",
                "api_key": "simulated",
                "weight": weights[name],
            }
            if known.requests_per_minute:
                parameters["rpm"] = int(known.requests_per_minute)
            if known.tokens_per_minute:
                parameters["tpm"] = int(known.tokens_per_minute)
            deployments.append(
                {"model_name": "judge", "litellm_params": parameters, "model_info": {"id": name}},
            )
        self._router = Router(model_list=deployments, timeout=TIMEOUT_S, **OPTIONS)
        self._semaphore = asyncio.Semaphore(stage.in_flight)

    async def score(self, item: Item) -> float:
        for attempt in range(TRIES):
            async with self._semaphore:
                try:
                    reply = await self._router.acompletion(model="judge", messages=list(item.messages))
                    score = float(json.loads(reply.choices[0].message.content)["score"])
                    if math.isfinite(score):
                        return score
                except asyncio.CancelledError:
                    raise
                except Exception as error:
                    if attempt + 1 == TRIES:
                        raise GaveUp from error
            await asyncio.sleep(random.uniform(0, min(2.0**attempt, LONGEST_WAIT_S)))
        raise GaveUp

    async def close(self) -> None:
        self._router.discard()
        await litellm.aclient_session.aclose()


def _virtual() -> None:
    """Virtual dates and no threads in litellm; again before each run, since it imports some of its modules late."""
    clock.virtual_dates("litellm.utils", "litellm.router", "litellm.litellm_core_utils")
    inline = clock.InlineExecutor()
    for module in (litellm.utils, litellm.litellm_core_utils.litellm_logging):
        module.executor = inline
