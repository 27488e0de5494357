"""What slime makes of scored samples: normalised rewards, loss masks, the trainer's batch, advantages, and metrics.

The advantages assume a model that is worth nothing: the KL penalty is zero, and with ppo the critic's values, too. Then
every token has the reward that trains, with reinforce_plus_plus up to the last trained token.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..fake_trainer import load
from .samples import SlimeSample

_GROUP_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_STD_NORMALISED = ("grpo", "gspo", "cispo")


def post_process_rewards(args: Namespace, samples: Sequence[SlimeSample]) -> tuple[list[Any], list[Any]]:
    """slime's own `(raw_rewards, rewards)`, which a `--custom-reward-post-process-path` replaces.

    With grpo, gspo, cispo and reinforce_plus_plus_baseline the mean of its group is subtracted from a reward; with the
    first three the result is divided by the group's standard deviation. A group is `n_samples_per_prompt` consecutive
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
        if args.advantage_estimator in _STD_NORMALISED and args.grpo_std_normalization:
            squares = np.square(rewards, dtype=np.float64).sum(axis=1, keepdims=True)
            rewards = rewards / (np.sqrt(squares / (size - 1)) + 1e-6)
    return raw, [float(reward) for reward in rewards.ravel()]


def check_rollout_ids(groups: Any) -> None:
    """Raise `AssertionError`, as slime does, if samples of one generation do not share a `rollout_id`: the loss would
    count the generation several times.
    """
    for group in groups:
        assert isinstance(group, list), f"a rollout returns lists of samples, not {type(group).__name__}"
        for made in group:
            if isinstance(made, list) and len(made) > 1:
                ids = {sample.rollout_id for sample in made}
                assert len(ids - {None}) == len(ids) == 1, f"set one rollout_id on all samples of a generation: {ids}"


def convert_samples(
    args: Namespace, samples: Sequence[SlimeSample], raw_rewards: Sequence[Any], rewards: Sequence[Any]
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


def token_advantages(args: Namespace, rewards: Sequence[Any], loss_masks: Sequence[Sequence[int]]) -> list[list[float]]:
    """One number for each token of each sample.

    Raises the errors of slime's trainer: `TypeError` for a reward that is no number; with reinforce_plus_plus
    `AssertionError` for a sample without a trained token, so that `remove_sample` ends the run there; with
    `normalize_advantages` `ValueError` if no token of the batch is trained.
    """
    advantages = []
    for index, (reward, mask) in enumerate(zip(rewards, loss_masks, strict=True)):
        tokens = np.full(len(mask), float(reward))
        if args.advantage_estimator == "reinforce_plus_plus":
            assert any(mask), f"Sequence at index {index} is fully masked: its group must be dropped"
            tokens[int(np.flatnonzero(mask)[-1]) + 1 :] = 0.0
        advantages.append(tokens)
    if args.normalize_advantages:
        # Over all trained tokens. As in slime, a NaN reaches the whole batch even if it is not trained.
        values, kept = np.concatenate(advantages), np.concatenate(loss_masks)
        if not (count := kept.sum()):
            raise ValueError("no token of the batch is trained: slime cannot normalise its advantages")
        mean = (values * kept).sum() / count
        variance = (np.square(values - mean) * kept).sum() / max(count - 1, 1)
        advantages = [(tokens - mean) / np.sqrt(variance + 1e-8) for tokens in advantages]
    return [[float(value) for value in tokens] for tokens in advantages]


def sample_advantages(tokens: Sequence[Sequence[float]], loss_masks: Sequence[Sequence[int]]) -> list[float | None]:
    """The mean over the trained tokens of each sample; None if none is trained."""
    return [
        float(np.mean([value for value, counts in zip(values, mask, strict=True) if counts])) if any(mask) else None
        for values, mask in zip(tokens, loss_masks, strict=True)
    ]


def log_rollout(
    args: Namespace,
    rollout_id: int,
    samples: list[SlimeSample],
    extra_metrics: dict[str, Any] | None,
    rollout_time_s: float,
) -> dict[str, Any]:
    """The metrics that slime logs for one rollout; none if a custom log function returns True. A log function that
    returns False adds its numbers to `extra_metrics`.
    """
    path = args.custom_rollout_log_function_path
    if path is not None and load(path)(rollout_id, args, samples, extra_metrics, rollout_time_s):
        return {}
    own = {f"rollout/{name}": value for name, value in sample_metrics(samples).items()}
    return {**(extra_metrics or {}), **own, "rollout/step": rollout_id}


def log_evaluation(
    args: Namespace, rollout_id: int, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None
) -> dict[str, Any]:
    """The metrics that slime logs for one evaluation; none if a custom log function returns True.

    The log function is called first, so the means are of `data` as it leaves them. Raises `ZeroDivisionError` for a
    data set without rewards.
    """
    path = args.custom_eval_rollout_log_function_path
    if path is not None and load(path)(rollout_id, args, data, extra_metrics):
        return {}
    logged = extra_metrics or {}
    for name, results in data.items():
        rewards = results["rewards"]
        logged[f"eval/{name}"] = sum(rewards) / len(rewards)
        found = sample_metrics(results["samples"]) if "samples" in results else {}
        logged |= {f"eval/{name}/{metric}": value for metric, value in found.items()}
    logged["eval/step"] = rollout_id
    return logged


def sample_metrics(samples: Sequence[SlimeSample]) -> dict[str, float]:
    """Lengths and truncation."""
    return {
        "response_len/mean": statistics.fmean(sample.effective_response_length for sample in samples),
        "truncated_ratio": statistics.fmean(sample.status is SlimeSample.Status.TRUNCATED for sample in samples),
    }
