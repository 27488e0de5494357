"""What verl's trainers have in common here: data, reward workers, agent loops, the tracker."""

from __future__ import annotations

import random
import sys
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .advantages import ESTIMATORS, TOKEN_BASELINES, Rewards, estimate
from .agent_loop import AgentLoops
from .data import Row, VerlDataLoader, VerlDataset
from .engine import VerlEngine
from .protocol import VerlDataProto
from .reward_loop import RewardLoopManager


@dataclass
class Setup:
    """What a trainer is made of, beside its configuration. `run` runs a coroutine on the event loop of the actors;
    `values`: what the critic says of a batch, (rows, response length).
    """

    engine: VerlEngine
    rows: Sequence[Row]
    val_rows: Sequence[Row]
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    seed: int
    values: Callable[[VerlDataProto], Any] | None = None
    told: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


class TrainerBase:
    """The parts of a run that rewards meet, made in verl's order."""

    def __init__(self, config: Any, setup: Setup) -> None:
        self.config = config
        self.setup = setup
        self.tokenizer = setup.engine.tokenizer
        self.global_steps = 0
        estimator = str(config.algorithm.adv_estimator)
        critic = config.critic.enable
        self.use_critic = bool(critic) if critic is not None else estimator == "gae"
        self.use_rm = bool(config.reward.reward_model.enable)
        self._rng = random.Random(setup.seed)
        self._make_loaders()

    def start(self) -> None:
        """Start the reward workers, then the tracker."""
        self._setup()
        tracking = sys.modules["verl.utils.tracking"].Tracking
        self.logger = tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=self.config,
        )

    def _setup(self) -> None:
        """Reward workers, from a method of the trainer."""
        manager: type[RewardLoopManager] = sys.modules["verl.experimental.reward_loop.reward_loop"].RewardLoopManager
        self.reward_loop_manager = manager(config=self.config)
        workers = self.reward_loop_manager.reward_loop_worker_handles
        self.agent_loops = AgentLoops(self.config, self.setup.engine, workers, self._rng)

    def _make_loaders(self) -> None:
        data = self.config.data
        train, val = VerlDataset(self.setup.rows), VerlDataset(self.setup.val_rows)
        size = data.get("gen_batch_size", None) or data.train_batch_size
        self.train_dataloader = VerlDataLoader(train, size, shuffle=bool(data.shuffle), drop_last=True, rng=self._rng)
        assert len(self.train_dataloader) >= 1, "Train dataloader is empty!"
        self.val_dataloader = VerlDataLoader(
            val,
            data.val_batch_size or max(len(val), 1),
            shuffle=bool(data.validation_shuffle),
            drop_last=False,
            rng=self._rng,
        )

    def _new_uid(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

    def _log(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Hand the metrics to the tracker, and return what came of them."""
        before = len(self.setup.told)
        self.logger.log(data=dict(metrics), step=self.global_steps)
        told: dict[str, Any] = {}
        for _, data in self.setup.told[before:]:
            told |= data
        return told


class Tracking:
    """`verl.utils.tracking.Tracking`, with one backend: a list."""

    told: list[tuple[int, dict[str, Any]]]

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
    ) -> None:
        self.project_name, self.experiment_name = project_name, experiment_name

    def log(self, data: Mapping[str, Any], step: int, backend: Any = None) -> None:
        self.told.append((step, dict(data)))

    def finish(self, exit_code: int = 0) -> None:
        """Nothing to flush."""


def compute_advantage(
    data: VerlDataProto,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> VerlDataProto:
    """`verl.trainer.ppo.ray_trainer.compute_advantage`."""
    batch = data.batch
    if str(adv_estimator) in TOKEN_BASELINES:
        raise AssertionError(
            "Step-dependent optimal baseline requires sum_pi_squared from actor. Please set "
            "actor.calculate_sum_pi_squared=True in config."
        )
    if str(adv_estimator) not in ESTIMATORS:
        raise ValueError(f"Unknown advantage estimator simply: {adv_estimator}")
    last = None
    if str(adv_estimator) == "gdpo" and "attention_mask" not in batch and config.get("gdpo_reward_keys", None):
        raise KeyError(f'key "prompts" not found in TensorDict with keys {sorted(batch)}')
    if "attention_mask" in batch:
        last = np.asarray(batch["attention_mask"])[:, batch["prompts"].shape[1] :].sum(axis=1) - 1
    advantages, returns = estimate(
        str(adv_estimator),
        Rewards(
            rewards=np.asarray(batch["token_level_rewards"]),
            mask=np.asarray(batch["response_mask"]),
            uids=list(data.non_tensor_batch.get("uid", ())),
            values=np.asarray(batch["values"]) if "values" in batch else None,
            baselines=np.asarray(batch["reward_baselines"]) if "reward_baselines" in batch else None,
            components=data.non_tensor_batch,
            last=last,
            config=config,
        ),
    )
    batch["advantages"], batch["returns"] = advantages.copy(), returns.copy()
    return data


def critic_values(setup: Setup, data: VerlDataProto) -> Any:
    """The critic's values: what the test says, or zero."""
    shape = data.batch["response_mask"].shape
    given = setup.values(data) if setup.values is not None else np.zeros(shape)
    return np.broadcast_to(np.asarray(given, dtype=np.float32), shape).copy()
