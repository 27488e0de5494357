"""verl's RateLimitedRewardManager (0.9.1, verl/experimental/reward_loop/reward_manager/limited.py), the real class.

The manager holds its limits in class attributes and knows one set of them; the sources, and what to do when one fails,
are the business of the user's async `compute_score`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager

from .base import GaveUp
from .base import Peer as BasePeer
from .stage import HTTPFailure, Item, NetworkFailure, Stage, weighted_cycle

TRIES = 10
LONGEST_WAIT_S = 30.0


class _Tokenizer:
    def decode(self, ids: Any, **_: Any) -> str:
        return ""


class Peer(BasePeer):
    """max_concurrent, max_rpm and max_tpm are the sums over the sources (64 at once for each that declares nothing, no
    rpm or tpm unless all declare one), estimated_tokens_per_request is the batch's true mean, timeout 600 s. The user's
    compute_score asks the next source of a round robin weighted by their limits, up to 10 times, and waits for
    Retry-After or else a full-jittered 1, 2, 4 ... 30 s in between; the manager counts none of these further tries.
    A failure comes out of the manager as the reward 0.0 with an "error" beside it, which counts as given up here.
    """

    def __init__(self, stage: Stage, variant: str, scored: Callable[[Item], None]) -> None:
        super().__init__(stage, variant, scored)
        self._sources = weighted_cycle(stage.weights())
        # The limits are made once for a class and stay: each run needs them anew.
        RateLimitedRewardManager._class_initialized = False
        reward: dict[str, Any] = {"max_concurrent": stage.in_flight, "timeout": 600.0}
        rpm, tpm = stage.total("requests_per_minute"), stage.total("tokens_per_minute")
        if rpm is not None:
            reward["max_rpm"] = rpm
        if tpm is not None:
            reward |= {"max_tpm": tpm, "estimated_tokens_per_request": stage.mean_tokens}
        self._manager = RateLimitedRewardManager(OmegaConf.create({"reward": reward}), _Tokenizer(), self._compute)

    async def score(self, item: Item) -> float:
        data = DataProto.from_dict(
            tensors={
                "responses": torch.ones(1, 2, dtype=torch.long),
                "attention_mask": torch.ones(1, 4, dtype=torch.long),
            },
            non_tensors={
                "data_source": np.array(["bench"], dtype=object),
                "reward_model": np.array([{"ground_truth": ""}], dtype=object),
                "extra_info": np.array([{"item": item}], dtype=object),
            },
        )
        result = await self._manager.run_single(data)
        if "error" in result["reward_extra_info"] or "timeout" in result["reward_extra_info"]:
            raise GaveUp
        return result["reward_score"]

    async def _compute(self, data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
        for attempt in range(TRIES):
            try:
                return (await self.stage.ask(next(self._sources), extra_info["item"])).score
            except (HTTPFailure, NetworkFailure, asyncio.TimeoutError, ValueError) as error:
                if attempt + 1 == TRIES:
                    raise
                wait_s = error.retry_after_s if isinstance(error, HTTPFailure) else None
            await asyncio.sleep(random.uniform(0, min(2.0**attempt, LONGEST_WAIT_S)) if wait_s is None else wait_s)
        raise AssertionError("unreachable")
