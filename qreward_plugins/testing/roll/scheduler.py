"""The scheduler of ROLL's rollouts, the rollout loop that it runs for every prompt, and the helpers for custom loops.

The calls and their order are those of ROLL's `generate_scheduler.py` and `user_defined_rollout_loop.py`, so a loop that
works here works in ROLL. In the streaming path a rollout loop plays every prompt in its own task, and the first
exception ends the training. In the batch path there is no loop.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...system.threads import cancel_futures
from ..data_proto import RollDataProto, objects, padded
from .generation import RollEngine, collate, positions, torch
from .workers import RollActor


def expand_requests(
    data: RollDataProto, num_return_sequences: int, is_num_return_sequences_expand: bool
) -> list[RollDataProto]:
    """The requests of a prompt: one for each response, or one for all of them."""
    count = num_return_sequences if is_num_return_sequences_expand else 1
    data.meta_info["generation_config"]["num_return_sequences"] = num_return_sequences // count
    return [copy.deepcopy(data) for _ in range(count)]


def expand_responses(response: Any) -> list[RollDataProto]:
    """The single responses in a loop's result, which may be nested lists and batches of any size."""
    if isinstance(response, list):
        return [single for part in response for single in expand_responses(part)]
    assert hasattr(response, "batch"), f"a rollout loop returned a {type(response).__name__}"
    return [response] if len(response) <= 1 else [response[row] for row in range(len(response))]


def query_filter(data_list: Sequence[RollDataProto], config: Any) -> bool:
    """Whether a group is kept, by `rewards.<domain>.query_filter_config`. A group with a NaN is kept, and so is a group
    in one batch.
    """
    if len(data_list) == 1:
        return True
    numbers = np.concatenate([np.asarray(data.batch["response_level_rewards"]) for data in data_list])
    settings = config.rewards[data_list[0].non_tensor_batch["domain"][0]].query_filter_config
    if settings.type == "mean_filter":
        low = settings.filter_args.get("threshold_down", -1)
        high = settings.filter_args.get("threshold_up", math.inf)
        return not bool(numbers.mean() <= low or numbers.mean() >= high)
    if settings.type == "std_filter":
        return not bool(numbers.std(ddof=1) <= settings.filter_args.get("std_threshold", -1))
    return True


def postprocess_output_data(request: RollDataProto, data: RollDataProto, sequence_length: int) -> RollDataProto:
    """A request and the engine's result as a batch of responses, padded to `sequence_length`."""
    tokens, pad = data.meta_info["output_token_ids"], data.meta_info["pad_token_id"]
    batch = response_batch(request, tokens, sequence_length=sequence_length, pad_token_id=pad)
    responses = request.repeat(repeat_times=len(tokens))
    return RollDataProto.from_dict(batch, responses.non_tensor_batch, responses.meta_info)


def response_batch(
    prompts: RollDataProto, responses: Sequence[Sequence[int]], *, sequence_length: int, pad_token_id: int
) -> dict[str, Any]:
    """ROLL's tensors of responses, grouped by prompt, equally many for each.

    `prompts` (B, P) is padded on the left, `responses` (B, R) on the right. `input_ids`, the masks and `position_ids`
    cover both, without the padding between them: (B, `sequence_length`), padded on the right.
    """
    count, asked, there = len(responses), *(np.asarray(prompts.batch[name]) for name in ("input_ids", "attention_mask"))
    asked, there = (np.repeat(column, count // len(prompts), axis=0) for column in (asked, there))
    room = sequence_length - asked.shape[1]
    for tokens in responses:
        assert 0 < len(tokens) <= room, f"a response of {len(tokens)} tokens; there is room for {room}"
    questions = [row[mask == 1] for row, mask in zip(asked, there, strict=True)]
    pairs = list(zip(questions, responses, strict=True))
    mask = padded([[1] * (len(question) + len(tokens)) for question, tokens in pairs], width=sequence_length)
    response_mask = padded(
        [[0] * len(question) + [1] * len(tokens) for question, tokens in pairs], width=sequence_length
    )
    whole = padded([[*question, *tokens] for question, tokens in pairs], width=sequence_length, fill=pad_token_id)
    columns = {
        "prompts": asked,
        "responses": padded(responses, width=room, fill=pad_token_id),
        "input_ids": whole,
        "attention_mask": mask,
        "position_ids": positions(mask),
        "prompt_mask": (mask == 1) & (response_mask == 0),
        "response_mask": response_mask,
    }
    return {name: torch.tensor(np.asarray(values)) for name, values in columns.items()}


class UserDefinedRolloutLoop:
    """ROLL's own loop, and the base of others: `process_new_prompt` returns the responses of a prompt, or None to
    replace the prompt. An exception, except `CancelledError`, ends the training.
    """

    async def process_new_prompt(self, context: Any) -> Any:
        count = context.meta_info["generation_config"]["num_return_sequences"]
        data, domain = context.get_request_data(meta_info=context.meta_info)
        requests = expand_requests(data, count, context.is_num_return_sequences_expand)
        async with context.do_generate_and_reward(max_concurrency=count):
            groups = await asyncio.gather(
                *(self._generate_and_reward(context=context, req=request, domain=domain) for request in requests)
            )
        if any(group is None for group in groups):
            return None
        responses = [response for group in groups for response in group]
        return responses if context.is_val or query_filter(responses, context.pipeline_config) else None

    async def _generate_and_reward(self, context: Any, req: RollDataProto, domain: str) -> Any:
        data = await context.generate(req=req, domain=domain)
        req = postprocess_output_data(req, data, context.sequence_length)
        rewards = await context.compute_rewards(req=req, domain=domain)
        req.meta_info.pop("metrics", None)
        req.union(rewards)
        assert len(req) == req.meta_info["generation_config"]["num_return_sequences"]
        return [req[[row]] for row in range(len(req))]


@dataclass(frozen=True)
class RollPrompt:
    """A prompt that is in no batch. `id` is the id of its row; None if its loop never asked for a row."""

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
        self.row_id: Any = None
        self._asked = self._inside = False

    def get_request_data(self, meta_info: dict[str, Any]) -> tuple[RollDataProto, str]:
        """The next row of the data set and its domain. Call it once, before `do_generate_and_reward`."""
        if self._asked:
            raise RuntimeError("get_request_data may be called once; return None to start another prompt")
        self._asked = True
        request = self._scheduler.next_rows(1, meta_info)
        self.row_id = request.non_tensor_batch["id"][0]
        return request, str(request.non_tensor_batch["domain"][0])

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
        """Set `rollout_id` of these responses, and get their rewards from the next worker, round robin. Raises the
        worker's errors.
        """
        assert self._inside, "a rollout loop must ask for rewards in do_generate_and_reward"
        req.non_tensor_batch["rollout_id"] = objects(itertools.islice(self._scheduler.names, len(req)))
        return await self._scheduler.ask(req)


class RollScheduler:
    """Samples from `rows`, on one event loop, and asks `actors` for rewards.

    `reward_calls` and `dropped` are the calls of workers and the prompts without a result since the last batch.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        engine: RollEngine,
        actors: Sequence[RollActor],
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
        self.reward_calls = 0
        self._rows = rows
        self._workers = len(actors)
        self._next_actor = itertools.cycle(actors)
        self._ending = False
        self._loop = loop
        self._prompts, self._batches = itertools.count(), itertools.count()
        self.names = (f"{name}/{number}" for number in itertools.count())
        """The ids of rollouts, which are UUIDs in ROLL."""

    def next_rows(self, count: int, meta_info: dict[str, Any]) -> RollDataProto:
        """The next rows, collated."""
        pad, length = self.engine.tokenizer.pad_token_id, self.pipeline_config.prompt_length
        return collate(list(itertools.islice(self._rows, count)), meta_info, pad_token_id=pad, length=length)

    async def ask(self, data: RollDataProto) -> RollDataProto:
        """The rewards that the next worker gives."""
        self.reward_calls += 1
        rewards: RollDataProto = await next(self._next_actor).call("compute_rewards", data)
        return rewards

    async def get_batch(self, meta_info: dict[str, Any], prompts: int) -> RollDataProto:
        """A batch of `prompts` groups. Raises the errors of workers and rollout loops."""
        self.dropped, self.reward_calls = [], 0
        if self.pipeline_config.generate_opt_level == 0:
            return await self._whole_batch(meta_info, prompts)
        self.meta_info = copy.deepcopy(meta_info)
        done: list[RollDataProto] = []
        self._ending = False
        playing = [asyncio.ensure_future(self._play(done)) for _ in range(prompts)]
        try:
            # Not gather: cancelling that waits for its tasks, and these go on where a worker cancelled a call.
            finished, _ = await asyncio.wait(playing, return_when=asyncio.FIRST_EXCEPTION)
            for task in finished:
                task.result()
        finally:
            self._ending = True
            await cancel_futures(playing)
        return RollDataProto.concat(done)

    async def _play(self, done: list[RollDataProto]) -> None:
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
            self.dropped.append(RollPrompt(context.prompt_id, context.row_id))
            await asyncio.sleep(0)
        singles = expand_responses(responses)
        wanted = self.meta_info["generation_config"]["num_return_sequences"]
        assert len(singles) == wanted, f"a rollout loop returned {len(singles)} responses, not {wanted}"
        done.extend(singles)

    async def _whole_batch(self, meta_info: dict[str, Any], prompts: int) -> RollDataProto:
        count = meta_info["generation_config"]["num_return_sequences"]
        asked = self.next_rows(prompts, meta_info)
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
        # Each worker gets a part of the rows (reward_scheduler.py).
        parts = [rows for rows in np.array_split(np.arange(len(batch)), self._workers) if len(rows)]
        answered = await asyncio.gather(*(self.ask(batch.select_idxs(rows)) for rows in parts))
        rewards = RollDataProto.concat(answered)
        rewards.meta_info.pop("metrics", None)
        return batch.union(rewards)
