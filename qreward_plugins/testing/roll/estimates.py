"""Computes advantages from rewards as `RLVRPipeline.run` does (utils/functionals.py), without a model, in 64 bits.

The KL penalty and the critic's values are taken as zero. A reward that spoils a batch in ROLL spoils it here: a NaN
makes its group NaN, or with a norm over the batch everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .protocol import RollDataProto, torch

_REDUCERS: dict[str, Any] = {
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "p50": lambda values: np.percentile(values, 50),
    "p99": lambda values: np.percentile(values, 99),
    "std": np.std,
    "sum": np.sum,
}


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce lists by the suffix `@tag` or `_tag` of their name, else to their mean; keep numbers.

    Raises `ValueError` for an unknown `@tag`, and numpy's errors for lists with anything but numbers.
    """
    lists = {name: value for name, value in metrics.items() if isinstance(value, (list, tuple)) and len(value)}
    return {**metrics, **{name: float(_reducer(name)(value)) for name, value in lists.items()}}


def _reducer(name: str) -> Any:
    _, at, tag = name.rpartition("@")
    if at and tag not in _REDUCERS:
        raise ValueError(f"Unknown reducer tag {tag!r} in metric {name!r}; known are {', '.join(_REDUCERS)}")
    return _REDUCERS[tag] if at else _REDUCERS.get(name.rpartition("_")[2], np.mean)


def train_batch(batch: RollDataProto, config: Any) -> tuple[RollDataProto, dict[str, Any]]:
    """The batch with `final_response_mask`, normalised `response_level_rewards` and `advantages`, in its order; and
    metrics by domain. Each domain is normalised separately.
    """
    batch.batch["prompt_id"] = torch.arange(len(batch))
    metrics: dict[str, Any] = {}
    parts = []
    for domain, part in batch.group_by("domain").items():
        of_part = _estimate(part, config)
        metrics |= {f"{domain}/{name}": value for name, value in of_part.items()}
        parts.append(part)
    whole = RollDataProto.concat(parts)
    whole.reorder(np.argsort(np.asarray(whole.batch["prompt_id"])))
    whole.pop("prompt_id")
    return whole, {**metrics, **value_metrics(whole)}


def _estimate(data: RollDataProto, config: Any) -> dict[str, float]:
    """Add what trains to a domain's rows."""
    tensors, size = data.batch, config.actor_infer.generating_args.num_return_sequences
    kept, metrics = _kept(data, config, size)
    mask = _array(tensors["response_mask"])[:, 1:] * kept[:, None]
    norms = ("group", "group") if config.adv_estimator == "grpo" else (config.norm_mean_type, config.norm_std_type)
    rewards = normalised(_array(tensors["response_level_rewards"]), size, *norms)
    # The reward stands at the last token of its response.
    tokens = np.zeros(mask.shape)
    tokens[np.arange(len(data)), _array(tensors["attention_mask"]).sum(-1).astype(int) - 2] = rewards
    tokens *= mask
    discount = config.gamma * (config.lambd if config.adv_estimator == "gae" else 1)
    advantages, later = np.zeros_like(tokens), np.zeros(len(data))
    for place in reversed(range(tokens.shape[-1])):
        advantages[:, place] = later = tokens[:, place] + discount * later
    data.rename("token_level_rewards", "token_level_scores")
    for name, values in {
        "final_response_mask": mask,
        "response_level_rewards": rewards,
        "token_level_rewards": tokens,
        "advantages": advantages * mask,
    }.items():
        tensors[name] = torch.tensor(values.astype(np.float32))
    return {**metrics, **value_metrics(data)}


def _kept(data: RollDataProto, config: Any, size: int) -> tuple[Any, dict[str, float]]:
    """1.0 for each sample that trains, else 0.0; and metrics of the masks."""
    kept, metrics = np.ones(len(data)), {}
    if config.max_len_mask:
        lengths = _array(data.batch["response_mask"])[:, 1:].sum(-1)
        masked = (lengths != data.batch["responses"].shape[-1]).astype(float)
        kept, metrics["actor/max_len_mask_ratio"] = kept * masked, float(masked.mean())
    if config.difficulty_mask and size > 1:
        means = np.repeat(_array(data.batch["scores"]).reshape(-1, size).mean(-1), size)
        low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
        masked = ((means > low) & (means < high)).astype(float)
        kept, metrics["actor/difficulty_mask_ratio"] = kept * masked, float(masked.mean())
    metrics["actor/final_mask_ratio"] = float(kept.mean())
    metrics["actor/samples_total"] = float(len(data))
    return kept, metrics


def normalised(rewards: Any, size: int, mean_type: str | None, std_type: str | None) -> Any:
    """Rewards minus their mean, divided by their standard deviation, of the `batch` or of each `group` of `size`."""
    groups = rewards.reshape(-1, size)
    mean = {"batch": rewards.mean(), "group": groups.mean(-1, keepdims=True), None: 0.0}[mean_type]
    centred = groups - mean
    if std_type is not None:
        with np.errstate(all="ignore"):
            spread = rewards.std(ddof=1) if std_type == "batch" else _spread(groups)
        centred = centred / (spread + 1e-6)
    return centred.reshape(rewards.shape)


def _spread(groups: Any) -> Any:
    return groups.std(-1, ddof=1, keepdims=True) if groups.shape[-1] > 1 else np.full((len(groups), 1), np.nan)


def value_metrics(batch: RollDataProto) -> dict[str, float]:
    """ROLL's `critic/` metrics that depend on rewards (metrics_manager.py)."""
    scores, advantages = _array(batch.batch["scores"]), _array(batch.batch["advantages"])
    trained = _array(batch.batch["final_response_mask"]) > 0
    means = {
        "correct": scores == 1,
        "score": scores,
        "rewards": _array(batch.batch["token_level_rewards"]).sum(-1),
        "advantages": advantages[trained],
    }
    return {f"critic/{name}/mean": float(np.mean(values)) for name, values in means.items() if len(values)}


def _array(tensor: Any) -> Any:
    return np.asarray(tensor, dtype=np.float64)
