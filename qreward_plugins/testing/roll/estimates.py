"""Computes advantages from rewards as `RLVRPipeline.run` does (utils/functionals.py), without a model, in 64 bits.

The KL penalty and the critic's values are taken as zero. A reward that spoils a batch in ROLL spoils it here: a NaN
makes its group NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .protocol import RollDataProto, torch

_REDUCERS: dict[str, Any] = {
    "max": np.max,
    "min": np.min,
    "p50": np.median,
    "p99": lambda values: np.percentile(values, 99),
    "std": np.std,
    "sum": np.sum,
}


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce lists by the suffix of their name (`_sum`, `_max`, ...), else to their mean; keep numbers. Raises numpy's
    errors for lists with anything but numbers.
    """
    lists = {name: value for name, value in metrics.items() if isinstance(value, (list, tuple)) and len(value)}
    reducers = {name: _REDUCERS.get(name.rpartition("_")[2], np.mean) for name in lists}
    return {**metrics, **{name: float(reducers[name](value)) for name, value in lists.items()}}


def train_batch(batch: RollDataProto, config: Any) -> RollDataProto:
    """The batch with `final_response_mask`, normalised `response_level_rewards` and `advantages`."""
    tensors = batch.batch
    mask = _array(tensors["response_mask"])[:, 1:]
    rewards = _array(tensors["response_level_rewards"])
    if config.adv_estimator == "grpo":
        rewards = normalised(rewards, config.num_return_sequences_in_group)
    # The reward stands at the last token of its response.
    tokens = np.zeros(mask.shape)
    tokens[np.arange(len(batch)), _array(tensors["attention_mask"]).sum(-1).astype(int) - 2] = rewards
    tokens *= mask
    discount = config.gamma * (config.lambd if config.adv_estimator == "gae" else 1)
    advantages, later = np.zeros_like(tokens), np.zeros(len(batch))
    for place in reversed(range(tokens.shape[-1])):
        advantages[:, place] = later = tokens[:, place] + discount * later
    tensors["token_level_scores"] = tensors.pop("token_level_rewards")
    for name, values in {
        "final_response_mask": mask,
        "response_level_rewards": rewards,
        "token_level_rewards": tokens,
        "advantages": advantages * mask,
    }.items():
        tensors[name] = torch.tensor(values.astype(np.float32))
    return batch


def normalised(rewards: Any, size: int) -> Any:
    """Rewards minus the mean of their group of `size`, divided by its standard deviation; NaN for a group of one."""
    groups = rewards.reshape(-1, size)
    spread = groups.std(-1, ddof=1, keepdims=True) if size > 1 else np.nan
    return ((groups - groups.mean(-1, keepdims=True)) / (spread + 1e-6)).reshape(rewards.shape)


def _array(tensor: Any) -> Any:
    return np.asarray(tensor, dtype=np.float64)
