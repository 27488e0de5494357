"""What slime makes of scored samples: normalised rewards, loss masks, the batch, advantages, and what hooks log.

The advantages assume a model that is worth nothing: the KL penalty is zero, and with ppo the critic's values, too. Then
every token has the reward that trains.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..fake_trainer import load
from .samples import SlimeSample

_GROUP_NORMALISED = ("grpo", "gspo", "cispo")


def post_process_rewards(args: Namespace, samples: Sequence[SlimeSample]) -> tuple[list[Any], list[Any]]:
    """slime's own `(raw_rewards, rewards)`, which a `--custom-reward-post-process-path` replaces.

    With all estimators but ppo the mean of its group is subtracted from a reward, and the result divided by the group's
    standard deviation. A group is `n_samples_per_prompt` consecutive
    samples if the batch has exactly as many samples as the flags say, else the whole batch. So one sample more or less
    (fan-out) changes the baseline of all.

    Raises `TypeError` for a reward that is None, or a dict without `reward_key`. NaN makes its group NaN.
    """
    raw = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator not in _GROUP_NORMALISED or not args.rewards_normalization:
        return raw, raw
    for reward in raw:
        if not isinstance(reward, (bool, int, float, np.number)):
            raise TypeError(f"must be real number, not {type(reward).__name__}")
    whole = len(raw) == args.n_samples_per_prompt * args.rollout_batch_size
    size = args.n_samples_per_prompt if whole else len(raw)
    with np.errstate(all="ignore"):
        rewards = np.array(raw, dtype=np.float32).reshape(-1, size)
        rewards = rewards - rewards.mean(axis=1, keepdims=True)
        if args.grpo_std_normalization:
            squares = np.square(rewards, dtype=np.float64).sum(axis=1, keepdims=True)
            rewards = rewards / (np.sqrt(squares / (size - 1)) + 1e-6)
    return raw, [float(reward) for reward in rewards.ravel()]


def convert_samples(
    samples: Sequence[SlimeSample], raw_rewards: Sequence[Any], rewards: Sequence[Any]
) -> dict[str, Any]:
    """The batch for slime's trainer; tensors are lists.

    It sets `loss_mask` of every sample, to zeros with `remove_sample`. Raises `AssertionError` for a wrong number of
    rewards or a wrong length of a mask.
    """
    assert len(raw_rewards) == len(samples), f"{len(raw_rewards)} raw rewards for {len(samples)} samples"
    assert len(rewards) == len(samples), f"{len(rewards)} rewards for {len(samples)} samples"
    for sample in samples:
        length = sample.response_length
        sample.loss_mask = [1] * length if sample.loss_mask is None else sample.loss_mask
        assert len(sample.loss_mask) == length, f"loss mask length {len(sample.loss_mask)} != response length {length}"
        if sample.remove_sample:
            sample.loss_mask = [0] * length
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "truncated": [int(sample.status is SlimeSample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
    }


def advantages_of(rewards: Sequence[Any], loss_masks: Sequence[Sequence[int]]) -> list[float | None]:
    """What each trained token of a sample gets; None if no token is trained. Raises `TypeError` for a reward that is no
    number, as slime's trainer does.
    """
    numbers = [float(reward) for reward in rewards]
    return [number if any(mask) else None for number, mask in zip(numbers, loss_masks, strict=True)]


def log_rollout(
    args: Namespace,
    rollout_id: int,
    samples: list[SlimeSample],
    extra_metrics: dict[str, Any] | None,
    rollout_time_s: float,
) -> dict[str, Any]:
    """The metrics of one rollout that hooks give; none if a custom log function returns True. A log function that
    returns False adds its numbers to `extra_metrics`.
    """
    path = args.custom_rollout_log_function_path
    if path is not None and load(path)(rollout_id, args, samples, extra_metrics, rollout_time_s):
        return {}
    return {**(extra_metrics or {}), "rollout/step": rollout_id}


def log_evaluation(
    args: Namespace, rollout_id: int, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None
) -> dict[str, Any]:
    """The mean rewards of one evaluation, and the metrics that hooks give; none if a custom log function returns True.

    The log function is called first, so the means are of `data` as it leaves them. Raises `ZeroDivisionError` for a
    data set without rewards.
    """
    path = args.custom_eval_rollout_log_function_path
    if path is not None and load(path)(rollout_id, args, data, extra_metrics):
        return {}
    means = {f"eval/{name}": sum(told["rewards"]) / len(told["rewards"]) for name, told in data.items()}
    return {**(extra_metrics or {}), **means, "eval/step": rollout_id}
