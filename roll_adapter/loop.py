"""`QRewardRolloutLoop`: ROLL's rollout loop, which masks failed samples and replaces groups with too few rewards.

A reward worker cannot change the mask of a sample, and in the streaming path it gets the samples of a group one by one.
The loop sees the whole group with all of its rewards. It gives failed samples the mean of the scored ones, so that they
move nothing, and zeroes their response mask, which keeps them out of the loss. Then ROLL's own filter sees the group.
If the loop returns None, ROLL takes another prompt, without limit; so a `GroupGate` counts dropped groups.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from roll.distributed.scheduler.generate_scheduler import expand_requests
from roll.distributed.scheduler.user_defined_rollout_loop import UserDefinedRolloutLoop, query_filter

from qreward_plugins import GroupGate
from qreward_plugins.adapters import Groups, flat_rate, mean_of

from .rewards import DETAIL, FAILED, GROUPS

_REWARDS = ("response_level_rewards", "scores")


class QRewardRolloutLoop(UserDefinedRolloutLoop):  # type: ignore[misc]
    """ROLL's `user_defined_rollout_loop_cls`. It works with every reward worker: a reward of NaN or infinity from
    another one is a failed sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gates: dict[str, GroupGate] = {}

    async def process_new_prompt(self, context: Any) -> Any:
        """Generate and score one prompt, as ROLL's own loop does (scheduler/user_defined_rollout_loop.py).

        Returns the responses, or None to have ROLL take another prompt. In validation nothing is dropped, and a failed
        sample gets the tag `<tag>/qreward_failed`, so that `val_correct/<tag>/mean` covers only scored samples. Raises
        `JudgeUnavailable` after `groups.give_up_after` dropped groups in a row, which ends the training.
        """
        recording = _RecordingContext(context)
        count = context.meta_info["generation_config"]["num_return_sequences"]
        data, domain = context.get_request_data(meta_info=context.meta_info)
        requests = expand_requests(
            data=data,
            num_return_sequences=count,
            is_num_return_sequences_expand=context.is_num_return_sequences_expand,
        )
        async with context.do_generate_and_reward(max_concurrency=count):
            groups = await asyncio.gather(
                *[self._generate_and_reward(context=recording, req=request, domain=domain) for request in requests]
            )
            if any(group is None for group in groups):
                return None
            responses = [response for group in groups for response in group]
        causes = [recording.cause_of(response) for response in responses]
        if context.is_val:
            _leave_out(responses, causes)
            return responses
        failed = [cause for cause in causes if cause]
        gate = self._gates.setdefault(domain, GroupGate(recording.groups))
        if not gate.admit(len(responses), failed, detail=recording.detail):
            return None
        if recording.ours:
            _note_flatness(responses, causes)
        _make_neutral(responses, causes)
        return responses if query_filter(responses, context.pipeline_config) else None


class _RecordingContext:
    """Wraps ROLL's `RolloutContext` of a prompt and records the causes of failed samples, by rollout id."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._causes: dict[str, str] = {}
        self.detail = ""
        """The detail of one failure, from its reward worker."""
        self.groups = Groups()
        """The domain's `groups`, from its reward workers."""
        self.ours = False
        """Whether the domain's rewards come from our reward workers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def compute_rewards(self, req: Any, domain: str) -> Any:
        rewards = await self._context.compute_rewards(req, domain)
        if (groups := rewards.meta_info.pop(GROUPS, None)) is not None:
            self.groups = Groups(**groups)
        self.detail = rewards.meta_info.pop(DETAIL, "") or self.detail
        causes = rewards.meta_info.pop(FAILED, None)
        self.ours = causes is not None
        causes = causes or [""] * len(rewards)
        # The context has set the rollout ids of `req` for the call.
        self._causes.update(zip(map(str, req.non_tensor_batch["rollout_id"]), causes, strict=True))
        return rewards

    def cause_of(self, response: Any) -> str:
        """Why a response has no reward; empty if it has one."""
        cause = self._causes.get(str(response.non_tensor_batch["rollout_id"][0]), "")
        if not cause and not all(math.isfinite(_number(response, key)) for key in _REWARDS):
            return "not a finite reward"
        return cause


def _note_flatness(responses: Sequence[Any], causes: Sequence[str]) -> None:
    """Add to the metrics whether the scored responses of the prompt have equal rewards. Their mean over all is the
    share of groups without variance.
    """
    rewards = (None if cause else _number(each, _REWARDS[0]) for each, cause in zip(responses, causes, strict=True))
    flat = flat_rate(("", reward) for reward in rewards)
    if flat is not None:
        for response in responses:
            response.meta_info["metrics"] = {**response.meta_info.get("metrics", {}), "qreward/flat_rate": flat}


def _make_neutral(responses: Sequence[Any], causes: Sequence[str]) -> None:
    """Give failed responses the mean of the scored ones, and mask them out of the loss."""
    failed = [response for response, cause in zip(responses, causes, strict=True) if cause]
    scored = [response for response, cause in zip(responses, causes, strict=True) if not cause]
    for key in _REWARDS:
        mean = mean_of(_number(response, key) for response in scored)
        for response in failed:
            response.batch[key] = torch.full_like(response.batch[key], mean)
    for response in failed:
        response.batch["response_mask"] = torch.zeros_like(response.batch["response_mask"])


def _leave_out(responses: Sequence[Any], causes: Sequence[str]) -> None:
    """Take failed responses of a validation out of their tag's mean.

    ROLL counts the scores that equal 1, by tag and over all, and divides by a fixed number of responses over all
    (rlvr_pipeline.py, `val`). So there they count as wrong.
    """
    for response, cause in zip(responses, causes, strict=True):
        if not cause:
            continue
        for key in _REWARDS:
            response.batch[key] = torch.zeros_like(response.batch[key])
        tags = response.non_tensor_batch.get("tag")
        if tags is not None:
            response.non_tensor_batch["tag"] = np.array([f"{tag}/{FAILED}" for tag in tags], dtype=object)


def _number(response: Any, key: str) -> float:
    return float(response.batch[key].reshape(-1)[0])
