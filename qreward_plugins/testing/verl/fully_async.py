"""verl's fully asynchronous trainer (experimental/fully_async_policy): a rollouter generates and scores without pause,
a queue holds the groups that are finished, and a trainer takes as many as make a batch.

The rollouter has the data, the agent loops, the reward workers and the validation, the trainer the tracker and the
advantages; in verl each is an actor.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from .aggregated_metrics import MetricsAggregator
from .base import Setup
from .legacy import LegacyTrainer
from .protocol import VerlDataProto
from .results import VerlStep, VerlValidation
from .rollout_samples import RolloutSample, SampleQueue, assemble_batch, prompt_batch

ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter"
TRAINER = "verl.experimental.fully_async_policy.fully_async_trainer"

_PENDING = 128
"""Prompts that are ready to be generated."""


class TrainingStopException(Exception):
    """No batch comes any more. verl's run ends without an error then; `__cause__` is what ended generation, None where
    all prompts were generated.
    """


class FullyAsyncRollouter(LegacyTrainer):
    """`FullyAsyncRollouter`: generates one prompt after another, up to the staleness that is allowed.

    An exception of a reward manager ends generation, and what was scored by then is still trained. verl notices it
    when it next looks at finished prompts: at a pause, at the end, or where no more may be generated at once. Its
    monitor, which looks every ten seconds whether a pause is over, is not played: only new weights end a pause.
    """

    def __init__(self, config: Any, setup: Setup) -> None:
        training = config.async_training
        assert not config.actor_rollout_ref.hybrid_engine
        assert config.data.train_batch_size == 0, "train_batch_size must be zero"
        assert config.data.gen_batch_size == 1, "gen_batch_size must be one"
        assert training.staleness_threshold >= 0, "staleness_threshold must larger than 0"
        assert training.trigger_parameter_sync_step >= 1, "trigger_parameter_sync_step must larger or equal than 1"
        reward_model = config.reward.reward_model
        assert not reward_model.enable or reward_model.enable_resource_pool, (
            "GenRM/DisRM in fully async mode requires standalone mode (enable_resource_pool=True). "
            "Colocate mode is not supported because async rollout never pauses."
        )
        assert config.actor_rollout_ref.rollout.calculate_log_probs, "must rollout calculate log_probs"
        super().__init__(config, setup)
        self.use_critic = False
        self.global_steps = 1
        self.total_rollout_steps = len(self.train_dataloader) * config.trainer.total_epochs
        if config.rollout.total_rollout_steps is not None:
            self.total_rollout_steps = min(config.rollout.total_rollout_steps, self.total_rollout_steps)
        self.required_samples = required_samples(config)
        stale = self.required_samples * (training.staleness_threshold + 1)
        self.max_required_samples = int(stale * training.trigger_parameter_sync_step)
        at_once = _servers(config) * int(training.get("concurrent_samples_per_replica", 16))
        self.max_concurrent_samples = min(at_once, self.max_required_samples)
        self.queue = SampleQueue(self.max_required_samples)
        self.error: BaseException | None = None
        self.paused = False
        self.active_tasks: set[asyncio.Task[None]] = set()
        self.staleness_samples = self.total_generated_samples = self.dropped_stale_samples = 0
        self._step_generated_samples = 0
        self._pending: asyncio.Queue[RolloutSample | None] = asyncio.Queue(_PENDING)
        self._lock = asyncio.Lock()
        self._resumed = asyncio.Event()
        self._not_validating = asyncio.Event()
        self._not_validating.set()
        self._running: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Generate from here on. A second call changes nothing."""
        if self._running is None:
            self._running = asyncio.ensure_future(self.fit())

    async def aclose(self) -> None:
        """Stop generating."""
        tasks = [*self.active_tasks, *([self._running] if self._running is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def fit(self) -> None:
        """Generate all prompts, or as many as come before an error, and end the queue."""
        try:
            await self._stream()
        except Exception as error:
            self.error = error
        await self.queue.put_sample(None)

    async def reset_staleness(self) -> dict[str, Any]:
        """The trainer has sent new weights: go on. Returns metrics, but for those made of seconds."""
        async with self._lock:
            self.paused = False
            self._resumed.set()
            self.staleness_samples = len(self.active_tasks) + len(self.queue)
            generated, self._step_generated_samples = self._step_generated_samples, 0
        return {"fully_async/rollouter/step_generated_samples": generated}

    def do_validate(self) -> dict[str, Any]:
        """The metrics of a validation. Meanwhile no prompt is begun and no finished one noticed, as verl's validation
        blocks the actor's event loop.
        """
        self._seen = {}
        self.setup.run(self._set_validating(True))
        try:
            return self._validate()
        finally:
            self.setup.run(self._set_validating(False))

    def statistics(self) -> dict[str, Any]:
        """How far generation got."""
        return {
            "monitor/active_tasks_size": len(self.active_tasks),
            "monitor/queue/pending_queue_size": self._pending.qsize(),
            "monitor/queue/mq_queue_size": len(self.queue),
            "count/total_generated_samples": self.total_generated_samples,
            "count/staleness_samples": self.staleness_samples,
            "count/dropped_stale_samples": self.dropped_stale_samples,
            "static/max_required_samples": self.max_required_samples,
            "static/required_samples": self.required_samples,
            "static/staleness_threshold": self.config.async_training.staleness_threshold,
            "static/max_queue_size": self.max_required_samples,
            "static/max_concurrent_samples": self.max_concurrent_samples,
        }

    async def _set_validating(self, validating: bool) -> None:
        (self._not_validating.clear if validating else self._not_validating.set)()

    async def _stream(self) -> None:
        feed, processor = (asyncio.ensure_future(each) for each in (self._feed(), self._process_all()))
        try:
            done, _ = await asyncio.wait((feed, processor), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if feed not in done:
                raise RuntimeError("Processor task exited prematurely")
            await processor
        finally:
            for task in (feed, processor):
                task.cancel()
            await asyncio.gather(feed, processor, return_exceptions=True)

    async def _feed(self) -> None:
        for epoch, columns in self._epochs():
            batch = prompt_batch(columns, self.config)
            await self._pending.put(RolloutSample(batch, f"sample_{epoch}_{self.global_steps}", epoch))
            if self.global_steps >= self.total_rollout_steps:
                break
            self.global_steps += 1
        await self._pending.put(None)

    def _epochs(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for epoch in range(self.config.trainer.total_epochs):
            for columns in self.train_dataloader:
                yield epoch, columns

    async def _process_all(self) -> None:
        """Begin prompts as long as that is allowed. The lock is held in the same places as in verl, where the trainer
        waits for it after a step.
        """
        while True:
            if self._should_pause():
                await self._pause()
                continue
            sample = await self._pending.get()
            self.staleness_samples += 1
            if sample is None:
                while self.active_tasks:
                    await self._await_some()
                return
            while len(self.active_tasks) >= self.max_concurrent_samples:
                await self._await_some()
            if self.paused:
                await self._resumed.wait()
            await self._not_validating.wait()
            async with self._lock:
                task = asyncio.create_task(self._process(sample), name=sample.sample_id)
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                self.active_tasks.add(task)

    async def _pause(self) -> None:
        async with self._lock:
            self.paused = True
            self._resumed.clear()
        resumed = asyncio.ensure_future(self._resumed.wait())
        try:
            while self.active_tasks and not resumed.done():
                done, _ = await asyncio.wait({*self.active_tasks, resumed}, return_when=asyncio.FIRST_COMPLETED)
                async with self._lock:
                    for task in done - {resumed}:
                        self.active_tasks.discard(task)
                        await task
            await resumed
        finally:
            resumed.cancel()
            await asyncio.gather(resumed, return_exceptions=True)

    async def _await_some(self) -> None:
        async with self._lock:
            done, self.active_tasks = await asyncio.wait(self.active_tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task

    def _should_pause(self) -> bool:
        most = self.max_required_samples
        return self.paused or len(self.queue) >= most or self.staleness_samples >= most

    async def _process(self, sample: RolloutSample) -> None:
        sample.set_uid()
        sample.full_batch = await self.agent_loops.generate_sequences_single(sample.full_batch)
        await self._not_validating.wait()
        sample.set_uid()
        sample.rollout_status = self.statistics()
        if await self.queue.put_sample(sample):
            self.total_generated_samples += 1
            self._step_generated_samples += 1
        else:
            self.dropped_stale_samples += 1


class FullyAsyncTrainer(LegacyTrainer):
    """`FullyAsyncTrainer`: trains on batches of finished groups, and sends new weights after every
    `async_training.trigger_parameter_sync_step` of them.

    The tracker counts versions of the weights. As in verl, it gets the metrics of a step only after a later one: with
    the next new weights. The batch is not balanced over ranks.
    """

    rollouter: FullyAsyncRollouter

    def start(self) -> None:
        """Start the tracker, then the reward workers."""
        self._start_tracker()
        self.rollouter._setup()
        self.reward_loop_manager, self.agent_loops = self.rollouter.reward_loop_manager, self.rollouter.agent_loops
        self.required_samples = required_samples(self.config)
        self.current_param_version = 0
        self._local_step = 1
        self._stale = self._calls = 0
        self._aggregator = MetricsAggregator()
        self._send_weights()

    def step(self) -> VerlStep:
        """One batch. Raises `TrainingStopException` when no more come."""
        before, calls = len(self.setup.logged), self._calls
        self.setup.run(self.rollouter.begin())
        samples = self.setup.run(self._collect())
        if len(samples) < self.required_samples:
            self._end()
            raise TrainingStopException("Training terminated: queue returned None") from self.rollouter.error
        self.global_steps += 1
        batch, metrics = self._trained(assemble_batch(samples))
        metrics = {
            "training/global_step": self.global_steps,
            "training/epoch": 0,
            **self._metrics_of_samples(batch),
            **metrics,
        }
        self._local_step = self._local_step % self.config.async_training.trigger_parameter_sync_step + 1
        synced = self._local_step == 1
        if synced:
            self.current_param_version += 1
            self._send_weights()
            self._log_aggregated()
        self._aggregator.add_step_metrics({**metrics, "dynamic_resource/mq_size": len(self.rollouter.queue)})
        self._calls = self.agent_loops.reward_calls
        return self._step_of(batch, self._told_since(before), calls)

    def validate(self) -> VerlValidation:
        """One validation, logged. Generation for training goes on."""
        metrics = self.rollouter.do_validate()
        logged = self._log(metrics, self.current_param_version)
        return VerlValidation(self.current_param_version, logged, **self.rollouter._seen)

    async def aclose(self) -> None:
        """Stop generating."""
        await self.rollouter.aclose()

    def _make_loaders(self) -> None:
        self.rollouter = sys.modules[ROLLOUTER].FullyAsyncRollouter(self.config, self.setup)
        self.train_dataloader, self.val_dataloader = self.rollouter.train_dataloader, self.rollouter.val_dataloader

    async def _collect(self) -> list[RolloutSample]:
        samples: list[RolloutSample] = []
        while len(samples) < self.required_samples:
            sample = await self.rollouter.queue.get_sample()
            if sample is None:
                break
            samples.append(sample)
        return samples

    def _metrics_of_samples(self, batch: VerlDataProto) -> dict[str, Any]:
        versions = batch.meta_info["trajectory_param_versions"]
        self._stale += sum(self.current_param_version - version >= 1 for version in versions)
        logged = {name: value for name, value in batch.meta_info.items() if name.startswith("fully_async")}
        return {
            "fully_async/count/stale_trajectory_processed": self._stale,
            "fully_async/count/current_param_version": self.current_param_version,
            **logged,
        }

    def _send_weights(self) -> None:
        """New weights for the engine. It resumes responses that are not finished; without
        `async_training.partial_rollout` they end where they are.
        """
        self.setup.run(self._set_weights())
        self._log(self.setup.run(self.rollouter.reset_staleness()), self.current_param_version)

    async def _set_weights(self) -> None:
        self.setup.engine.weights = self.current_param_version
        if not self.config.async_training.partial_rollout:
            self.setup.engine.held.abort()

    def _log_aggregated(self) -> None:
        metrics = self._aggregator.get_aggregated_metrics()
        if metrics:
            self._log(metrics, self.current_param_version)
        self._aggregator.reset()

    def _end(self) -> None:
        """verl logs what is left only where the last version of the weights was not validated."""
        if self.current_param_version % self.config.trainer.test_freq != 0 and self._local_step == 1:
            self._send_weights()
            self._log_aggregated()


def required_samples(config: Any) -> int:
    """The prompts in a batch."""
    return int(config.actor_rollout_ref.actor.ppo_mini_batch_size * config.async_training.require_batches)


def _servers(config: Any) -> int:
    """The engines that generate. verl's default splits a model over two devices."""
    rollout = config.actor_rollout_ref.rollout
    sizes = ("tensor_model_parallel_size", 2), ("data_parallel_size", 1), ("pipeline_model_parallel_size", 1)
    devices = int(np.prod([int(rollout.get(name, default)) for name, default in sizes]))
    return int(config.rollout.nnodes) * int(config.rollout.n_gpus_per_node) // devices
