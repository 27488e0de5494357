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

import torch

from .protocol import RollDataProto

_TRIES = 5


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
    rewards = [data.batch["response_level_rewards"] for data in data_list]
    if len(rewards) == 1:
        return True
    numbers = torch.cat(rewards)
    settings = config.rewards[data_list[0].non_tensor_batch["domain"][0]].query_filter_config
    if settings.type == "mean_filter":
        low = settings.filter_args.get("threshold_down", -1)
        high = settings.filter_args.get("threshold_up", math.inf)
        return not bool(numbers.mean() <= low or numbers.mean() >= high)
    if settings.type == "std_filter":
        return not bool(numbers.std() <= settings.filter_args.get("std_threshold", -1))
    return True


def response_filter(data_item: RollDataProto, config: Any) -> bool:
    """ROLL keeps every response."""
    return True


def is_report_data_finished(data: RollDataProto) -> bool:
    """Whether no generation of this result was aborted."""
    return "abort" not in data.meta_info.get("finish_reasons", [])


def postprocess_output_data(request: RollDataProto, data: RollDataProto, sequence_length: int) -> RollDataProto:
    """A request and the engine's result as a batch of responses, padded to `sequence_length`."""
    for name in ("input_ids", "attention_mask"):
        request.batch[name] = request.batch.pop(f"init_{name}", request.batch[name])
    earlier = request.meta_info.pop("pre_output_token_ids", None)
    tokens = _continued(earlier, data.meta_info["output_token_ids"])
    log_probs = data.meta_info.get("output_logprobs")
    if log_probs is not None:
        log_probs = _continued(request.meta_info.get("pre_output_logprobs"), log_probs)
    responses = request.repeat(repeat_times=len(tokens))
    batch = response_batch(
        request,
        tokens,
        log_probs,
        sequence_length=sequence_length,
        pad_token_id=data.meta_info["pad_token_id"],
    )
    columns = dict(responses.non_tensor_batch.items())
    return RollDataProto.from_dict(batch, columns, responses.meta_info)


def _continued(earlier: list[list[Any]] | None, later: list[list[Any]]) -> list[list[Any]]:
    return later if earlier is None else [[*begun, *rest] for begun, rest in zip(earlier, later, strict=True)]


def postprocess_paused_data(
    pre_data: RollDataProto, data: RollDataProto, sequence_length: int, prompt_length: int
) -> RollDataProto:
    """The request that continues an aborted generation."""
    if data.meta_info.get("output_token_ids") is None:
        return pre_data
    assert len(data.meta_info["output_token_ids"]) == 1, "partial rollouts need is_num_return_sequences_expand"
    meta = {**pre_data.meta_info, **data.meta_info}
    for kind in ("output_token_ids", "output_logprobs"):
        meta[f"pre_{kind}"] = _continued(pre_data.meta_info.get(f"pre_{kind}"), meta.pop(kind))
    prompt = pre_data.batch.get("init_input_ids", pre_data.batch["input_ids"])
    there = pre_data.batch.get("init_attention_mask", pre_data.batch["attention_mask"])
    begun = torch.tensor(meta["pre_output_token_ids"])
    tensors = {
        **dict(pre_data.batch.items()),
        "init_input_ids": prompt,
        "init_attention_mask": there,
        "input_ids": torch.cat([prompt, begun], dim=1),
        "attention_mask": torch.cat([there, torch.ones_like(begun)], dim=1),
    }
    meta["max_new_tokens"] = sequence_length - tensors["input_ids"].shape[1]
    if meta["max_new_tokens"] <= 0:
        raise ValueError(f"max_new_tokens {meta['max_new_tokens']} <= 0")
    assert prompt.shape[1] == prompt_length, f"a prompt has {prompt.shape[1]} tokens, not {prompt_length}"
    return RollDataProto.from_dict(tensors, dict(pre_data.non_tensor_batch.items()), meta)


def response_batch(
    prompts: RollDataProto,
    responses: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]] | None,
    *,
    sequence_length: int,
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    """ROLL's tensors of responses, grouped by prompt, equally many for each.

    `prompts` (B, P) is padded on the left, `responses` (B, R) on the right. `input_ids`, the masks and `position_ids`
    cover both, without the padding between them: (B, `sequence_length`), padded on the right.
    """
    width = prompts.batch["input_ids"].shape[1]
    each = len(responses) // len(prompts)
    asked = prompts.batch["input_ids"].repeat_interleave(each, dim=0)
    there = prompts.batch["attention_mask"].repeat_interleave(each, dim=0)
    count, room = len(responses), sequence_length - width
    answers = torch.full((count, room), pad_token_id)
    whole = torch.full((count, sequence_length), pad_token_id)
    mask = torch.zeros((count, sequence_length), dtype=torch.long)
    response_mask = torch.zeros_like(mask)
    probabilities = torch.zeros((count, sequence_length - 1))
    for row, tokens in enumerate(responses):
        assert 0 < len(tokens) <= room, f"a response of {len(tokens)} tokens; there is room for {room}"
        answers[row, : len(tokens)] = torch.tensor(tokens)
        question = asked[row][there[row].bool()]
        end = len(question) + len(tokens)
        whole[row, :end] = torch.cat([question, answers[row, : len(tokens)]])
        mask[row, :end] = 1
        response_mask[row, len(question) : end] = 1
        if log_probs is not None:
            probabilities[row, len(question) - 1 : end - 1] = torch.tensor(log_probs[row][: len(tokens)])
    batch = {
        "prompts": asked,
        "responses": answers,
        "input_ids": whole,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "prompt_mask": (mask == 1) & (response_mask == 0),
        "response_mask": response_mask,
    }
    return batch if log_probs is None else {**batch, "infer_logprobs": probabilities}


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
        return await self._generate_and_reward_impl(context=context, req=req, domain=domain)

    async def _generate_and_reward_impl(self, context: Any, req: RollDataProto, domain: str) -> Any:
        kept: list[RollDataProto] = []
        for _ in range(_TRIES):
            again = copy.deepcopy(req)
            unfinished_goes_on = req.meta_info.get("collect_unfinished", False)
            while True:
                data = await context.generate(req=req, domain=domain)
                if data is None:
                    return None
                if is_report_data_finished(data):
                    req = postprocess_output_data(req, data, context.sequence_length)
                    break
                if not unfinished_goes_on:
                    return None
                req = postprocess_paused_data(req, data, context.sequence_length, context.prompt_length)
            rewards = await context.compute_rewards(req=req, domain=domain)
            metrics = req.meta_info.pop("metrics", {})
            req.union(rewards)
            req.meta_info["metrics"] = {**metrics, **req.meta_info.pop("metrics", {})}
            assert len(req) == req.meta_info["generation_config"]["num_return_sequences"]
            singles = [req[[row]] for row in range(len(req))]
            fine = [single for single in singles if context.is_val or response_filter(single, context.pipeline_config)]
            kept += fine
            if len(fine) == len(singles):
                break
            again.meta_info["generation_config"]["num_return_sequences"] = len(singles) - len(fine)
            req = again
        return kept
