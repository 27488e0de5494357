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
    ROLLOUT_SAMPLE,
    group_of,
    keeps_a_token,
    mask,
    mask_but_one_token,
    record_of,
    reward_of,
    step_of_rollout,
)
from .scoring import settle
from .settings import adapter_of, end_rewards

GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""The estimators whose rewards slime normalises within groups."""

SCALED_ESTIMATORS = ("grpo", "gspo", "cispo")
"""The estimators whose rewards slime divides by the standard deviation with `--grpo-std-normalization`."""

EPSILON = 1e-6
"""slime adds this to the standard deviation."""

FLOAT32_MAX = 3.4028234663852886e38
"""Trainers compute in 32 bits, where larger numbers are infinite."""


def post_process(args: Any, samples: Sequence[ROLLOUT_SAMPLE]) -> tuple[list[Any], list[Any]]:
    """slime's `--custom-reward-post-process-path`: the raw and the normalised rewards of a batch, in order.

    A sample without a finite reward, also if another function scored it, gets `remove_sample = True`, the mean of its
    group's scored samples as raw reward, and a normalised reward of 0.0 if the estimator works on groups. REINFORCE++
    needs one of its tokens in the loss, whose advantage is zero. All returned numbers are finite. Judges on the
    trainer's GPUs sleep when it returns, because training comes next.
    """
    end_rewards()
    settle(args, samples)
    rewards = [reward_of(args, sample) for sample in samples]
    means = group_means(rewards, [group_of(sample) for sample in samples])
    raw = [mean if reward is None else reward for reward, mean in zip(rewards, means, strict=True)]
    for sample, reward in zip(samples, rewards, strict=True):
        if reward is None:
            mask(args, sample)
    if rewards.count(None) == len(rewards) and getattr(args, "normalize_advantages", False):
        # slime whitens advantages over all tokens in the loss, and ends the run where there is none
        # (slime/utils/distributed_utils.py). Over one token they are zero.
        mask_but_one_token(max(samples, key=lambda sample: getattr(sample, "response_length", 0)))
    estimator = getattr(args, "advantage_estimator", None)
    is_normalized = estimator in GROUP_ESTIMATORS and getattr(args, "rewards_normalization", True)
    if is_normalized:
        size = getattr(args, "n_samples_per_prompt", 1)
        # If rollouts became several samples, slime treats the whole batch as one group, and so does this hook.
        size = size if len(raw) == size * getattr(args, "rollout_batch_size", 0) else len(raw)
        scale = estimator in SCALED_ESTIMATORS and getattr(args, "grpo_std_normalization", True)
        trained = _normalized(rewards, size=size, scale=scale)
    elif keeps_a_token(args):
        neutral = _mean_return(args, samples, rewards)
        trained = [neutral if reward is None else reward for reward in rewards]
    else:
        trained = list(raw)
    known = [
        Trained(
            str(sample.index),
            None if group_of(sample) is None else str(group_of(sample)),
            step_of_rollout(),
            raw[place],
            trained[place] if is_normalized else None,
            rewards[place] is None,
        )
        for place, sample in enumerate(samples)
        # Others were scored by another function.
        if record_of(sample) and getattr(sample, "index", None) is not None
    ]
    if known and (log := adapter_of(args).training):
        log.add(known)
    return raw, trained


def _normalized(rewards: Sequence[float | None], *, size: int, scale: bool) -> list[float]:
    """Rewards minus the mean of their group's scored samples, divided by their deviation if `scale`. A failed sample
    gets 0.0, and so does a group's only scored one.
    """
    given = np.array(rewards, dtype=np.float64).reshape(-1, size)
    present = ~np.isnan(given)
    count = present.sum(axis=1, keepdims=True)
    mean = np.where(present, given, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centered = np.where(present & (count > 1), given - mean, 0.0)
    if scale:
        variance = np.square(centered).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)
        centered /= np.sqrt(variance) + EPSILON
    return [float(number) for number in np.clip(centered, -FLOAT32_MAX, FLOAT32_MAX).ravel()]


def _mean_return(args: Any, samples: Sequence[ROLLOUT_SAMPLE], rewards: Sequence[float | None]) -> float:
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
            total += reward * float(np.power(gamma, places[-1] - places).sum())
            tokens += len(places)
    return total / tokens if tokens else 0.0
