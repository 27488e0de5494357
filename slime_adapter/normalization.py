"""slime's reward normalisation over the scored samples only.

Without a hook slime normalises in `_post_process_rewards` (slime/ray/rollout.py), where the reward of a failed sample
counts: `remove_sample` zeroes only its loss mask, and later. This hook computes the same numbers over the scored
samples, in 64 bits, because sums and deviations of large rewards overflow in slime's 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qreward_plugins import group_means
from qreward_plugins.adapters import Trained

from .samples import (
    FLOAT32_MAX,
    ROLLOUT_SAMPLE,
    finite,
    group_of,
    has_reward,
    keeps_a_token,
    mask,
    mask_but_one_token,
    record_of,
    step_of_rollout,
    value_of,
)
from .scoring import settle
from .settings import adapter_of, end_rewards

GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""The estimators whose rewards slime normalises within groups."""

SCALED_ESTIMATORS = ("grpo", "gspo", "cispo")
"""The estimators whose rewards slime divides by the standard deviation with `--grpo-std-normalization`."""

EPSILON = 1e-6
"""slime adds this to the standard deviation."""


def post_process(args: Any, samples: Sequence[ROLLOUT_SAMPLE]) -> tuple[list[Any], list[Any]]:
    """slime's `--custom-reward-post-process-path`: the raw and the normalised rewards of a batch, in order.

    A sample without a finite reward, also if another function scored it, gets `remove_sample = True`, the mean of its
    group's scored samples as raw reward, and a normalised reward of 0.0 if the estimator works on groups. REINFORCE++
    needs one of its tokens in the loss, whose advantage is zero. All returned numbers are finite. Judges on the
    trainer's GPUs sleep when it returns, because training comes next.
    """
    end_rewards()
    settle(args, samples)
    raw, normalized = _post_processed(args, samples)
    if trained := _trained(args, samples, raw, normalized):
        adapter_of(args).record(trained)
    return raw, normalized


def _trained(
    args: Any, samples: Sequence[ROLLOUT_SAMPLE], raw: Sequence[Any], normalized: Sequence[Any]
) -> list[Trained]:
    """What becomes of the samples that this adapter has scored."""
    return [
        Trained(
            str(sample.index),
            None if group_of(sample) is None else str(group_of(sample)),
            step_of_rollout(),
            float(reward),
            float(advantage) if _is_normalized(args) else None,
            not has_reward(args, sample),
        )
        for sample, reward, advantage in zip(samples, raw, normalized, strict=True)
        if record_of(sample) and getattr(sample, "index", None) is not None
    ]


def _is_normalized(args: Any) -> bool:
    """Whether slime trains on the normalised rewards as advantages."""
    estimator = getattr(args, "advantage_estimator", None)
    return estimator in GROUP_ESTIMATORS and getattr(args, "rewards_normalization", True)


def _post_processed(args: Any, samples: Sequence[ROLLOUT_SAMPLE]) -> tuple[list[Any], list[Any]]:
    scored = [has_reward(args, sample) for sample in samples]
    for sample, has in zip(samples, scored, strict=True):
        if not has:
            mask(args, sample)
    if not any(scored) and getattr(args, "normalize_advantages", False):
        # slime whitens advantages over all tokens in the loss, and ends the run where there is none
        # (slime/utils/distributed_utils.py). Over one token they are zero.
        mask_but_one_token(max(samples, key=lambda sample: getattr(sample, "response_length", 0)))
    means = group_means(
        [finite(value_of(args, sample)) if has else None for sample, has in zip(samples, scored, strict=True)],
        [group_of(sample) for sample in samples],
    )
    raw = [value_of(args, sample) if has else mean for sample, has, mean in zip(samples, scored, means, strict=True)]
    if keeps_a_token(args):
        neutral = _mean_return(
            args, samples, [reward if has else None for reward, has in zip(raw, scored, strict=True)]
        )
        return raw, [reward if has else neutral for reward, has in zip(raw, scored, strict=True)]
    if not _is_normalized(args):
        return raw, list(raw)
    size = getattr(args, "n_samples_per_prompt", 1)
    # If rollouts became several samples, slime treats the whole batch as one group, and so does this hook.
    size = size if len(raw) == size * getattr(args, "rollout_batch_size", 0) else len(raw)
    scale = args.advantage_estimator in SCALED_ESTIMATORS and getattr(args, "grpo_std_normalization", True)
    return raw, _normalized(raw, scored, size=size, scale=scale)


def _normalized(raw: Sequence[float], scored: Sequence[bool], *, size: int, scale: bool) -> list[float]:
    """Rewards minus the mean of their group's scored samples, divided by their deviation if `scale`. A failed sample
    gets 0.0, and so does a group's only scored one.
    """
    rewards = np.array(raw, dtype=np.float64).reshape(-1, size)
    present = np.array(scored, dtype=bool).reshape(-1, size)
    count = present.sum(axis=1, keepdims=True)
    mean = np.where(present, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centered = np.where(present & (count > 1), rewards - mean, 0.0)
    if scale:
        variance = np.square(centered).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
        centered /= np.sqrt(variance) + EPSILON
    return [float(number) for number in np.clip(centered, -FLOAT32_MAX, FLOAT32_MAX).ravel()]


def _mean_return(args: Any, samples: Sequence[ROLLOUT_SAMPLE], rewards: Sequence[Any]) -> float:
    """The mean return of all tokens in the loss, without KL penalties, which are not known yet; 0.0 without any.

    REINFORCE++ subtracts it from every return (slime/utils/ppo_utils.py: `get_reinforce_plus_plus_returns`, and the
    whitening that slime requires with it). So a token with this return has an advantage of zero.
    """
    gamma, total, tokens = float(getattr(args, "gamma", 1.0)), 0.0, 0
    for sample, reward in zip(samples, rewards, strict=True):
        if reward is None or getattr(sample, "remove_sample", False):
            continue
        mask = getattr(sample, "loss_mask", None)
        places = np.flatnonzero(np.ones(getattr(sample, "response_length", 0)) if mask is None else mask)
        if len(places):
            total += float(reward) * float(np.power(gamma, places[-1] - places).sum())
            tokens += len(places)
    return total / tokens if tokens else 0.0
