"""What slime and its fake share: the flags of a scenario, what tests look at of a sample, and what a user brings along,
a custom generate function that makes several training samples of one answer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..judges import GROUP_SIZE, Draft, encode, label_of, prompt_of, read_response
from ..played import PlayedSample
from ..scenarios import Scenario
from .scenarios import EVAL_DRAFTS, PARTS


def flags_of(scenario: Scenario) -> dict[str, Any]:
    """The flags of a scenario by their attribute; None and False are not set."""
    group = scenario.mode == "group"
    return {
        "rollout_batch_size": scenario.prompts,
        "n_samples_per_prompt": GROUP_SIZE,
        "over_sampling_batch_size": max(scenario.oversampling, scenario.prompts),
        "advantage_estimator": scenario.advantage_estimator,
        "partial_rollout": scenario.partial,
        "reward_key": scenario.reward_key,
        "group_rm": group,
        "eval_function_path": "slime_adapter.eval_rollout" if group else None,
        "n_samples_per_eval_prompt": EVAL_DRAFTS if scenario.evaluate else 1,
        "custom_rollout_log_function_path": "slime_adapter.log_rollout",
        "custom_eval_rollout_log_function_path": "slime_adapter.log_eval",
        "custom_reward_post_process_path": "slime_adapter.post_process" if scenario.hook else None,
        "dynamic_sampling_filter_path": "slime_adapter.drop_failed_groups" if scenario.drop_failed_groups else None,
    }


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": prompt_of(item), "label": label_of(item), "metadata": {"item": item}} for item in range(count)]


def describe(sample: Any) -> dict[str, Any]:
    """What a test looks at."""
    return {
        "group": sample.group_index,
        "response": sample.response,
        "reward": sample.reward,
        "removed": sample.remove_sample,
        "status": sample.status.value,
        "record": (sample.metadata or {}).get("qreward"),
    }


def played_sample(sample: Mapping[str, Any], numbers: tuple[Any, ...] = (None, None, (), ())) -> PlayedSample:
    """A sample as `describe` tells it, and what trains: raw and normalised reward, advantages, mask."""
    raw, trained, advantages, mask = numbers
    record = sample["record"] or {"failed": True, "cause": "no record"}
    return PlayedSample(
        read_response(sample["response"]) if sample["response"] else Draft(-1, -1),
        sample["reward"],
        raw,
        trained,
        tuple(advantages),
        tuple(mask),
        bool(record["failed"] or record.get("excluded", False)),
        record["cause"],
        sample["group"],
        sample["removed"],
        sample["status"],
    )


async def fan_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """slime's own generation, and what becomes of its answer."""
    from slime.rollout.sglang_rollout import generate

    return parts_of(args, await generate(args, sample, sampling_params))


def parts_of(args: Any, answered: Any) -> list[Any]:
    """An answer, and it again with each further part appended; one rollout id for all."""
    answered.rollout_id = answered.index
    samples = [answered]
    if answered.status.value != "completed":
        return samples
    for part in range(1, PARTS):
        sibling = copy.deepcopy(answered)
        tokens = encode(f"part {part}")
        sibling.append_response_tokens(args, tokens=tokens, log_probs=[-0.5] * len(tokens), text=f" part {part}")
        samples.append(sibling)
    return samples
