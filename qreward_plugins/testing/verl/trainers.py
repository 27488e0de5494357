"""The parts of verl's trainers that deal with rewards: data, reward workers, agent loops, advantages and the tracker.

The legacy trainer (trainer/ppo/ray_trainer.py) generates and scores a whole batch, and one error ends the run. V1 is in
a module of its own.
"""

from __future__ import annotations

import random
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from ..data_proto import VerlDataProto
from .actors import FakeRay
from .agent_loop import AgentLoopManager
from .estimates import data_metrics, named
from .generation import Row, VerlDataLoader, VerlEngine
from .reward_loop import MODULE as REWARD_LOOP


@dataclass(frozen=True)
class VerlStep:
    """One step, up to what would train. All lists are in the order of the rows of `batch`.

    `batch` holds verl's tensors: `responses`, `response_mask`, `token_level_scores`, `token_level_rewards`,
    `advantages` and `returns` of shape (rows, response length). `metrics` is what the tracker gets.
    `extra_info`: what the reward manager returned for each row. `sessions`: which response of its prompt a row is.

    V1 only: `dropped` are trajectories whose reward manager raised, as (uid, session, error); `evicted` the uids of
    groups that were replaced.
    """

    global_step: int
    batch: VerlDataProto
    responses: list[str]
    uids: list[str]
    sessions: list[int]
    extra_info: list[dict[str, Any]]
    metrics: dict[str, Any]
    dropped: list[tuple[str, int, BaseException]] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        """The score of each row."""
        return [float(value) for value in np.asarray(self.batch.batch["token_level_scores"]).sum(axis=-1)]

    @property
    def advantages(self) -> list[float | None]:
        """The advantage of each row: that of its last trained token; None where none is trained."""
        advantages, mask = (np.asarray(self.batch.batch[name]) for name in ("advantages", "response_mask"))
        trained = [np.flatnonzero(row) for row in mask]
        return [float(row[there[-1]]) if len(there) else None for row, there in zip(advantages, trained, strict=True)]

    @property
    def poisoned(self) -> bool:
        """Whether a trained token has an advantage that is no finite number: its optimizer step would be lost."""
        mask = np.asarray(self.batch.batch["response_mask"]).astype(bool)
        return not bool(np.isfinite(np.asarray(self.batch.batch["advantages"])[mask]).all())


@dataclass(frozen=True)
class VerlValidation:
    """One validation. `scores` and `extra_info` are by sample, `metrics` is what the tracker gets."""

    global_step: int
    metrics: dict[str, Any]
    responses: list[str]
    scores: list[float]
    uids: list[str]
    extra_info: dict[str, list[Any]]


LEGACY = "verl.trainer.ppo.ray_trainer"
AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
CHECKPOINTS = "verl.checkpoint_engine"
TRACKING = "verl.utils.tracking"

Values = Callable[[VerlDataProto], Any]
"""Returns the critic's values of a batch: (rows, response length)."""


@dataclass
class Setup:
    """What a trainer plays with, besides its configuration. `run` runs a coroutine on the event loop of the actors."""

    engine: VerlEngine
    ray: FakeRay
    reward: Any
    rows: Sequence[Row]
    val_rows: Sequence[Row]
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    seed: int
    values: Values | None = None


@dataclass(frozen=True)
class Validated:
    """One sample of a validation."""

    uid: str
    data_source: str
    text: str
    score: float
    num_turns: int
    info: Mapping[str, Any]


class TrainerBase(ABC):
    """The parts of a training run that deal with rewards, made in verl's order."""

    module: str
    """The module by whose name means and advantages are computed, because hooks may have wrapped them there."""

    def __init__(self, config: Any, setup: Setup) -> None:
        self.config, self.setup = config, setup
        self.tokenizer = setup.engine.tokenizer
        self.global_steps = 0
        algorithm, data = config.algorithm, config.data
        _refuse_policy_terms(algorithm)
        self.estimator = str(algorithm.adv_estimator)
        critic = config.critic.enable
        self.use_critic = bool(critic) if critic is not None else self.estimator == "gae"
        self._rng = random.Random(setup.seed)
        size = int(data.gen_batch_size or data.train_batch_size)
        shuffle = self._rng if data.shuffle else None
        self.train_dataloader = VerlDataLoader(setup.rows, size, shuffle=shuffle, drop_last=True)
        assert len(self.train_dataloader) >= 1, (
            f"Train dataloader is empty! rows has {len(setup.rows)}, and a batch is {size} (data.train_batch_size)"
        )
        self.val_dataloader = VerlDataLoader(setup.val_rows, data.val_batch_size or max(len(setup.val_rows), 1))
        self._batches = iter(self.train_dataloader)
        self._validated: list[Validated] = []

    @abstractmethod
    def step(self) -> VerlStep:
        """One step of the training loop."""

    @abstractmethod
    def _validate(self) -> dict[str, Any]:
        """Validate, and return the metrics."""

    def validate(self) -> VerlValidation:
        """One validation, logged."""
        metrics = self._log(self._validate())
        rows = self._validated
        scores, texts, uids = [row.score for row in rows], [row.text for row in rows], [row.uid for row in rows]
        return VerlValidation(self.global_steps, metrics, texts, scores, uids, _columns(rows))

    def start(self) -> None:
        """Start the reward workers, then the tracker, and the inference engines with the weights of the checkpoint."""
        self.reward_loop_manager: Any = sys.modules[REWARD_LOOP].RewardLoopManager(config=self.config)
        self._start_loops(self.reward_loop_manager.reward_loop_worker_handles)
        self.checkpoint_manager = sys.modules[CHECKPOINTS].CheckpointEngineManager(self.config)
        self.checkpoint_manager.sleep_replicas()
        self.logger = sys.modules[TRACKING].Tracking("fake", "fake", config=self.config)
        self.checkpoint_manager.update_weights(self.global_steps)

    def _start_loops(self, reward_workers: Any) -> None:
        make: type[AgentLoopManager] = sys.modules[AGENT_LOOP].AgentLoopManager
        self.loops = make(self.config, self.setup.run, reward_workers, self.setup.engine, self._rng)

    @property
    def is_colocated(self) -> bool:
        """Whether a reward model takes turns with the rollout: a batch is scored after it then."""
        return self.reward_loop_manager.reward_loop_worker_handles is None

    def _next_columns(self) -> dict[str, Any]:
        """The columns of the next prompts, each of which gets a uid."""
        columns = next(self._batches, None)
        if columns is None:
            self._batches = iter(self.train_dataloader)
            columns = next(self._batches)
        return self._with_uids(columns)

    def _with_uids(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        uids = [str(uuid.UUID(int=self._rng.getrandbits(128), version=4)) for _ in columns["raw_prompt"]]
        return {**columns, "uid": np.array(uids, dtype=object)}

    def _apart(self, work: Callable[[], Any]) -> Any:
        """Do what a colocated reward model does in a validation: the inference engines make room."""
        self.checkpoint_manager.sleep_replicas()
        result = work()
        self.checkpoint_manager.update_weights(self.global_steps)
        return result

    def _advance(self, data: VerlDataProto, compute: str, **more: Any) -> VerlDataProto:
        """Token rewards and advantages of a batch that has `rm_scores`. `compute` names verl's function for advantages,
        which gets `more`, too.
        """
        algorithm, batch = self.config.algorithm, data.batch
        batch["token_level_scores"] = batch["token_level_rewards"] = batch["rm_scores"]
        if self.use_critic:
            values = np.asarray(self.setup.values(data) if self.setup.values is not None else 0.0, dtype=np.float32)
            batch["values"] = np.broadcast_to(values, batch["response_mask"].shape).copy()
        advanced: VerlDataProto = getattr(sys.modules[self.module], compute)(
            data,
            adv_estimator=algorithm.adv_estimator,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
            **more,
        )
        return advanced

    def _step_of(
        self,
        batch: VerlDataProto,
        infos: Sequence[dict[str, Any]],
        metrics: Mapping[str, Any],
        **of_v1: Any,
    ) -> VerlStep:
        """The step that trains `batch`, logged."""
        logged = self._log({"training/global_step": self.global_steps, **metrics, **data_metrics(batch.batch)})
        uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
        of_v1.setdefault("sessions", [uids[:row].count(uid) for row, uid in enumerate(uids)])
        return VerlStep(
            global_step=self.global_steps,
            batch=batch,
            responses=self._texts(batch),
            uids=uids,
            extra_info=list(infos),
            metrics=logged,
            **of_v1,
        )

    def _means(self, rows: Sequence[Validated], **more: Any) -> dict[str, Any]:
        """The metrics of a validation."""
        self._validated = list(rows)
        sources, uids, turns = ([getattr(row, name) for row in rows] for name in ("data_source", "uid", "num_turns"))
        process = sys.modules[self.module].process_validation_metrics
        return named(process(sources, uids, _columns(rows), **more), turns)

    def _texts(self, batch: VerlDataProto) -> list[str]:
        lengths = np.asarray(batch.batch["attention_mask"])[:, batch.batch["prompts"].shape[1] :].sum(axis=1)
        rows = zip(batch.batch["responses"], lengths, strict=True)
        return [str(self.tokenizer.decode(ids[:length], skip_special_tokens=True)) for ids, length in rows]

    def _log(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Log metrics, and return what the tracker got."""
        self.logger.log(data=dict(metrics), step=self.global_steps)
        return dict(self.logger.logged[-1][1])


class LegacyTrainer(TrainerBase):
    """`RayPPOTrainer`."""

    module = LEGACY

    def step(self) -> VerlStep:
        """One step of the training loop."""
        self.global_steps += 1
        asked = VerlDataProto(None, self._next_columns(), {"global_steps": self.global_steps})
        asked = asked.repeat(int(self.config.actor_rollout_ref.rollout.n))
        output = asked.union(self.loops.generate_sequences(asked))
        self.checkpoint_manager.sleep_replicas()
        output = self._scored(output, validates=False)
        if "rm_scores" not in output.batch:
            raise KeyError(f'key "rm_scores" not found in TensorDict with keys {sorted(output.batch)}')
        batch = self._advance(output, "compute_advantage")
        self.checkpoint_manager.update_weights(self.global_steps)
        return self._step_of(batch, _infos(batch), {})

    def _validate(self) -> dict[str, Any]:
        rows: list[Validated] = []
        count = int(self.config.actor_rollout_ref.rollout.val_kwargs.n)
        meta = {"validate": True, "global_steps": self.global_steps}
        for columns in self.val_dataloader:
            batch = VerlDataProto(None, self._with_uids(columns), meta).repeat(count)
            batch = self._scored(batch.union(self.loops.generate_sequences(batch)), validates=True)
            names = ("uid", "data_source", "__num_turns__")
            uids, sources, turns = (batch.non_tensor_batch[name] for name in names)
            scores = np.asarray(batch.batch["rm_scores"]).sum(axis=-1).tolist()
            told = zip(uids, sources, self._texts(batch), scores, turns, _infos(batch), strict=True)
            rows += [Validated(*each) for each in told]
        return self._means(rows)

    def _scored(self, batch: VerlDataProto, *, validates: bool) -> VerlDataProto:
        """With the scores of a colocated reward model, if there is one."""
        if not self.is_colocated or "rm_scores" in batch.batch:
            return batch
        score = self.reward_loop_manager.compute_rm_score
        return batch.union(self._apart(lambda: score(batch)) if validates else score(batch))


class CheckpointEngineManager:
    """`CheckpointEngineManager` (checkpoint_engine/base.py): puts the inference engines to sleep before the trainer
    uses their GPUs, and wakes them with its new weights. Nothing sleeps here, but hooks see the calls.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def sleep_replicas(self) -> None:
        """Called before the checkpoint is loaded, and when a batch is generated."""

    def update_weights(self, global_steps: int | None = None) -> None:
        """Called before the first rollout, and when the policy has been updated."""


class Tracking:
    """`verl.utils.tracking.Tracking`, with one backend: a list."""

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: Any = None, config: Any = None
    ) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: Mapping[str, Any], step: int, backend: Any = None) -> None:
        self.logged.append((step, dict(data)))


def _infos(batch: VerlDataProto) -> list[dict[str, Any]]:
    columns = {key: batch.non_tensor_batch[key].tolist() for key in batch.meta_info.get("reward_extra_keys", ())}
    return [{key: values[row] for key, values in columns.items()} for row in range(len(batch))]


def _columns(rows: Sequence[Validated]) -> dict[str, list[Any]]:
    """The scores and what the reward manager said, by column: None where a row lacks a key."""
    names = dict.fromkeys(name for row in rows for name in row.info)
    told = {name: [row.info.get(name) for row in rows] for name in names}
    return {"reward": [row.score for row in rows], **told}


def _refuse_policy_terms(algorithm: Any) -> None:
    """Raises `NotImplementedError` for what changes rewards by a policy, which is not played."""
    for key in ("use_kl_in_reward", "rollout_correction.rollout_is", "rollout_correction.rollout_rs"):
        if value := OmegaConf.select(algorithm, key):
            raise NotImplementedError(
                f"algorithm.{key}={value} is not played by FakeVerlTrainer: it needs the policy's numbers"
            )
