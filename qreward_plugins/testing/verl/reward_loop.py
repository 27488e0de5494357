"""verl's reward workers (experimental/reward_loop/reward_loop.py): where a reward manager lives."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from .actors import ActorHandle, FakeRay
from .protocol import TensorColumns, VerlDataProto
from .reward_functions import bind, default_compute_score, get_custom_reward_fn, load_extern_object
from .reward_managers import Registry

MODULE = "verl.experimental.reward_loop.reward_loop"
REWARD = "verl.trainer.ppo.reward"


@dataclass
class Played:
    """What one fake trainer plays with: its actors, its tokenizer, and the reward function that it was handed."""

    ray: FakeRay
    tokenizer: Any
    reward: Any = None


def resolve_manager(registry: Registry, config: Any) -> type[Any]:
    """The class of the configured reward manager. Raises what verl raises."""
    chosen = config.reward.reward_manager
    if chosen.source == "register":
        return registry.get(chosen.name)
    if chosen.source == "importlib":
        assert getattr(chosen.module, "path", None) is not None, "Module path is required when source='importlib'"
        return load_extern_object(chosen.module.path, chosen.name)  # type: ignore[no-any-return]
    raise ValueError(f"Unknown reward manager source: {chosen.source}")


def load_manager(registry: Registry, config: Any, tokenizer: Any, reward: Any = None, **named: Any) -> Any:
    """The reward manager itself. `reward`: a function in place of the configured one."""
    function = get_custom_reward_fn(config) if reward is None else bind(reward, {})
    cls = resolve_manager(registry, config)
    return cls(config=config, tokenizer=tokenizer, compute_score=function or default_compute_score, **named)


class RewardLoopWorker:
    """One reward worker: an actor that has a reward manager."""

    played: Played

    def __init__(self, config: Any, reward_router_address: str | None) -> None:
        self.config = config
        tokenizer = self.played.tokenizer
        self.reward_manager = sys.modules[REWARD].load_reward_manager(
            config,
            tokenizer,
            reward=self.played.reward,
            reward_router_address=reward_router_address,
            reward_model_tokenizer=tokenizer if config.reward.reward_model.enable else None,
        )

    async def compute_score_batch(self, data: VerlDataProto) -> list[Any]:
        """The scores of a part of a batch."""
        return await asyncio.gather(*(self.compute_score(data[row : row + 1]) for row in range(len(data))))

    async def compute_score(self, data: VerlDataProto) -> Any:
        """The score of one trajectory. verl's own reward model is not played."""
        if self.config.reward.reward_model.enable and self.config.reward.custom_reward_function.path is None:
            raise NotImplementedError(
                "verl asks its own reward model here, and no reward manager; FakeVerlTrainer has no reward model"
            )
        return await self.reward_manager.run_single(data)

    async def aclose(self) -> None:
        """verl never closes a reward manager; one that can be is closed with the fake trainer."""
        close = getattr(self.reward_manager, "aclose", None)
        if close is not None:
            await close()


class RewardLoopManager:
    """Starts the reward workers, in the trainer's process."""

    played: Played

    def __init__(self, config: Any, rm_resource_pool: Any = None) -> None:
        self.config = config
        self.reward_router_address = "fake-router:0" if config.reward.reward_model.enable else None
        # Looked up by their names in verl, because hooks may have replaced them there.
        self.reward_loop_workers_class = self.played.ray.remote(sys.modules[MODULE].RewardLoopWorker)
        self.reward_manager_cls = sys.modules[REWARD].resolve_reward_manager_cls(config)
        self._init_reward_loop_workers()

    @property
    def reward_loop_worker_handles(self) -> list[ActorHandle] | None:
        """None where a colocated reward model takes turns with the rollout: batches are scored after it then."""
        model = self.config.reward.reward_model
        return self.reward_loop_workers if not model.enable or model.enable_resource_pool else None

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers: list[ActorHandle] = [
            self.reward_loop_workers_class.remote(self.config, self.reward_router_address)
            for _ in range(self.config.reward.num_workers)
        ]

    def compute_rm_score(self, data: VerlDataProto) -> VerlDataProto:
        """The scores of a whole batch, which is dealt to the workers in equal parts."""
        workers = self.reward_loop_workers
        # Looked up by its name in verl, because hooks may have wrapped it there.
        parts = sys.modules[MODULE].pad_dataproto_to_divisor(data, len(workers))[0].chunk(len(workers))
        calls = [worker.compute_score_batch.remote(part) for worker, part in zip(workers, parts, strict=True)]
        outputs = [output for part in self.played.ray.get(calls) for output in part][: len(data)]
        rewards = self.reward_manager_cls.assemble_rm_scores(data, [output["reward_score"] for output in outputs])
        infos = [output.get("reward_extra_info", {}) for output in outputs]
        keys = list(infos[0])
        columns = {key: np.array([info[key] for info in infos]) for key in keys}
        return VerlDataProto(TensorColumns({"rm_scores": rewards}, len(data)), columns, {"reward_extra_keys": keys})
