"""slime's reward normalisation over the scored samples only.

Without a hook slime normalises in `_post_process_rewards` (slime/ray/rollout.py), where the reward of a failed sample
counts: `remove_sample` zeroes only its loss mask, and later. Where nothing failed, this hook returns exactly slime's
numbers. Elsewhere it takes mean and standard deviation over the scored samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qreward_plugins import group_means

from .late import settle
from .samples import FLOAT32_MAX, ROLLOUT_SAMPLE, finite, group_of, has_reward, mask, mask_but_one_token, value_of
from .settings import end_rewards

if TYPE_CHECKING:
    import torch

GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""The estimators whose rewards slime normalises within groups."""

SCALED_ESTIMATORS = ("grpo", "gspo", "cispo")
"""The estimators whose rewards slime divides by the standard deviation with `--grpo-std-normalization`."""

EPSILON = 1e-6
"""slime adds this to the standard deviation."""


def post_process(args: Any, samples: Sequence[ROLLOUT_SAMPLE]) -> tuple[list[Any], list[Any]]:
    """slime's `--custom-reward-post-process-path`: the raw and the normalised rewards of a batch, in order.

    A sample without a finite reward, also if another function scored it, gets `remove_sample = True`, the mean of its
    group's scored samples as raw reward, and a normalised reward of 0.0 if the estimator works on groups. All returned
    numbers are finite. Judges on the trainer's GPUs sleep when it returns, because training comes next.
    """
    end_rewards()
    settle(samples)
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
    estimator = getattr(args, "advantage_estimator", None)
    if estimator not in GROUP_ESTIMATORS or not getattr(args, "rewards_normalization", True):
        return raw, list(raw)
    scale = estimator in SCALED_ESTIMATORS and getattr(args, "grpo_std_normalization", True)
    return raw, _normalized(args, raw, scored, scale=scale)


def _normalized(args: Any, raw: Sequence[float], scored: Sequence[bool], *, scale: bool) -> list[float]:
    import torch

    size = getattr(args, "n_samples_per_prompt", 1)
    # If rollouts became several samples, slime treats the whole batch as one group, and so does this hook.
    regular = len(raw) == size * getattr(args, "rollout_batch_size", 0)
    shape = (-1, size if regular else len(raw))
    present = torch.tensor(scored).reshape(shape)
    if present.shape[1] < 2:
        return [0.0] * len(raw)  # slime divides by the deviation, which is undefined for one sample
    normalized = _by_group(torch.tensor(raw, dtype=torch.float).reshape(shape), present, scale=scale)
    exact = torch.tensor(raw, dtype=torch.double).reshape(shape)
    # Sums and deviations of large rewards overflow in float32, even where the normalized rewards would not.
    large = exact.abs().amax(dim=-1) * 2 * present.shape[1] > FLOAT32_MAX
    if large.any():
        limited = _by_group(exact[large], present[large], scale=scale).clamp(-FLOAT32_MAX, FLOAT32_MAX)
        normalized[large] = limited.float()
    return normalized.flatten().tolist()


def _by_group(rewards: torch.Tensor, present: torch.Tensor, *, scale: bool) -> torch.Tensor:
    centered = rewards - rewards.mean(dim=-1, keepdim=True)
    normalized = centered / (centered.std(dim=-1, keepdim=True) + EPSILON) if scale else centered
    for row in range(len(rewards)):
        if not present[row].all():
            normalized[row] = _over_scored(rewards[row], present[row], scale=scale)
    return normalized


def _over_scored(rewards: torch.Tensor, present: torch.Tensor, *, scale: bool) -> torch.Tensor:
    """Normalise one group over its scored samples. The others get 0.0, and so does a single scored sample."""
    import torch

    normalized = torch.zeros_like(rewards)
    count = int(present.sum())
    if count > 1:
        centered = rewards[present] - rewards[present].mean()
        normalized[present] = centered / (centered.std() + EPSILON) if scale else centered
    return normalized
