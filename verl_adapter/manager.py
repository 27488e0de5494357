"""`QRewardManager`: the core behind verl's contract of one async call per trajectory (verl >= 0.7).

verl starts `reward.num_workers` processes, each with one manager, and calls `run_single` on the process's event loop
while the rollout still runs. The engine is made in the constructor, so that mistakes of the configuration end the run
before the first rollout, and it binds to the loop with the first call.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from omegaconf import DictConfig
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from qreward_plugins import Failed, Outcome, RewardEngine, RewardMissing, Sample
from qreward_plugins.groups import number_of

from .functions import ComputeScore, open_reward_function
from .rewards import ExtraInfo
from .rollouts import response_ids, to_sample
from .settings import check_failure_policy, load_settings, processes_of, reward_function_sources

_log = logging.getLogger("verl_adapter")


class QRewardManager(RewardManagerBase):  # type: ignore[misc]
    """verl's reward manager `qreward`.

    The arguments are verl's (trainer/ppo/reward.py). Raises `ConfigurationError` with every mistake of the
    configuration.
    """

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        compute_score: ComputeScore | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        # verl 0.7.0 takes two arguments here and later versions three; all that they set is set below.
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        settings = load_settings(config)
        check_failure_policy(settings, config)
        router = (
            {"reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer}
            if reward_router_address is not None
            else {}
        )
        sources = {
            name: open_reward_function(
                name, node, trainer=config, compute_score=compute_score, kwargs=router, processes=processes_of(config)
            )
            for name, node in reward_function_sources(settings)
        }
        self.engine = RewardEngine(settings, processes=processes_of(config), sources=sources)
        self._on_failure = settings.on_failure
        self._extra_info = ExtraInfo(self.engine)
        self._decoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qreward-decode")

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one trajectory: `{"reward_score": float, "reward_extra_info": {...}}`.

        Of several outputs of one trajectory the last is judged, as in verl. A sample without a reward raises
        `RewardMissing` (`on_failure: exclude` or `raise`) or gets the constant that the configuration names.
        """
        item = data[-1:][0]
        sample = await asyncio.get_running_loop().run_in_executor(self._decoder, self._sample, item)
        outcome = await self.engine.score(sample)
        return {"reward_score": self._reward(outcome), "reward_extra_info": self._extra_info.of(outcome)}

    async def aclose(self) -> None:
        """Close the engine and its threads. verl never does; tests and other callers should."""
        await self.engine.aclose()
        self._decoder.shutdown()

    def _sample(self, item: Any) -> Sample:
        return to_sample(item, self._decode(response_ids(item)), self._decode)

    def _decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _reward(self, outcome: Outcome) -> float:
        reward = number_of(outcome, self._on_failure)
        if reward is None:
            assert isinstance(outcome, Failed)
            raise RewardMissing(outcome)
        return reward
