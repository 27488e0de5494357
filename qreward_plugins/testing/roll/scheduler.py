"""The scheduler of one domain, or of validation: generates and rewards prompts, and collects a batch.

The order of steps is that of ROLL's `generate_scheduler.py`. In the streaming path a rollout loop plays every prompt in
its own task, and the first exception ends the training. In the batch path there is no loop.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .cluster import RollCluster
from .context import RolloutContext
from .data import RollDataset, collate
from .engine import RollEngine
from .metrics import Durations, batch_metrics
from .protocol import RollDataProto
from .replay import ReplayBuffer, RollItem
from .rollout_loop import expand_responses, query_filter, response_batch

_SETTLING = 100
"""Steps of the event loop after which everything that waits for nothing else has happened."""


@dataclass(frozen=True)
class RollPrompt:
    """A prompt that is in no batch. `id` is the id of its row; None if its loop never asked for a row."""

    domain: str
    prompt_id: int
    id: Any


@dataclass
class RollRecord:
    """The other results since the last batch."""

    dropped: list[RollPrompt] = field(default_factory=list)
    aborted: list[RollPrompt] = field(default_factory=list)
    surplus: list[RollItem] = field(default_factory=list)
    reward_calls: int = 0
    rewards_pending_max: int = 0


class RollScheduler:
    """Samples from one data set, on one event loop. `clusters` are the domains whose workers it may call."""

    def __init__(
        self,
        name: str,
        config: Any,
        engine: RollEngine,
        clusters: Mapping[str, RollCluster],
        dataset: RollDataset,
        loop: Any,
        *,
        is_val: bool,
    ) -> None:
        self.name = name
        self.pipeline_config = config
        self.engine = engine
        self.clusters = clusters
        self.dataset = dataset
        self.udrl = loop
        self.is_val = is_val
        self.sequence_length = config.val_sequence_length if is_val else config.sequence_length
        extra = config.max_additional_running_prompts if config.is_use_additional_prompts and not is_val else 0
        self.replay_buffer = ReplayBuffer(0 if is_val else config.async_generation_ratio, extra)
        self.workers = {domain: itertools.cycle(cluster.actors) for domain, cluster in clusters.items()}
        self.durations = {domain: Durations() for domain in clusters}
        self.meta_info: dict[str, Any] = {}
        self.resumed = asyncio.Event()
        self.record = RollRecord()
        self.rewards_pending = 0
        self.contexts: dict[int, RolloutContext] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sending: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps = itertools.count()
        self._random = random.Random(f"{config.seed}/{name}")

    def next_name(self) -> str:
        """An id for a rollout: a UUID, the same in every run."""
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def next_request(self) -> dict[str, Any]:
        """The next row, collated."""
        return self._collated([self.dataset.next()])

    def _collated(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        tokenizer, length = self.engine.tokenizer, self.pipeline_config.prompt_length
        return collate(items, pad_token_id=tokenizer.pad_token_id, length=length)

    async def get_batch(self, meta_info: dict[str, Any], prompts: int) -> RollDataProto:
        """A batch of `prompts` groups. Raises the errors of workers and rollout loops."""
        if self.pipeline_config.generate_opt_level == 0:
            return await self._whole_batch(meta_info, prompts)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        samples = prompts * meta_info["generation_config"]["num_return_sequences"]
        config = self.pipeline_config
        self.meta_info = copy.deepcopy(meta_info)
        self.meta_info["collect_non_finish"] = config.async_generation_ratio > 0
        self.replay_buffer.advance_step(next(self._steps), prompts)
        self.resumed.set()
        getting = asyncio.create_task(self.replay_buffer.get_batch(samples))
        try:
            either: set[asyncio.Future[Any]] = {getting, self._failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            items = getting.result()
        finally:
            getting.cancel()
            await asyncio.gather(getting, return_exceptions=True)
        if config.is_use_additional_prompts and not self.is_val:
            items = items[:samples]
        assert len(items) == samples, f"{len(items)} responses for a batch of {samples}"
        batch = self._joined(items)
        if self.is_val or not config.async_pipeline:
            await self.pause()
        else:
            await self.settle()
            self.resumed.clear()  # otherwise an engine that takes no time would sample ahead for ever
        for domain, durations in self.durations.items():
            batch.meta_info["metrics"].update(durations.log(f"scheduler/{domain}/time"))
        return batch

    def _joined(self, items: Sequence[RollItem]) -> RollDataProto:
        by_domain: dict[str, list[RollDataProto]] = {}
        for item in items:
            by_domain.setdefault(item.domain, []).append(item.data)
        parts = {domain: RollDataProto.concat(data) for domain, data in by_domain.items()}
        batch = RollDataProto.concat(list(parts.values()))
        assert self.replay_buffer.step is not None
        ages = [self.replay_buffer.step - item.sampling_start_step for item in items]
        own = batch_metrics(parts, len({item.prompt_id for item in items}), sum(ages) / len(ages))
        batch.meta_info["metrics"] = {**batch.meta_info.get("metrics", {}), **own}
        return batch

    async def pause(self) -> None:
        """Stop sending requests, and abort generations and prompts that are too old. Rewards continue."""
        self.resumed.clear()
        aborted, surplus = self.replay_buffer.gc()
        for prompt_id in aborted:
            self.record.aborted.append(self._prompt(prompt_id))
            if prompt_id in self._tasks:
                self._tasks[prompt_id].cancel()
        self.record.surplus += [item for items in surplus for item in items]
        self.engine.abort(self.name)
        await asyncio.sleep(0)

    async def settle(self) -> None:
        """Let sampling ahead run until it waits for a reward or a release, as it does while ROLL trains."""
        for _ in range(_SETTLING):
            await asyncio.sleep(0)

    async def _send(self) -> None:
        while True:
            prompt_id = await self.replay_buffer.poll()
            task = asyncio.create_task(self._play(prompt_id))
            self._tasks[prompt_id] = task
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # the next get_batch raises it, but there may be none
            self._cancel()

    async def _play(self, prompt_id: int) -> None:
        context = self.contexts[prompt_id] = RolloutContext(self, prompt_id)
        committed = False
        try:
            responses = await self.udrl.process_new_prompt(context=context)
            if responses is None:
                self.record.dropped.append(self._prompt(prompt_id))
                return
            singles = expand_responses(responses)
            wanted = self.meta_info["generation_config"]["num_return_sequences"]
            assert len(singles) == wanted or self.pipeline_config.is_use_additional_prompts, (
                f"a rollout loop returned {len(singles)} responses, not {wanted}: that needs is_use_additional_prompts"
            )
            start = context.sampling_start_step
            assert start is not None, "a rollout loop must generate in do_generate_and_reward"
            items = [RollItem(prompt_id, context.domain or "default", start, single) for single in singles]
            committed = True
            self.replay_buffer.commit(prompt_id, items)
        finally:
            if not committed:
                self.replay_buffer.abort(prompt_id)
            self._tasks.pop(prompt_id, None)
            self.contexts.pop(prompt_id, None)

    def _prompt(self, prompt_id: int) -> RollPrompt:
        context = self.contexts.get(prompt_id)
        row = None if context is None else context.row_id
        return RollPrompt((context and context.domain) or self.name, prompt_id, row)

    def _cancel(self) -> None:
        for task in [self._sending, *self._tasks.values()]:
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """End all tasks."""
        tasks = [task for task in [self._sending, *self._tasks.values()] if task is not None]
        self._cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole_batch(self, meta_info: dict[str, Any], prompts: int) -> RollDataProto:
        count = meta_info["generation_config"]["num_return_sequences"]
        done: list[RollDataProto] = []
        used = filtered = 0
        while len(done) < prompts:
            rows = self._collated([self.dataset.next() for _ in range(prompts)])
            asked = RollDataProto.from_single_dict(rows, meta_info=meta_info)
            asked.batch["prompt_id"] = torch.arange(prompts)
            answers = await self._answers(asked, count, next(self._steps))
            asked.pop(batch_keys=["input_ids", "attention_mask", "position_ids"])
            batch = RollDataProto.from_dict(answers).union(asked.repeat(repeat_times=count))
            batch.rename("prompt_id", "origin_prompt_id")
            rewards = await self._rewarded(batch)
            batch.meta_info.pop("metrics", None)
            rewards.meta_info.pop("metrics", None)
            batch.union(rewards)
            for group in batch.group_by("origin_prompt_id").values():
                if self.is_val or query_filter([group], self.pipeline_config):
                    done.append(group)
                else:
                    filtered += 1
            used += prompts
        whole = RollDataProto.concat(done[:prompts])
        whole.meta_info["metrics"] = {
            "scheduler/query_filter_count": filtered,
            "scheduler/collect_query_count": prompts,
            "scheduler/query_use_count": used,
        }
        return whole

    async def _answers(self, asked: RollDataProto, count: int, turn: int) -> dict[str, torch.Tensor]:
        scope = f"{self.name}/{turn}"
        writing = [
            self.engine.generate(
                asked, row, scope=scope, domain=asked.non_tensor_batch["domain"][row], prompt_id=row, is_val=self.is_val
            )
            for row in range(len(asked))
            for _ in range(count)
        ]
        tokens = [answer for answer, _ in await asyncio.gather(*writing)]
        # ROLL uses the sequence length of training here, also in validation.
        length, pad = self.pipeline_config.sequence_length, self.engine.tokenizer.pad_token_id
        return response_batch(asked, tokens, None, sequence_length=length, pad_token_id=pad)

    async def _rewarded(self, batch: RollDataProto) -> RollDataProto:
        """The rewards of a batch in its order; each domain's rows go to its own workers (reward_scheduler.py)."""
        batch.batch["prompt_id"] = torch.arange(len(batch))
        groups = batch.group_by("domain")
        asked = [domain for domain in self.clusters if domain in groups]
        self.record.reward_calls += sum(len(self.clusters[domain].actors) for domain in asked)
        rewards_by_domain = await asyncio.gather(
            *(self.clusters[domain].compute_rewards(groups[domain]) for domain in asked)
        )
        parts = []
        for domain, answers in zip(asked, rewards_by_domain, strict=True):
            part = RollDataProto.concat(answers)
            part.batch["prompt_id"] = groups[domain].batch["prompt_id"]
            parts.append(part)
        rewards = RollDataProto.concat(parts)
        rewards.reorder(torch.argsort(rewards.batch["prompt_id"]))
        rewards.pop("prompt_id")
        return rewards
