"""The rollout loop that ROLL runs for every prompt, and the helpers for custom loops.

The calls and their order are those of ROLL's `user_defined_rollout_loop.py` and `generate_scheduler.py`, so a loop that
works here works in ROLL.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .generation import positions
from .protocol import RollDataProto, torch


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
    answers = np.full((count, room), pad_token_id)
    whole = np.full((count, sequence_length), pad_token_id)
    mask = np.zeros((count, sequence_length), dtype=np.int64)
    response_mask = np.zeros_like(mask)
    for row, tokens in enumerate(responses):
        assert 0 < len(tokens) <= room, f"a response of {len(tokens)} tokens; there is room for {room}"
        question = asked[row][there[row] == 1]
        begin, end = len(question), len(question) + len(tokens)
        answers[row, : len(tokens)] = tokens
        whole[row, :end] = [*question, *tokens]
        mask[row, :end] = response_mask[row, begin:end] = 1
    columns = {
        "prompts": asked,
        "responses": answers,
        "input_ids": whole,
        "attention_mask": mask,
        "position_ids": positions(mask),
        "prompt_mask": (mask == 1) & (response_mask == 0),
        "response_mask": response_mask,
    }
    return {name: torch.tensor(values) for name, values in columns.items()}


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
