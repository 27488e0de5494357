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
import itertools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ..fake_trainer import FakeTrainer, load
from ..generation import DEFAULT_ROWS, WordTokenizer, answer_by_chance
from .arguments import DEFAULT_LOOP, batch_sizes, make_config, refuse_unknown
from .estimates import reduce_metrics, train_batch
from .generation import Hold, Respond, RollDraft, RollEngine, Row, encode_row, shuffled
from .protocol import RollDataProto
from .results import RollStep, RollValidation
from .rollout_loop import UserDefinedRolloutLoop
from .scheduler import RollScheduler
from .workers import RollActor

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
    `domain` or `tag`. `val_generating_args` set its `generation_config`.

    `respond(draft, rng)` returns a response; it may be async. A word is a token, and an end token follows. If
    `hold(draft)` is true, the generation waits for `release()`. `seed` fixes all random numbers. `timeout_s` bounds a
    step and a validation; with None `rpc_timeout` does, as in ROLL.

    A worker with async methods runs on the trainer's event loop, any other in its own thread, one call at a time.
    `system_envs` are in `os.environ` while its worker is made and initialised. A worker's `close`, sync or async, is
    called at the end if it has one; ROLL kills its process. Leaving the context closes the trainer. Methods are
    for one thread, except `release` and `wait_until_held`.

    Batches are sampled and trained in turn. Sampling ahead or beyond the batch, and masks, norms and clips of the
    trainer's are not played: their flags are refused.

    Raises `TypeError` for a name that is unknown or not played, `ValueError` if ROLL would not start, and the errors of
    importing, making and initialising the workers.
    """

    def __init__(
        self,
        rewards: Mapping[str, Mapping[str, Any]],
        *,
        rows: Sequence[Row] | Mapping[str, Sequence[Row]] = DEFAULT_ROWS,
        val_rows: Sequence[Row] = (),
        respond: Respond = answer_by_chance,
        hold: Hold | None = None,
        tokenizer: Any = None,
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
            val_generating_args=val_generating_args or {},
        )
        config = self.pipeline_config
        self._tokenizer = tokenizer
        self._engine = RollEngine(respond, hold, tokenizer, seed)
        limit_s = min(config.rpc_timeout, config.rpc_timeout if timeout_s is None else timeout_s)
        super().__init__("fake-roll-scheduler", "fake-roll-driver", self._engine.held, limit_s)
        self._sizes = batch_sizes(config)
        if isinstance(rows, Mapping):
            refuse_unknown(rows, config.rewards, "rewards (for which there are rows)")
        own = {domain: rows.get(domain, ()) if isinstance(rows, Mapping) else rows for domain in config.rewards}
        for domain, size in self._sizes.items():
            if (count := len(own[domain])) <= size:
                raise ValueError(f"{domain} has {count} rows: ROLL needs more than the {size} prompts of a batch")
        val_set = [self._encoded(row, number, self._domain_of(row)) for number, row in enumerate(val_rows)]
        self._val_size = len(val_set)
        loop_path = flags.get("user_defined_rollout_loop_cls", DEFAULT_LOOP)
        loop_cls = UserDefinedRolloutLoop if loop_path == DEFAULT_LOOP else load(loop_path)
        self._steps = itertools.count()
        self._step = 0
        self._actors = {
            domain: [
                RollActor(load(given["worker_cls"]), reward, f"reward-{domain}", n) for n in range(reward.world_size)
            ]
            for (domain, reward), given in zip(config.rewards.items(), rewards.values(), strict=True)
        }

        self._schedulers: dict[str, RollScheduler] = {}
        for domain, given in own.items():
            data = [self._encoded(row, number, domain) for number, row in enumerate(given)]
            self._schedulers[domain] = self._scheduler(domain, [domain], data, loop_cls())
        self._val = self._scheduler(None, list(config.rewards), val_set, loop_cls())
        try:
            self._loop.run(self._start(), _START_S)
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        for actor in self._all_actors():
            await actor.start()
        for actor in self._all_actors():
            await actor.initialize(self.pipeline_config)

    def _scheduler(
        self, domain: str | None, domains: Sequence[str], data: Sequence[dict[str, Any]], loop: Any
    ) -> RollScheduler:
        """That of a domain, or of validation (None)."""
        config = copy.deepcopy(self.pipeline_config)  # a scheduler is an actor of its own
        clusters = {each: self._actors[each] for each in domains}
        name, rows = domain or "validation", shuffled(data, config.seed)
        return RollScheduler(name, config, self._engine, clusters, rows, loop, is_val=domain is None)

    def step(self) -> RollStep:
        """Sample one batch and compute its advantages.

        Raises the errors of workers and rollout loops, which end ROLL's training, and `TimeoutError` after
        `rpc_timeout`, as ROLL does, or after `timeout_s`.
        """
        self._step = next(self._steps)
        parts = self._run(self._sample(self._step))
        logged: dict[str, Any] = {}
        for domain, part in parts.items():
            of_part = reduce_metrics(part.meta_info.pop("metrics", {}))
            logged |= {f"{domain}/{name}": value for name, value in of_part.items()}
        batch = RollDataProto.concat(list(parts.values()))
        batch.meta_info["global_step"] = self._step
        raw = [float(number) for number in batch.batch["response_level_rewards"]]
        batch, of_training = train_batch(batch, self.pipeline_config)
        schedulers = self._schedulers.values()
        return RollStep(
            global_step=self._step,
            batch=batch,
            responses=self._texts(batch),
            raw_rewards=raw,
            metrics={**logged, **of_training},
            dropped=[prompt for scheduler in schedulers for prompt in scheduler.dropped],
            reward_calls=sum(scheduler.reward_calls for scheduler in schedulers),
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

    def _waiting_for(self) -> str:
        pending = sum(scheduler.rewards_pending for scheduler in (*self._schedulers.values(), self._val))
        return (
            f"ROLL would wait until rpc_timeout ({self.pipeline_config.rpc_timeout:g} s): after {self._timeout_s:g} s "
            f"{pending} reward calls are pending and {len(self._engine.held)} generations are held"
        )

    async def _sample(self, number: int) -> dict[str, RollDataProto]:
        await self._call_all("load_states")
        sampling = self.pipeline_config.actor_infer.generating_args.to_dict()
        meta = {"global_step": number, "collect_unfinished": False, "generation_config": sampling}
        batches = (
            scheduler.get_batch(copy.deepcopy(meta), self._sizes[domain])
            for domain, scheduler in self._schedulers.items()
        )
        sampled = await asyncio.gather(*batches)
        await self._call_all("offload_states")
        return dict(zip(self._schedulers, sampled, strict=True))

    async def _sample_val(self, number: int) -> RollDataProto:
        await self._call_all("load_states")  # ROLL validates between this call and the rollouts of a step
        sampling = self.pipeline_config.validation.generating_args.to_dict()
        meta = {"is_offload_states": False, "generation_config": sampling, "global_step": number}
        return await self._val.get_batch(meta, self._val_size)

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

    def _encoded(self, row: Row, number: int, domain: str) -> dict[str, Any]:
        config = self.pipeline_config
        tag = next(iter(config.rewards[domain].tag_included), domain)
        length = config.prompt_length
        return encode_row(row, number, domain=domain, tag=tag, tokenizer=self._tokenizer, prompt_length=length)

    def _domain_of(self, row: Row) -> str:
        """The domain of a row of the validation: its own, that of its tag, or the first."""
        config, columns = self.pipeline_config, row if isinstance(row, Mapping) else {}
        domain = columns.get("domain") or config.tag_2_domain.get(columns.get("tag")) or next(iter(config.rewards))
        if domain not in config.rewards:
            raise ValueError(f"a row of val_rows is of the domain {domain!r}, for which there is no reward")
        return str(domain)
