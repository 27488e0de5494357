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
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..fake_trainer import FakeTrainer, load
from ..generation import DEFAULT_ROWS, WordTokenizer, answer_by_chance
from .arguments import DEFAULT_LOOP, make_config
from .estimates import reduce_metrics, train_batch
from .generation import Hold, Respond, RollDraft, RollEngine, Row, encode_row, shuffled
from .protocol import RollDataProto
from .scheduler import RollPrompt, RollScheduler, UserDefinedRolloutLoop
from .workers import RollActor

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
        batch = self._run(self._sample(self._step))
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
        batch = self._run(self._sample_val(self._step))
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

    def _waiting_for(self) -> str:
        pending = self._train.rewards_pending + self._val.rewards_pending
        return (
            f"ROLL would wait until rpc_timeout ({self.pipeline_config.rpc_timeout:g} s): after {self._timeout_s:g} s "
            f"{pending} reward calls are pending and {len(self._engine.held)} generations are held"
        )

    async def _sample(self, number: int) -> RollDataProto:
        await self._call_all("load_states")
        sampling = dict(self.pipeline_config.actor_infer.generating_args)
        meta = {"global_step": number, "collect_unfinished": False, "generation_config": sampling}
        sampled = await self._train.get_batch(meta, self.pipeline_config.rollout_batch_size)
        await self._call_all("offload_states")
        return sampled

    async def _sample_val(self, number: int) -> RollDataProto:
        await self._call_all("load_states")  # ROLL validates between this call and the rollouts of a step
        sampling = dict(self.pipeline_config.validation.generating_args)
        meta = {"is_offload_states": False, "generation_config": sampling, "global_step": number}
        return await self._val.get_batch(meta, self._val_size)

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
