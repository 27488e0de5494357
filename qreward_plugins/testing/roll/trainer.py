"""A stand-in for ROLL's rollout side, for unit tests of reward workers and rollout loops.

A mistake in rewards shows hours into a run: an exception ends the training, a NaN spoils its group without a message.
The stand-in makes the same calls in the same order and fails in the same way, in milliseconds, without ROLL, torch,
Ray, vLLM, Megatron or a GPU; it needs numpy.

    with roll_stand_in():
        with FakeRollTrainer({"math": {"worker_cls": "my_rewards.MathWorker"}}, adv_estimator="grpo") as trainer:
            step = trainer.step()
    assert not step.poisoned
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..data_proto import TORCH, RollDataProto
from ..fake_trainer import FakeTrainer, load, stand_in_modules
from ..generation import DEFAULT_ROWS, WordTokenizer, answer_by_chance
from .arguments import DEFAULT_LOOP, make_config
from .generation import Hold, Respond, RollDraft, RollEngine, Row, encode_row, shuffled, torch
from .scheduler import (
    RollPrompt,
    RollScheduler,
    UserDefinedRolloutLoop,
    expand_requests,
    postprocess_output_data,
    query_filter,
)
from .workers import Dispatch, RollActor, Worker, register

_START_S = 60.0
"""Most seconds for making all workers, and for closing them."""


@dataclass(frozen=True)
class _Result:
    """Lists are in the order of the rows of `batch`. `metrics` are the logged metrics."""

    global_step: int
    batch: RollDataProto
    responses: list[str]
    metrics: dict[str, Any]

    @property
    def scores(self) -> list[float]:
        return [float(number) for number in self.batch.batch["scores"]]

    @property
    def rewards(self) -> list[float]:
        return [float(number) for number in self.batch.batch["response_level_rewards"]]

    def column(self, name: str) -> list[Any]:
        """A column of the data set, such as `id`, `domain` or `ground_truth`."""
        return list(self.batch.non_tensor_batch[name])


@dataclass(frozen=True)
class RollValidation(_Result):
    """One validation. `val_correct` is the share of scores that are exactly 1, by tag, and of `all`."""

    val_correct: dict[str, float]


@dataclass(frozen=True)
class RollStep(_Result):
    """One step, up to the training batch. Lists are in the order of its rows.

    `batch` holds ROLL's tensors, with `advantages` and `final_response_mask` (B, L - 1). `raw_rewards` are
    `response_level_rewards` from the workers and the rollout loop, `rewards` the same normalised, `advantages` their
    mean over the trained tokens of a response, or None if none is trained. `metrics` are the logged metrics.

    `dropped` are prompts for which the rollout loop returned None. `reward_calls` counts the calls of
    `compute_rewards`.
    """

    raw_rewards: list[float]
    dropped: list[RollPrompt]
    reward_calls: int

    @property
    def trained_tokens(self) -> list[int]:
        """For each response its tokens in the loss. If there is none at all, ROLL skips the step."""
        return [int(count) for count in self._array("final_response_mask").sum(-1)]

    @property
    def advantages(self) -> list[float | None]:
        """NaN if any token is NaN, trained or not, because ROLL multiplies with the mask."""
        rows = zip(self._array("advantages"), self._array("final_response_mask") > 0, strict=True)
        return [
            float(row[kept].mean()) if kept.any() else None if np.isfinite(row).all() else np.nan for row, kept in rows
        ]

    @property
    def poisoned(self) -> bool:
        """Whether any advantage is not finite. Such a step ruins the policy, and ROLL does not detect it."""
        return not bool(np.isfinite(self._array("advantages")).all())

    def _array(self, name: str) -> Any:
        return np.asarray(self.batch.batch[name])


class FakeRollTrainer(FakeTrainer[RollDraft]):
    """ROLL's `RLVRPipeline`, with a fake inference engine and trainer.

    `rewards` is ROLL's node of that name with one domain, which the stand-in plays: `worker_cls` (a dotted path, or a
    class derived from the `Worker` of `roll_stand_in()`), `reward_manager_config`, `world_size`,
    `query_filter_config`, `system_envs` and so on. `flags` are ROLL's own with ROLL's defaults, except for
    `rollout_batch_size` and `num_return_sequences_in_group`, which are 4, and `prompt_length` and `sequence_length`,
    128 and 192. `user_defined_rollout_loop_cls` may be the class itself.

    `rows`: the data set; a row is a question, or a mapping with `messages` or a `prompt`, `ground_truth`, `tag`, `id`
    and any columns. `val_rows`: the rows of the validation. `val_generating_args` set its `generation_config`.

    `respond(draft, rng)` returns a response; it may be async. A word is a token, and an end token follows. If
    `hold(draft)` is true, the generation waits for `release()`. `seed` fixes all random numbers. `timeout_s` bounds a
    step and a validation; with None `rpc_timeout` does, as in ROLL.

    A worker with async methods runs on the trainer's event loop, any other in a thread, one call at a time.
    `system_envs` are in its configuration only: set the variables that it reads. A worker's `close`, sync or async, is
    called at the end if it has one; ROLL kills its process. Leaving the context closes the trainer. Methods are
    for one thread, except `release` and `wait_until_held`.

    Batches are sampled and trained in turn. Several domains, sampling ahead or beyond the batch, and masks, norms and
    clips of the trainer's are not played: they are refused.

    Raises `TypeError` for a name that is unknown or not played, `ValueError` if ROLL would not start, and the errors of
    importing, making and initialising the workers.
    """

    def __init__(
        self,
        rewards: Mapping[str, Mapping[str, Any]],
        *,
        rows: Sequence[Row] = DEFAULT_ROWS,
        val_rows: Sequence[Row] = (),
        respond: Respond = answer_by_chance,
        hold: Hold | None = None,
        tokenizer: Any = None,
        val_generating_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        timeout_s: float | None = 60.0,
        **flags: Any,
    ) -> None:
        self._tokenizer = tokenizer if tokenizer is not None else WordTokenizer()
        self.pipeline_config: Namespace = make_config(
            rewards, flags, seed=seed, tokenizer=self._tokenizer, val_generating_args=val_generating_args or {}
        )
        config = self.pipeline_config
        self._engine = RollEngine(respond, hold, self._tokenizer, seed)
        limit_s = min(config.rpc_timeout, config.rpc_timeout if timeout_s is None else timeout_s)
        super().__init__("fake-roll-scheduler", "fake-roll-driver", self._engine.held, limit_s)
        if len(rows) <= config.rollout_batch_size:
            prompts = f"the {config.rollout_batch_size} prompts of a batch"
            raise ValueError(f"there are {len(rows)} rows: ROLL needs more than {prompts}")
        ((self._domain, given),) = rewards.items()
        reward = config.rewards[self._domain]
        loop_path = flags.get("user_defined_rollout_loop_cls", DEFAULT_LOOP)
        self._loop_cls = UserDefinedRolloutLoop if loop_path == DEFAULT_LOOP else load(loop_path)
        self._steps = itertools.count()
        self._step = 0
        kind, cluster = load(given["worker_cls"]), f"reward-{self._domain}"
        self._actors = [RollActor(kind, reward, cluster, rank) for rank in range(reward.world_size)]
        self._val_size = len(val_rows)
        self._train = self._scheduler("train", rows, is_val=False)
        self._val = self._scheduler("validation", val_rows, is_val=True)
        try:
            self._loop.run(self._start(), _START_S)
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        for actor in self._actors:
            await actor.start(self.pipeline_config)

    def _scheduler(self, name: str, rows: Sequence[Row], *, is_val: bool) -> RollScheduler:
        config = copy.deepcopy(self.pipeline_config)  # a scheduler is an actor of its own
        encoded = [
            encode_row(row, number, domain=self._domain, tokenizer=self._tokenizer, prompt_length=config.prompt_length)
            for number, row in enumerate(rows)
        ]
        data = shuffled(encoded, config.seed)
        return RollScheduler(name, config, self._engine, self._actors, data, self._loop_cls(), is_val=is_val)

    def step(self) -> RollStep:
        """Sample one batch and compute its advantages.

        Raises the errors of workers and rollout loops, which end ROLL's training, and `TimeoutError` after
        `rpc_timeout`, as ROLL does, or after `timeout_s`.
        """
        self._step = next(self._steps)
        sampling, size = self.pipeline_config.actor_infer.generating_args, self.pipeline_config.rollout_batch_size
        batch = self._run(self._sample(self._train, sampling, size, collect_unfinished=False))
        self._run(self._call_all("offload_states"))
        metrics = reduce_metrics(batch.meta_info.pop("metrics", {}))
        raw = [float(number) for number in batch.batch["response_level_rewards"]]
        return RollStep(
            global_step=self._step,
            batch=train_batch(batch, self.pipeline_config),
            responses=self._texts(batch),
            raw_rewards=raw,
            metrics={f"{self._domain}/{name}": value for name, value in metrics.items()},
            dropped=self._train.dropped,
            reward_calls=self._train.reward_calls,
        )

    def start_step(self) -> Future[RollStep]:
        """`step` in its own thread, for tests that act while it runs."""
        return self._in_background(self.step)

    def validate(self) -> RollValidation:
        """Generate and reward `val_rows` once. Raises like `step`, and `ValueError` without any."""
        if not self._val_size:
            raise ValueError("there is nothing to validate on: set val_rows")
        sampling = self.pipeline_config.validation.generating_args
        # ROLL validates between the call of `load_states` and the rollouts of a step.
        batch = self._run(self._sample(self._val, sampling, self._val_size, is_offload_states=False))
        metrics = reduce_metrics(batch.meta_info.pop("metrics", {}))
        parts = {"all": batch, **batch.group_by("tag")}
        correct = {name: float(np.mean(np.asarray(part.batch["scores"]) == 1)) for name, part in parts.items()}
        return RollValidation(
            global_step=self._step, batch=batch, responses=self._texts(batch), metrics=metrics, val_correct=correct
        )

    @property
    def workers(self) -> list[Any]:
        """The workers. Those with async methods belong to the trainer's event loop: only read them."""
        return [actor.worker for actor in self._actors]

    def _end(self) -> None:
        self._loop.run(self._close_workers(), _START_S)

    async def _sample(
        self, scheduler: RollScheduler, sampling: Mapping[str, Any], size: int, **meta: Any
    ) -> RollDataProto:
        await self._call_all("load_states")
        meta |= {"global_step": self._step, "generation_config": dict(sampling)}
        return await scheduler.get_batch(meta, size)

    async def _call_all(self, method: str) -> None:
        await asyncio.gather(*(actor.call(method) for actor in self._actors))

    async def _close_workers(self) -> None:
        closed = await asyncio.gather(*(actor.close() for actor in self._actors), return_exceptions=True)
        for error in closed:
            if error is not None:
                raise error

    def _texts(self, batch: RollDataProto) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True)
        return texts


_REDUCERS: dict[str, Any] = {
    "max": np.max,
    "min": np.min,
    "p50": np.median,
    "p99": lambda values: np.percentile(values, 99),
    "std": np.std,
    "sum": np.sum,
}


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce lists by the suffix of their name (`_sum`, `_max`, ...), else to their mean; keep numbers. Raises numpy's
    errors for lists with anything but numbers.
    """
    lists = {name: value for name, value in metrics.items() if isinstance(value, (list, tuple)) and len(value)}
    reducers = {name: _REDUCERS.get(name.rpartition("_")[2], np.mean) for name in lists}
    return {**metrics, **{name: float(reducers[name](value)) for name, value in lists.items()}}


def train_batch(batch: RollDataProto, config: Any) -> RollDataProto:
    """The batch with `final_response_mask`, normalised `response_level_rewards` and `advantages`."""
    tensors = batch.batch
    mask = _array(tensors["response_mask"])[:, 1:]
    rewards = _array(tensors["response_level_rewards"])
    if config.adv_estimator == "grpo":
        rewards = normalised(rewards, config.num_return_sequences_in_group)
    # The reward stands at the last token of its response.
    tokens = np.zeros(mask.shape)
    tokens[np.arange(len(batch)), _array(tensors["attention_mask"]).sum(-1).astype(int) - 2] = rewards
    tokens *= mask
    discount = config.gamma * (config.lambd if config.adv_estimator == "gae" else 1)
    advantages, later = np.zeros_like(tokens), np.zeros(len(batch))
    for place in reversed(range(tokens.shape[-1])):
        advantages[:, place] = later = tokens[:, place] + discount * later
    tensors["token_level_scores"] = tensors.pop("token_level_rewards")
    for name, values in {
        "final_response_mask": mask,
        "response_level_rewards": rewards,
        "token_level_rewards": tokens,
        "advantages": advantages * mask,
    }.items():
        tensors[name] = torch.tensor(values.astype(np.float32))
    return batch


def normalised(rewards: Any, size: int) -> Any:
    """Rewards minus the mean of their group of `size`, divided by its standard deviation; NaN for a group of one."""
    groups = rewards.reshape(-1, size)
    spread = groups.std(-1, ddof=1, keepdims=True) if size > 1 else np.nan
    return ((groups - groups.mean(-1, keepdims=True)) / (spread + 1e-6)).reshape(rewards.shape)


def _array(tensor: Any) -> Any:
    return np.asarray(tensor, dtype=np.float64)


def default_tokenizer_provider(model_args: Any, model_name_or_path: str | None = None) -> Any:
    """The tokenizer of the trainer with this configuration."""
    return model_args.qreward_tokenizer


def safe_import_class(class_path: str) -> Any:
    """The class of a dotted path; None, with a log line, if it cannot be imported."""
    try:
        return load(class_path)
    except Exception as error:
        logging.getLogger("qreward_plugins.testing.roll").error("Failed to import class %s: %s", class_path, error)
        return None


_SCHEDULER = "roll.distributed.scheduler"
_NAMES: dict[str, dict[str, Any]] = {
    "roll.distributed.executor.worker": {"Worker": Worker},
    f"{_SCHEDULER}.decorator": {"Dispatch": Dispatch, "register": register},
    f"{_SCHEDULER}.generate_scheduler": {"expand_requests": expand_requests},
    f"{_SCHEDULER}.protocol": {"DataProto": RollDataProto},
    f"{_SCHEDULER}.user_defined_rollout_loop": {
        "UserDefinedRolloutLoop": UserDefinedRolloutLoop,
        "expand_requests": expand_requests,
        "postprocess_output_data": postprocess_output_data,
        "query_filter": query_filter,
    },
    "roll.models.model_providers": {"default_tokenizer_provider": default_tokenizer_provider},
    "roll.utils.import_utils": {"safe_import_class": safe_import_class},
}


def roll_stand_in(*, over_installed: bool = False) -> AbstractContextManager[bool]:
    """Let workers and loops import a few of ROLL's names, for a `FakeRollTrainer`.

    They are `Worker`, `Dispatch`, `register`, `DataProto`, `default_tokenizer_provider`, `UserDefinedRolloutLoop` and
    its helpers, and `safe_import_class`; and without torch a `torch` with `tensor`, `zeros`, `ones`, `full_like`,
    `zeros_like`, `ones_like`, `cat`, `arange` and a few types, on numpy. Anything else under `roll`, such as its
    agentic pipelines, is a `ModuleNotFoundError`.

    It yields False if ROLL is installed, whose own names are used then. Those need Ray, so `FakeRollTrainer` refuses
    workers that use them; with `over_installed` the stand-ins replace an installed ROLL.

    For a whole test suite, enter it in a session fixture or in `conftest.py`, before the first import of a worker.
    Leaving it removes the modules; classes imported before keep their names. For one thread at a time.
    """
    contents = _NAMES if find_spec("torch") is not None else {**_NAMES, "torch": TORCH}
    return stand_in_modules(contents, proof="roll.distributed.executor.worker", over_installed=over_installed)
