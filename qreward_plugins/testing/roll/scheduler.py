"""The scheduler of one domain, or of validation: generates and rewards prompts, and collects a batch.

The order of steps is that of ROLL's `generate_scheduler.py`. In the streaming path a rollout loop plays every prompt in
its own task, and the first exception ends the training. In the batch path there is no loop.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..tensors import objects
from .generation import RollEngine, collate
from .protocol import RollDataProto, torch
from .rollout_loop import expand_responses, response_batch
from .workers import RollActor


@dataclass(frozen=True)
class RollPrompt:
    """A prompt that is in no batch. `id` is the id of its row; None if its loop never asked for a row."""

    domain: str
    prompt_id: int
    id: Any


class RolloutContext:
    """ROLL's `RolloutContext`, a loop's interface to its scheduler for one prompt: it provides a row, and generates and
    rewards responses.
    """

    def __init__(self, scheduler: RollScheduler, prompt_id: int) -> None:
        self._scheduler = scheduler
        self.prompt_id = prompt_id
        self.meta_info = copy.deepcopy(scheduler.meta_info)
        self.pipeline_config = scheduler.pipeline_config
        self.is_val = scheduler.is_val
        self.sequence_length = scheduler.pipeline_config.sequence_length
        self.prompt_length = scheduler.pipeline_config.prompt_length
        self.is_num_return_sequences_expand = scheduler.pipeline_config.is_num_return_sequences_expand
        self.domain: str | None = None
        self.row_id: Any = None
        self._inside = False

    def get_request_data(self, meta_info: dict[str, Any]) -> tuple[RollDataProto, str]:
        """The next row of the data set and its domain. Call it once, before `do_generate_and_reward`."""
        if self.domain is not None:
            raise RuntimeError("get_request_data may be called once; return None to start another prompt")
        request = RollDataProto.from_single_dict(self._scheduler.next_rows(1), meta_info=meta_info)
        self.row_id = request.non_tensor_batch["id"][0]
        domain = self.domain = str(request.non_tensor_batch["domain"][0])
        return request, domain

    @asynccontextmanager
    async def do_generate_and_reward(self, max_concurrency: int) -> AsyncIterator[None]:
        """The context in which `generate` and `compute_rewards` may be called."""
        assert not self._inside
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    async def generate(self, req: RollDataProto, domain: str) -> RollDataProto:
        """Generate the responses of a request. The result has no batch; its meta information is the request's, with
        `output_token_ids` and `finish_reasons` added.
        """
        assert self._inside, "a rollout loop must generate in do_generate_and_reward"
        scheduler, meta = self._scheduler, req.meta_info
        scope, count = scheduler.name, meta["generation_config"]["num_return_sequences"]
        writing = [
            scheduler.engine.generate(req, 0, scope=scope, prompt_id=self.prompt_id, is_val=self.is_val)
            for _ in range(count)
        ]
        meta["output_token_ids"] = written = await asyncio.gather(*writing)
        tokenizer = scheduler.engine.tokenizer
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        meta["finish_reasons"] = ["stop" if tokens[-1:] == [end] else "length" for tokens in written]
        meta["eos_token_id"], meta["pad_token_id"] = [end, pad], pad
        return RollDataProto(meta_info=meta)

    async def compute_rewards(self, req: RollDataProto, domain: str) -> RollDataProto:
        """Set `rollout_id` of these responses, and get their rewards from the next worker of a domain, round robin.
        Raises the worker's errors.
        """
        assert self._inside, "a rollout loop must ask for rewards in do_generate_and_reward"
        req.non_tensor_batch["rollout_id"] = objects(itertools.islice(self._scheduler.names, len(req)))
        return await self._scheduler.ask(domain, req)


class RollScheduler:
    """Samples from `rows`, on one event loop. `clusters` are the workers that it may call, by domain.

    `reward_calls` and `dropped` are the calls of workers and the prompts without a result since the last batch,
    `rewards_pending` the calls that are under way.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        engine: RollEngine,
        clusters: Mapping[str, Sequence[RollActor]],
        rows: Iterator[Mapping[str, Any]],
        loop: Any,
        *,
        is_val: bool,
    ) -> None:
        self.name = name
        self.pipeline_config = config
        self.engine = engine
        self.is_val = is_val
        self.meta_info: dict[str, Any] = {}
        self.dropped: list[RollPrompt] = []
        self.reward_calls = self.rewards_pending = 0
        self._rows = rows
        self._clusters = clusters
        self._next_actor = {domain: itertools.cycle(actors) for domain, actors in clusters.items()}
        self._ending = False
        self._loop = loop
        self._prompts, self._batches = itertools.count(), itertools.count()
        self.names = (f"{name}/{number}" for number in itertools.count())
        """The ids of rollouts, which are UUIDs in ROLL."""

    def next_rows(self, count: int) -> dict[str, Any]:
        """The next rows, collated."""
        pad, length = self.engine.tokenizer.pad_token_id, self.pipeline_config.prompt_length
        return collate(list(itertools.islice(self._rows, count)), pad_token_id=pad, length=length)

    async def ask(self, domain: str, data: RollDataProto) -> RollDataProto:
        """The rewards that the next worker of a domain gives."""
        self.reward_calls += 1
        self.rewards_pending += 1
        try:
            rewards: RollDataProto = await next(self._next_actor[domain]).call("compute_rewards", data)
        finally:
            self.rewards_pending -= 1
        return rewards

    async def get_batch(self, meta_info: dict[str, Any], prompts: int) -> RollDataProto:
        """A batch of `prompts` groups. Raises the errors of workers and rollout loops."""
        self.dropped, self.reward_calls = [], 0
        if self.pipeline_config.generate_opt_level == 0:
            return await self._whole_batch(meta_info, prompts)
        self.meta_info = copy.deepcopy(meta_info)
        done: list[list[RollDataProto]] = []
        self._ending = False
        playing = [asyncio.ensure_future(self._play(done)) for _ in range(prompts)]
        try:
            # Not gather: cancelling that waits for its tasks, and these go on where a worker cancelled a call.
            finished, _ = await asyncio.wait(playing, return_when=asyncio.FIRST_EXCEPTION)
            for task in finished:
                task.result()
        finally:
            self._ending = True
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
        by_domain: dict[str, list[RollDataProto]] = {}
        for group in done:
            by_domain.setdefault(str(group[0].non_tensor_batch["domain"][0]), []).extend(group)
        return RollDataProto.concat([RollDataProto.concat(rows) for rows in by_domain.values()])

    async def _play(self, done: list[list[RollDataProto]]) -> None:
        """Play prompts until the loop keeps one."""
        while True:
            context = RolloutContext(self, next(self._prompts))
            try:
                responses = await self._loop.process_new_prompt(context=context)
            except asyncio.CancelledError:
                if self._ending:
                    raise
                continue  # of a call that its worker cancelled: ROLL takes another prompt
            if responses is not None:
                break
            self.dropped.append(RollPrompt(context.domain or self.name, context.prompt_id, context.row_id))
            await asyncio.sleep(0)
        singles = expand_responses(responses)
        wanted = self.meta_info["generation_config"]["num_return_sequences"]
        assert len(singles) == wanted, f"a rollout loop returned {len(singles)} responses, not {wanted}"
        done.append(singles)

    async def _whole_batch(self, meta_info: dict[str, Any], prompts: int) -> RollDataProto:
        count = meta_info["generation_config"]["num_return_sequences"]
        asked = RollDataProto.from_single_dict(self.next_rows(prompts), meta_info=meta_info)
        asked.batch["origin_prompt_id"] = torch.tensor(np.arange(prompts))
        scope = f"{self.name}/{next(self._batches)}"
        writing = [
            self.engine.generate(asked, row, scope=scope, prompt_id=row, is_val=self.is_val)
            for row in range(prompts)
            for _ in range(count)
        ]
        tokens = await asyncio.gather(*writing)
        length, pad = self.pipeline_config.sequence_length, self.engine.tokenizer.pad_token_id
        answers = response_batch(asked, tokens, sequence_length=length, pad_token_id=pad)
        for name in ("input_ids", "attention_mask", "position_ids"):
            asked.batch.pop(name)
        batch = RollDataProto.from_dict(answers).union(asked.repeat(repeat_times=count))
        rewards = await self._rewarded(batch)
        rewards.meta_info.pop("metrics", None)
        return batch.union(rewards)

    async def _rewarded(self, batch: RollDataProto) -> RollDataProto:
        """The rewards of a batch in its order; each domain's rows go to its own workers (reward_scheduler.py)."""
        places = batch.non_tensor_batch["domain"]
        parts: list[tuple[str, Any]] = []
        for domain, actors in self._clusters.items():
            own = np.flatnonzero([place == domain for place in places])
            parts += [(domain, rows) for rows in np.array_split(own, len(actors)) if len(own)]
        rewards = await asyncio.gather(*(self.ask(domain, batch.select_idxs(rows)) for domain, rows in parts))
        order = np.argsort(np.concatenate([rows for _, rows in parts]))
        return RollDataProto.concat(rewards).select_idxs(order)
