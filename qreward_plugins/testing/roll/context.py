"""`RolloutContext`: a rollout loop's interface to its scheduler, for one prompt."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .columns import objects
from .protocol import RollDataProto

if TYPE_CHECKING:
    from .scheduler import RollScheduler


class RolloutContext:
    """ROLL's `RolloutContext` (generate_scheduler.py): it provides a row, and generates and rewards responses."""

    def __init__(self, scheduler: RollScheduler, prompt_id: int) -> None:
        self._scheduler = scheduler
        self.prompt_id = prompt_id
        self.meta_info = copy.deepcopy(scheduler.meta_info)
        self.pipeline_config = scheduler.pipeline_config
        self.is_val = scheduler.is_val
        self.sequence_length = scheduler.sequence_length
        self.prompt_length = scheduler.pipeline_config.prompt_length
        self.is_num_return_sequences_expand = scheduler.pipeline_config.is_num_return_sequences_expand
        self.domain: str | None = None
        self.sampling_start_step: int | None = None
        self.inflight_requests: set[str] | None = None
        self.row_id: Any = None
        self._in_do_generate_and_reward = False
        self._requests = 0

    def get_request_data(self, meta_info: dict[str, Any]) -> tuple[RollDataProto, str]:
        """The next row of the data set and its domain. Call it once, before `do_generate_and_reward`."""
        assert not self._in_do_generate_and_reward
        assert self.sampling_start_step is None
        if self.domain is not None:
            raise RuntimeError("get_request_data may be called once; return None to start another prompt")
        request = RollDataProto.from_single_dict(self._scheduler.next_request(), meta_info=meta_info)
        self.row_id = request.non_tensor_batch["id"][0]
        domain = self.domain = str(request.non_tensor_batch["domain"][0])
        return request, domain

    @asynccontextmanager
    async def do_generate_and_reward(self, max_concurrency: int) -> AsyncIterator[None]:
        """The context in which `generate` and `compute_rewards` may be called. No request may outlive it."""
        assert not self._in_do_generate_and_reward
        assert self.sampling_start_step is None
        self._in_do_generate_and_reward = True
        self.sampling_start_step = await self._scheduler.replay_buffer.begin(self.prompt_id)
        self.inflight_requests = set()
        try:
            yield
        finally:
            assert not self.inflight_requests, f"requests still run: {self.inflight_requests}"
            self._in_do_generate_and_reward = False

    async def generate(self, req: RollDataProto, domain: str) -> RollDataProto:
        """Generate the responses of a request. The result has no batch; its meta information is the request's, with
        `output_token_ids`, `output_logprobs` and `finish_reasons` added. Waits while sampling is paused.
        """
        assert self._in_do_generate_and_reward, "a rollout loop must generate in do_generate_and_reward"
        assert self.inflight_requests is not None
        scheduler, meta = self._scheduler, req.meta_info
        request_id = meta["request_id"] = f"{scheduler.name}_{self.prompt_id}_{self._requests}"
        self._requests += 1
        count = meta["generation_config"]["num_return_sequences"]
        assert count == 1 or not meta.get("collect_unfinished", False), (
            "collect_unfinished is not supported in parallel sampling: set is_num_return_sequences_expand"
        )
        self.inflight_requests.add(request_id)
        try:
            with scheduler.durations[domain].of("generate"):
                await scheduler.resumed.wait()
                writing = [
                    scheduler.engine.generate(
                        req, 0, scope=scheduler.name, domain=domain, prompt_id=self.prompt_id, is_val=self.is_val
                    )
                    for _ in range(count)
                ]
                written = await asyncio.gather(*writing)
        finally:
            self.inflight_requests.remove(request_id)
        tokenizer = scheduler.engine.tokenizer
        answer = RollDataProto(meta_info=meta)
        meta["finish_reasons"] = [reason for _, reason in written]
        meta["output_token_ids"] = [tokens for tokens, _ in written]
        meta["output_logprobs"] = [[0.0] * len(tokens) for tokens, _ in written]
        meta["eos_token_id"] = [tokenizer.eos_token_id, tokenizer.pad_token_id]
        meta["pad_token_id"] = tokenizer.pad_token_id
        return answer

    async def compute_rewards(self, req: RollDataProto, domain: str) -> RollDataProto:
        """Set `rollout_id` of these responses, and get their rewards from the next worker of a domain, round robin.
        Raises the worker's errors.
        """
        assert self._in_do_generate_and_reward, "a rollout loop must ask for rewards in do_generate_and_reward"
        scheduler, record = self._scheduler, self._scheduler.record
        with scheduler.durations[domain].of("reward"):
            actor = next(scheduler.workers[domain])
            req.non_tensor_batch["rollout_id"] = objects(scheduler.next_name() for _ in range(len(req)))
            record.reward_calls += 1
            scheduler.rewards_pending += 1
            record.rewards_pending_max = max(record.rewards_pending_max, scheduler.rewards_pending)
            try:
                rewards: RollDataProto = await actor.call("compute_rewards", req)
            finally:
                scheduler.rewards_pending -= 1
        return rewards

    async def abort_running_requests(self) -> None:
        """Abort the generations of this prompt: their requests return with the reason `abort`."""
        assert self._in_do_generate_and_reward
        self._scheduler.engine.abort(self._scheduler.name, self.prompt_id)
