"""A stand-in for ROLL's rollout side, for unit tests of reward workers and rollout loops.

A mistake in rewards shows hours into a run: an exception ends the training, a NaN spoils its group without a message,
an additional tensor breaks a concatenation. The stand-in makes the same calls in the same order and fails in the same
way, in milliseconds, without ROLL, torch, Ray, vLLM, Megatron or a GPU; it needs numpy.

    with roll_stand_in():
        with FakeRollTrainer({"math": {"worker_cls": "my_rewards.MathWorker"}}, adv_estimator="grpo") as trainer:
            step = trainer.step()
    assert not step.poisoned
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import itertools
from argparse import Namespace
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from ..fake_trainer import FakeTrainer
from ..generation import WordTokenizer
from .arguments import DEFAULT_LOOP, batch_sizes, make_config, refuse_unknown
from .estimates import reduce_metrics, train_batch
from .generation import (
    DEFAULT_ROWS,
    Hold,
    Respond,
    RollDataset,
    RollDraft,
    RollEngine,
    Row,
    answer_by_chance,
    encode_row,
)
from .protocol import RollDataProto
from .results import RollStep, RollValidation
from .rollout_loop import UserDefinedRolloutLoop
from .scheduler import RollRecord, RollScheduler
from .workers import RollActor

T = TypeVar("T")

_START_S = 60.0
"""Most seconds for making all workers, and for closing them."""


class FakeRollTrainer(FakeTrainer[RollDraft]):
    """ROLL's `RLVRPipeline`, with a fake inference engine and trainer.

    `rewards` is ROLL's node of that name: for every domain `worker_cls` (a dotted path, or a class derived from the
    `Worker` of `roll_stand_in()`), `reward_manager_config`, `world_size`, `tag_included`, `query_filter_config`,
    `system_envs` and so on. `flags` are ROLL's own with ROLL's defaults, except for `rollout_batch_size` and
    `num_return_sequences_in_group`, which are 4, and `prompt_length` and `sequence_length`, 128 and 192.
    `user_defined_rollout_loop_cls` may be the class itself.

    `rows`: the data set of all domains, or one for each domain; a row is a question, or a mapping with `messages`
    or a `prompt`, `ground_truth`, `tag`, `id` and any columns. `val_rows`: the rows of the validation, each with its
    `domain` or `tag`. `domain_interleave_probs`: each domain's part of the batch, equal by default.
    `generating_args` and `val_generating_args` set `generation_config`.

    `respond(draft, rng)` returns a response; it may be async. A word is a token, and an end token follows. If
    `hold(draft)` is true, the generation waits for `release()`. `seed` fixes all random numbers. `timeout_s` bounds a
    step and a validation; with None `rpc_timeout` does, as in ROLL.

    A worker with async methods runs on the trainer's event loop, any other in its own thread, one call at a time.
    `system_envs` are in `os.environ` while its worker is made and initialised. A worker's `close`, sync or async, is
    called at the end if it has one; ROLL kills its process. Leaving the context closes the trainer. Methods are
    for one thread, except `release` and `wait_until_held`.

    Batches are sampled and trained in turn. What samples ahead or beyond the batch, clips or whitens is not played: its
    flag is refused by name.

    Raises `TypeError` for an unknown name, `ValueError` if ROLL would not start, `NotImplementedError` for what is not
    played, and the errors of importing, making and initialising the workers.
    """

    def __init__(
        self,
        rewards: Mapping[str, Mapping[str, Any]],
        *,
        rows: Sequence[Row] | Mapping[str, Sequence[Row]] = DEFAULT_ROWS,
        val_rows: Sequence[Row] = (),
        domain_interleave_probs: Mapping[str, float] | None = None,
        respond: Respond = answer_by_chance,
        hold: Hold | None = None,
        tokenizer: Any = None,
        generating_args: Mapping[str, Any] | None = None,
        val_generating_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        timeout_s: float | None = 60.0,
        **flags: Any,
    ) -> None:
        tokenizer = tokenizer if tokenizer is not None else WordTokenizer()
        self.pipeline_config: Namespace = make_config(
            rewards,
            flags,
            seed=seed,
            tokenizer=tokenizer,
            generating_args=generating_args or {},
            val_generating_args=val_generating_args or {},
        )
        config = self.pipeline_config
        self._tokenizer = tokenizer
        self._engine = RollEngine(respond, hold, tokenizer, seed)
        super().__init__("fake-roll-scheduler", "fake-roll-driver", self._engine.held, timeout_s)
        self._sizes = batch_sizes(config, domain_interleave_probs)
        datasets = {domain: RollDataset(self._encoded(rows, domain), seed) for domain in self._sizes}
        for domain, dataset in datasets.items():
            if len(dataset) <= self._sizes[domain]:
                raise ValueError(
                    f"the data set of {domain} has {len(dataset)} rows: ROLL needs more than the "
                    f"{self._sizes[domain]} prompts of a batch"
                )
        val_set = RollDataset([self._encoded_val(row, number) for number, row in enumerate(val_rows)], seed)
        loop_cls = _loaded(flags.get("user_defined_rollout_loop_cls", DEFAULT_LOOP))
        kinds = {domain: _loaded(rewards[domain]["worker_cls"]) for domain in config.rewards}
        self._steps = itertools.count()
        self._step = 0
        self._ended: BaseException | None = None
        self._actors: dict[str, list[RollActor]] = {}
        self._schedulers: dict[str, RollScheduler] = {}
        self._val: RollScheduler | None = None
        try:
            self._loop.run(self._start(kinds, datasets, val_set, loop_cls), _START_S)
        except BaseException:
            self.close()
            raise

    async def _start(
        self, kinds: Mapping[str, type], datasets: Mapping[str, RollDataset], val_set: RollDataset, loop_cls: type
    ) -> None:
        config = self.pipeline_config
        for domain, kind in kinds.items():
            reward = config.rewards[domain]
            self._actors[domain] = [
                RollActor(kind, reward, f"reward-{domain}", rank) for rank in range(reward.world_size)
            ]
        for actor in self._all_actors():
            await actor.start()
        for domain, dataset in datasets.items():
            self._schedulers[domain] = self._scheduler(domain, [domain], dataset, loop_cls(), is_val=False)
        if len(val_set):
            self._val = self._scheduler("validation", list(self._actors), val_set, loop_cls(), is_val=True)
        for actor in self._all_actors():
            await actor.initialize(config)

    def _scheduler(
        self, name: str, domains: Sequence[str], dataset: RollDataset, loop: Any, *, is_val: bool
    ) -> RollScheduler:
        clusters = {domain: self._actors[domain] for domain in domains}
        config = copy.deepcopy(self.pipeline_config)  # a scheduler is a separate actor
        return RollScheduler(name, config, self._engine, clusters, dataset, loop, is_val=is_val)

    def step(self) -> RollStep:
        """Sample one batch and compute its advantages.

        Raises the errors of workers and rollout loops. These end ROLL's training, so any further step raises
        `RuntimeError`. Raises `TimeoutError` after `rpc_timeout`, as ROLL does, or after `timeout_s`.
        """
        self._step = next(self._steps)
        records = [RollRecord() for _ in self._schedulers]
        for scheduler, record in zip(self._schedulers.values(), records, strict=True):
            scheduler.record = record
        parts = self._run(self._sample(self._step))
        logged: dict[str, Any] = {}
        for domain, part in parts.items():
            of_part = reduce_metrics(part.meta_info.pop("metrics", {}))
            logged |= {f"{domain}/{name}": value for name, value in of_part.items()}
        batch = RollDataProto.concat(list(parts.values()))
        batch.meta_info["global_step"] = self._step
        raw = [float(number) for number in batch.batch["response_level_rewards"]]
        batch, of_training = train_batch(batch, self.pipeline_config)
        return RollStep(
            global_step=self._step,
            batch=batch,
            responses=self._texts(batch),
            raw_rewards=raw,
            metrics={**logged, **of_training},
            dropped=[prompt for record in records for prompt in record.dropped],
            reward_calls=sum(record.reward_calls for record in records),
            rewards_pending_max=max(record.rewards_pending_max for record in records),
        )

    def start_step(self) -> Future[RollStep]:
        """`step` in its own thread, for tests that act while it runs."""
        return self._in_background(self.step)

    def validate(self) -> RollValidation:
        """Generate and reward `val_rows` once. Raises like `step`, and `ValueError` without any."""
        if self._val is None:
            raise ValueError("there is nothing to validate on: set val_rows")
        batch = self._run(self._sample_val(self._val, self._step))
        metrics = reduce_metrics(batch.meta_info.pop("metrics", {}))
        parts = {"all": batch, **batch.group_by("tag")}
        correct = {name: float(np.mean(np.asarray(part.batch["scores"]) == 1)) for name, part in parts.items()}
        return RollValidation(
            global_step=self._step,
            batch=batch,
            responses=self._texts(batch),
            val_correct=correct,
            metrics={**metrics, **{f"val_correct/{name}/mean": value for name, value in correct.items()}},
        )

    def workers(self, domain: str) -> list[Any]:
        """The workers of a domain. Workers with async methods belong to the trainer's event loop: only read them."""
        return [actor.worker for actor in self._actors[domain]]

    def _end(self) -> None:
        self._loop.run(self._close_workers(), _START_S)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._ended is not None:
            coroutine.close()
            raise RuntimeError(f"the training has ended: {self._ended!r}") from self._ended
        limits = [limit for limit in (self.pipeline_config.rpc_timeout, self._timeout_s) if limit is not None]
        try:
            return self._loop.run(coroutine, min(limits, default=None), self._waiting_for)
        except BaseException as error:
            self._ended = error
            raise

    def _waiting_for(self) -> str:
        limit_s, schedulers = self.pipeline_config.rpc_timeout, [*self._schedulers.values(), self._val]
        pending = sum(scheduler.rewards_pending for scheduler in schedulers if scheduler is not None)
        waited = f"{pending} reward calls are pending and {len(self._engine.held)} generations are held"
        if self._timeout_s is None or limit_s <= self._timeout_s:
            return f"rpc_timeout: no batch came for {limit_s} s, which ends ROLL's training; {waited}"
        return f"ROLL would wait for its rpc_timeout: after {self._timeout_s} s {waited}"

    async def _sample(self, number: int) -> dict[str, RollDataProto]:
        await self._call_all("load_states")
        sampling = self.pipeline_config.actor_infer.generating_args.to_dict()
        meta = {"global_step": number, "collect_unfinished": False, "generation_config": sampling}
        sampled = await asyncio.gather(
            *(
                scheduler.get_batch(copy.deepcopy(meta), self._sizes[domain])
                for domain, scheduler in self._schedulers.items()
            )
        )
        await self._call_all("offload_states")
        return dict(zip(self._schedulers, sampled, strict=True))

    async def _sample_val(self, scheduler: RollScheduler, number: int) -> RollDataProto:
        await self._call_all("load_states")  # ROLL validates between this call and the rollouts of a step
        sampling = self.pipeline_config.validation.generating_args.to_dict()
        meta = {"is_offload_states": False, "generation_config": sampling, "global_step": number}
        return await scheduler.get_batch(meta, len(scheduler.dataset))

    def _all_actors(self) -> list[RollActor]:
        return [actor for actors in self._actors.values() for actor in actors]

    async def _call_all(self, method: str) -> None:
        await asyncio.gather(*(actor.call(method) for actor in self._all_actors()))

    async def _close_workers(self) -> None:
        closed = await asyncio.gather(*(actor.close() for actor in self._all_actors()), return_exceptions=True)
        for error in closed:
            if error is not None:
                raise error

    def _texts(self, batch: RollDataProto) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True)
        return texts

    def _encoded(self, rows: Sequence[Row] | Mapping[str, Sequence[Row]], domain: str) -> list[dict[str, Any]]:
        if isinstance(rows, Mapping):
            refuse_unknown(rows, self._sizes, "rewards (for which there are rows)")
            own = rows.get(domain, ())
        else:
            own = rows
        return [self._encoded_row(row, number, domain) for number, row in enumerate(own)]

    def _encoded_row(self, row: Row, number: int, domain: str) -> dict[str, Any]:
        config = self.pipeline_config
        tag = next(iter(config.rewards[domain].tag_included), domain)
        length = config.prompt_length
        return encode_row(row, number, domain=domain, tag=tag, tokenizer=self._tokenizer, prompt_length=length)

    def _encoded_val(self, row: Row, number: int) -> dict[str, Any]:
        config = self.pipeline_config
        columns = row if isinstance(row, Mapping) else {}
        domain = columns.get("domain") or config.tag_2_domain.get(columns.get("tag")) or next(iter(config.rewards))
        if domain not in config.rewards:
            raise ValueError(f"a row of val_rows is of the domain {domain!r}, for which there is no reward")
        return self._encoded_row(row, number, domain)


def _loaded(path: Any) -> Any:
    """The class of a dotted path; ROLL's own loop is the stand-in's. Raises the errors of the import."""
    if path == DEFAULT_LOOP:
        return UserDefinedRolloutLoop
    if not isinstance(path, str):
        return path
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
