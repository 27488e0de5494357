"""The common parts of verl's trainers: data, reward workers, agent loops, advantages from scores, and the tracker."""

from __future__ import annotations

import random
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .agent_loop import AgentLoopManager, AgentLoops, AgentLoopWorker
from .checkpoints import MODULE as CHECKPOINTS
from .data import Row, VerlDataLoader, VerlDataset
from .engine import VerlEngine
from .metrics import data_metrics
from .protocol import VerlDataProto
from .results import VerlStep, VerlValidation
from .reward_loop import RewardLoopManager

Values = Callable[[VerlDataProto], Any]
"""Returns the critic's values of a batch: (rows, response length)."""


@dataclass
class Setup:
    """The arguments of a trainer, besides its configuration. `run` runs a coroutine on the event loop of the actors.

    `logged` collects what the tracker gets: (step, metrics).
    """

    engine: VerlEngine
    rows: Sequence[Row]
    val_rows: Sequence[Row]
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    seed: int
    reward: Any = None
    values: Values | None = None
    logged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


class TrainerBase(ABC):
    """The parts of a training run that deal with rewards, made in verl's order."""

    def __init__(self, config: Any, setup: Setup) -> None:
        self.config = config
        self.setup = setup
        self.tokenizer = setup.engine.tokenizer
        self.global_steps = 0
        critic = config.critic.enable
        self.use_critic = bool(critic) if critic is not None else self._estimator == "gae"
        self.use_rm = bool(config.reward.reward_model.enable)
        _refuse_policy_terms(config.algorithm)
        self._rng = random.Random(setup.seed)
        self._make_loaders()
        self._batches = iter(self.train_dataloader)
        self._seen: dict[str, Any] = {}

    @abstractmethod
    def step(self) -> VerlStep:
        """One step of the training loop."""

    @abstractmethod
    def _validate(self) -> dict[str, Any]:
        """Validate, set `_seen` to what the validation scored, and return the metrics."""

    def validate(self) -> VerlValidation:
        """One validation, logged."""
        metrics = self._validate()
        assert metrics, f"val_metrics={metrics!r}"
        return VerlValidation(self.global_steps, self._log(metrics), **self._seen)

    def start(self) -> None:
        """Start the reward workers, then the tracker, and the inference engines with the weights of the checkpoint."""
        self._setup()
        # Looked up by its name in verl, because hooks may have wrapped it there.
        self.checkpoint_manager = sys.modules[CHECKPOINTS].CheckpointEngineManager(self.config)
        self.checkpoint_manager.sleep_replicas()
        self._start_tracker()
        self.checkpoint_manager.update_weights(self.global_steps)

    async def aclose(self) -> None:  # noqa: B027 (in most trainers nothing does)
        """Stop generation ahead of the steps. Call it on the event loop of the actors."""

    def _start_tracker(self) -> None:
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
        self.reward_loop_manager: Any = manager(config=self.config)
        loops: type[AgentLoopManager] = sys.modules["verl.experimental.agent_loop.agent_loop"].AgentLoopManager
        started = loops(self.reward_loop_manager.reward_loop_worker_handles, self._rng)
        self.setup.run(started._init_agent_loop_workers())
        self.agent_loops = self._make_agent_loops(started.worker)

    def _make_agent_loops(self, worker: AgentLoopWorker) -> AgentLoops:
        return AgentLoops(self.config, self.setup.engine, worker)

    def _make_loaders(self) -> None:
        data = self.config.data
        train, val = VerlDataset(self.setup.rows), VerlDataset(self.setup.val_rows)
        size = data.get("gen_batch_size", None) or data.train_batch_size
        self.train_dataloader = VerlDataLoader(train, size, shuffle=bool(data.shuffle), drop_last=True, rng=self._rng)
        assert len(self.train_dataloader) >= 1, (
            f"Train dataloader is empty! rows has {len(train)}, and a batch is {size} (data.train_batch_size)"
        )
        self.val_dataloader = VerlDataLoader(
            val,
            data.val_batch_size or max(len(val), 1),
            shuffle=bool(data.validation_shuffle),
            drop_last=False,
            rng=self._rng,
        )

    def _next_columns(self) -> dict[str, Any]:
        columns = next(self._batches, None)
        if columns is None:
            self._batches = iter(self.train_dataloader)
            columns = next(self._batches)
        return columns

    def _advance(self, data: VerlDataProto, compute: Callable[..., VerlDataProto], **more: Any) -> VerlDataProto:
        """Token rewards and advantages of a batch that has `token_level_scores`. `compute` is verl's function for
        advantages, which gets `more`, too.
        """
        algorithm, batch = self.config.algorithm, data.batch
        if self.use_critic:
            batch["values"] = _like_mask(data, self.setup.values(data) if self.setup.values is not None else 0.0)
        batch["token_level_rewards"] = batch["token_level_scores"]
        data = compute(
            data,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=int(self.config.actor_rollout_ref.rollout.n),
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
            **more,
        )
        return data

    def _data_metrics(self, data: VerlDataProto, prompt_lengths: Any, response_lengths: Any) -> dict[str, Any]:
        batch = data.batch
        return data_metrics(
            scores=np.asarray(batch["token_level_scores"]).sum(axis=-1),
            rewards=np.asarray(batch["token_level_rewards"]).sum(axis=-1),
            advantages=batch["advantages"],
            returns=batch["returns"],
            mask=batch["response_mask"],
            lengths=(prompt_lengths, response_lengths),
            num_turns=data.non_tensor_batch["__num_turns__"],
        )

    @property
    def _estimator(self) -> str:
        return str(self.config.algorithm.adv_estimator)

    def _text(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _new_uid(self) -> str:
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))

    def _log(self, metrics: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
        """Log metrics, and return what the tracker got. `step`: None for that of the training loop."""
        before = len(self.setup.logged)
        self.logger.log(data=dict(metrics), step=self.global_steps if step is None else step)
        return self._told_since(before)

    def _told_since(self, before: int) -> dict[str, Any]:
        """The metrics that the tracker got after its first `before` lines."""
        logged: dict[str, Any] = {}
        for _, data in self.setup.logged[before:]:
            logged |= data
        return logged


class Tracking:
    """`verl.utils.tracking.Tracking`, with one backend: a list."""

    logged: list[tuple[int, dict[str, Any]]]

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
    ) -> None:
        self.project_name, self.experiment_name = project_name, experiment_name

    def log(self, data: Mapping[str, Any], step: int, backend: Any = None) -> None:
        self.logged.append((step, dict(data)))

    def finish(self, exit_code: int = 0) -> None:
        """Nothing to flush."""


def _like_mask(data: VerlDataProto, values: Any) -> Any:
    return np.broadcast_to(np.asarray(values, dtype=np.float32), data.batch["response_mask"].shape).copy()


def _refuse_policy_terms(algorithm: Any) -> None:
    """Raises `NotImplementedError` for what changes rewards by a policy, which is not played."""
    correction = algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode", False):  # then it corrects the actor's loss, not what is computed here
        correction = {}
    asked = {
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.rollout_correction.rollout_is": correction.get("rollout_is"),
        "algorithm.rollout_correction.rollout_rs": correction.get("rollout_rs"),
    }
    for key, value in asked.items():
        if value:
            raise NotImplementedError(f"{key}={value} is not played by FakeVerlTrainer: it needs the policy's numbers")
