"""ROLL's own trajectory env manager with our mixin, on a tiny environment: a conversation of a few turns.

One thread plays an environment, as ROLL's environment workers have it, and hands its rollouts to a queue actor. Where
the configuration spreads the environments over several workers, each has a process.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import gem
import ray
import torch
from gem.envs.registration import ENV_REGISTRY
from roll.distributed.scheduler.protocol import DataProto
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.agentic.env_manager.traj_env_manager import TrajEnvManager
from roll.pipeline.agentic.llm_proxy import BaseLLMProxy, register_llm_proxy

import roll_adapter

from ..judges import ITEMS, Draft, decode, encode, item_of, prompt_of
from .scenarios import ENV_REWARD

ENV = "conformance_items"
PROXY = "conformance_drafts"


class ItemEnv(gem.Env):
    """Asks about an item, and again in every further turn."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._item = 0
        self._taken = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._item, self._taken = (seed or 0) % ITEMS, 0
        return prompt_of(self._item), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._taken += 1
        over = self._taken >= self._turns
        return prompt_of(self._item), ENV_REWARD, over, False, {"metrics": {"asked": 1.0}}


@register_llm_proxy(PROXY)
class DraftProxy(BaseLLMProxy):
    """Answers every turn with the draft that the environment's number says."""

    def generate(
        self, messages: list[dict[str, str]], lm_input: DataProto, generation_config: dict[str, Any]
    ) -> DataProto:
        draft = Draft(item_of(messages[-1]["content"]), lm_input.meta_info["src_rank"])
        return DataProto.from_dict(tensors={"responses": torch.tensor([encode(draft.response)])})


class _Episodes:
    """Ends after so many episodes."""

    episodes = 1
    played = 0

    def reset(self) -> Any:
        self.played += 1
        if self.played > self.episodes:
            self.stop()
        return super().reset()


class JudgedEnvManager(roll_adapter.QRewardTrajectoryMixin, _Episodes, TrajEnvManager):
    """What a user of the mixin writes."""


@ray.remote(num_cpus=0)
class Queue:
    """ROLL's group queue as an env manager sees it, for so many episodes of each environment."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._given: Counter[int] = Counter()
        self._rollouts: list[Any] = []

    def get_episode_id(self, group_id: int, env_id: int) -> int | None:
        number, self._given[env_id] = self._given[env_id], self._given[env_id] + 1
        return number if number < self._episodes else None

    def put(self, group_id: int, episode_id: int, start_step: int, rollout: Any, env_id: int) -> None:
        if rollout is not None:
            self._rollouts.append((episode_id, env_id, rollout))

    def rollouts(self) -> list[Any]:
        return self._rollouts


_runs = itertools.count()


def play(config: Any, episodes: int) -> list[dict[str, Any]]:
    """Play episodes in every environment of one group, each in a thread. Describes the rollouts by episode and
    environment. Raises what a thread raised.
    """
    workers = list(config.train_env_manager.env_configs.values())
    queue = Queue.remote(episodes)
    seed = ITEMS * next(_runs)  # the same items in each run, and other names for their groups
    if len(workers) == 1:
        _play_worker(config, workers[0], queue, episodes, seed)
    else:
        in_process = ray.remote(num_cpus=0)(_play_worker)
        ray.get([in_process.remote(config, environments, queue, episodes, seed) for environments in workers])
    rollouts = sorted(ray.get(queue.rollouts.remote()), key=lambda each: each[:2])
    ray.kill(queue)
    return [_describe(*each) for each in rollouts]


def _play_worker(config: Any, environments: Mapping[int, Any], queue: Any, episodes: int, seed: int) -> None:
    if ENV not in ENV_REGISTRY:
        gem.register(ENV, entry_point=f"{__name__}:ItemEnv")
    worker = config.train_env_manager
    tokenizer = default_tokenizer_provider(worker.model_args)
    managers = [
        JudgedEnvManager(
            worker_config=worker,
            pipeline_config=config,
            env_config=env_config,
            tokenizer=tokenizer,
            generate_scheduler=None,
            output_queue=queue,
            thread_lock=threading.Lock(),
        )
        for env_config in environments.values()
    ]
    raised: list[BaseException] = []

    def loop(manager: JudgedEnvManager) -> None:
        manager.episodes = episodes
        manager.update_step(0, {})
        try:
            manager.run_rollout_loop(DataProto(meta_info={"seed": seed}))
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=loop, args=(manager,)) for manager in managers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def _describe(episode: int, env: int, rollout: DataProto) -> dict[str, Any]:
    tensors, columns = rollout.batch, rollout.non_tensor_batch
    return {
        "episode": episode,
        "env": env,
        "text": decode([token for token in tensors["input_ids"][0].tolist() if token > 2]),
        "score_sum": tensors["scores"].sum().item(),
        "mask": int(tensors["response_mask"].sum()),
        "episode_score": float(columns["episode_scores"][0]),
        "metrics": dict(rollout.meta_info["metrics"]),
    }
