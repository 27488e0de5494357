"""Computes advantages from rewards as `RLVRPipeline.run` does (utils/functionals.py), without a model.

The KL penalty and the critic's values are taken as zero. The arithmetic is ROLL's, with its NaNs and divisions by zero:
a reward that spoils a batch in ROLL spoils it here.
"""

from __future__ import annotations

from typing import Any

import torch

from .metrics import reduce_metrics
from .protocol import RollDataProto

_EPSILON = 1e-6


def train_batch(batch: RollDataProto, config: Any) -> tuple[RollDataProto, dict[str, Any]]:
    """The batch with `final_response_mask`, normalised `response_level_rewards` and `advantages`, in its order; and
    metrics by domain. Each domain is normalised separately.
    """
    batch.batch["prompt_id"] = torch.arange(len(batch))
    metrics: dict[str, Any] = {}
    parts = []
    for domain, part in batch.group_by("domain").items():
        of_part = _mask_samples(part, config)
        of_part |= _normalise(part, config)
        of_part |= _spread_over_tokens(part, config)
        _advantages(part, config)
        of_part |= reduce_metrics(part.meta_info.pop("metrics", {}))
        metrics |= {f"{domain}/{name}": value for name, value in of_part.items()}
        parts.append(part)
    whole = RollDataProto.concat(parts)
    whole.reorder(torch.argsort(whole.batch["prompt_id"]))
    whole.pop("prompt_id")
    return whole, metrics


def _mask_samples(data: RollDataProto, config: Any) -> dict[str, float]:
    tensors = data.batch
    tensors["origin_response_mask"] = tensors["response_mask"].clone()
    response_mask = tensors["response_mask"][:, 1:].clone()
    lengths = response_mask.sum(-1).float()
    scores = tensors["scores"]
    size = config.actor_infer.generating_args.num_return_sequences
    masks: dict[str, torch.Tensor] = {}
    if config.max_len_mask:
        masks["max_len"] = (lengths != tensors["responses"].shape[-1]).float()
    if config.difficulty_mask:
        tensors["difficulty_mask"] = torch.ones_like(scores)
        if size > 1:
            means = scores.reshape(-1, size).mean(-1).repeat_interleave(size)
            low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
            tensors["difficulty_mask"] = (means > low) & (means < high)
        masks["difficulty"] = tensors["difficulty_mask"].float()
    if config.error_max_len_clip:
        short = lengths < config.error_max_len_threshold
        masks["error_len"] = (((scores == 0) & short) | (scores == 1)).float()
    kept = torch.ones(len(data))
    for mask in masks.values():
        kept = kept * mask
    tensors["final_response_mask"] = response_mask * kept.unsqueeze(-1)
    of_part = {
        f"actor/{name}_mask_ratio": masks[name].mean().item() if name in masks else 1.0
        for name in ("max_len", "difficulty", "error_len")
    }
    return {
        **of_part,
        "actor/final_mask_ratio": kept.mean().item(),
        "actor/samples_used": kept.sum().item(),
        "actor/samples_total": float(len(data)),
    }


def _normalise(data: RollDataProto, config: Any) -> dict[str, float]:
    if config.adv_estimator == "grpo":
        config.norm_mean_type = config.norm_std_type = "group"
    size = config.actor_infer.generating_args.num_return_sequences
    rewards = normalised(
        data.batch["response_level_rewards"].clone(), size, config.norm_mean_type, config.norm_std_type
    )
    clipped = 0.0
    if config.reward_clip:
        clipped = _clipped_share(rewards, config.reward_clip)
        rewards = rewards.clamp(-config.reward_clip, config.reward_clip)
    data.batch["response_level_rewards"] = rewards
    return {"critic/reward_clip_frac": clipped}


def normalised(rewards: torch.Tensor, size: int, mean_type: str | None, std_type: str | None) -> torch.Tensor:
    """Rewards minus their mean, divided by their standard deviation, of the `batch` or of each `group` of `size` rows.

    Raises `KeyError` for `running`, as ROLL's pipeline does: it looks for a domain named `domain`.
    """
    if "running" in (mean_type, std_type):
        raise KeyError("domain: ROLL's RLVRPipeline cannot normalise by running moments; use batch or group")
    groups = rewards.reshape(-1, size) if "group" in (mean_type, std_type) and size > 0 else rewards
    mean = {"batch": rewards.mean(), "group": groups.mean(-1, keepdim=True)}.get(mean_type or "", torch.tensor(0.0))
    centred = (groups if mean_type == "group" else rewards) - mean
    if std_type is not None:
        centred = centred / ((rewards.std() if std_type == "batch" else groups.std(-1, keepdim=True)) + _EPSILON)
    return centred.reshape(rewards.shape) if mean_type == "group" else centred


def _spread_over_tokens(data: RollDataProto, config: Any) -> dict[str, float]:
    """The reward at the last token of each response: `token_level_rewards` (B, L - 1)."""
    tensors = data.batch
    rewards = tensors["response_level_rewards"]
    last = (tensors["position_ids"] * tensors["attention_mask"]).argmax(-1)
    tokens = torch.zeros(tensors["attention_mask"].shape, dtype=rewards.dtype)
    tokens[torch.arange(len(data)), last] = rewards
    tokens = tokens[:, 1:]
    of_part = {"critic/kl": 0.0}
    data.rename("token_level_rewards", "token_level_scores")
    if config.reward_clip:
        of_part["critic/token_reward_clip_frac"] = _clipped_share(tokens, config.reward_clip)
        tokens = tokens.clamp(-config.reward_clip, config.reward_clip)
    tensors["token_level_rewards"] = tokens
    return of_part


def _advantages(data: RollDataProto, config: Any) -> None:
    mask = data.batch["final_response_mask"].clone()
    whitens = int(mask.sum().item()) > 1
    rewards = data.batch["token_level_rewards"].float()
    if config.whiten_rewards and whitens:
        rewards = _whiten(rewards, mask)
    rewards = rewards * mask
    data.batch["token_level_rewards"] = rewards
    discount = config.gamma * (config.lambd if config.adv_estimator == "gae" else 1)
    advantages = torch.zeros_like(rewards)
    later = torch.zeros(len(data))
    for place in reversed(range(rewards.shape[-1])):
        later = rewards[:, place] + discount * later
        advantages[:, place] = later
    data.batch["raw_advantages"] = data.batch["returns"] = advantages
    if config.whiten_advantages and whitens:
        advantages = _whiten(advantages, mask)
    advantages = advantages * mask
    if config.advantage_clip is not None:
        share = _clipped_share(advantages, config.advantage_clip)
        data.meta_info["metrics"] = {"critic/advantage_clip_frac": share}
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    data.batch["advantages"] = advantages


def _whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    count = mask.sum()
    mean = (values * mask).sum() / (count + 1e-8)
    variance = ((values - mean) ** 2 * mask).sum() / (count + 1e-8) * (count / (count - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def _clipped_share(values: torch.Tensor, limit: float) -> float:
    beyond = (values > limit).sum().item() + (values < -limit).sum().item()
    return beyond / values.numel() if values.numel() else 0.0
