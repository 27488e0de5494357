"""The advantages that verl's trainers compute from rewards (core_algos.py), in float32 and in verl's order.

Each estimator takes token rewards and the response mask as (rows, response length) and returns advantages and returns
of that shape. The policy, its reference and the critic are played: the critic's values are whatever is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from .float_sums import masked_mean32, mean32, std32, sum32

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

F = np.float32
EPSILON = F(1e-6)


@dataclass(frozen=True)
class Rewards:
    """What an estimator gets. `baselines`: the greedy response's reward of each row (remax). `components`: by name, one
    number a row (gdpo). `config`: verl's node `algorithm`.
    """

    rewards: Floats
    mask: np.ndarray[Any, Any]
    uids: Sequence[Any] = ()
    values: Floats | None = None
    baselines: Floats | None = None
    components: Mapping[str, Any] = field(default_factory=dict)
    last: np.ndarray[Any, Any] | None = None
    config: Any = None

    @property
    def scores(self) -> Floats:
        return np.array([sum32(row) for row in self.rewards], dtype=F)

    @property
    def groups(self) -> dict[Any, list[int]]:
        groups: dict[Any, list[int]] = {}
        for row, uid in enumerate(self.uids):
            groups.setdefault(uid, []).append(row)
        return groups


Both: TypeAlias = "tuple[Floats, Floats]"


def estimate(name: str, data: Rewards) -> Both:
    """Advantages and returns. Raises `ValueError` for an estimator that verl does not know."""
    if name not in ESTIMATORS:
        raise ValueError(f"Unknown advantage estimator simply: {name}")
    with np.errstate(all="ignore"):
        return ESTIMATORS[name](data)


def grpo(data: Rewards) -> Both:
    """A reward less the mean of its group, by the group's deviation. A row alone in its group keeps its reward."""
    scores, by_std = data.scores, bool(data.config.get("norm_adv_by_std_in_grpo", True))
    out = np.empty_like(scores)
    for rows in data.groups.values():
        group = scores[rows]
        mean, std = (F(0), F(1)) if len(rows) == 1 else (mean32(group), std32(group))
        out[rows] = (group - mean) / F(std + EPSILON) if by_std else group - mean
    return _spread(out, data.mask)


def grpo_vectorized(data: Rewards) -> Both:
    """The same, adding up one by one. torch takes these square roots with MKL, which may be one bit off."""
    scores, by_std = data.scores, bool(data.config.get("norm_adv_by_std_in_grpo", True))
    out = np.empty_like(scores)
    for rows in data.groups.values():
        group = scores[rows]
        mean, std = F(0), F(1)
        centered = group - F(_one_by_one(group) / F(len(rows)))
        if len(rows) > 1:
            mean = F(_one_by_one(group) / F(len(rows)))
            std = np.sqrt(F(_one_by_one(centered * centered) / F(len(rows) - 1)))
        out[rows] = (group - mean) / F(std + EPSILON) if by_std else group - mean
    return _spread(out, data.mask)


def grpo_passk(data: Rewards) -> Both:
    """Only the best of a group has an advantage: its lead over the second. Raises `ValueError` for a group of one."""
    scores, by_std = data.scores, bool(data.config.get("norm_adv_by_std_in_grpo", True))
    out = np.zeros_like(scores)
    for uid, rows in data.groups.items():
        group = scores[rows]
        if len(rows) < 2:
            raise ValueError(f"Pass@k requires at least 2 samples per group. Got {len(rows)} for group {uid}.")
        # NaN is greater than any number to torch, and of equal ones the first comes first.
        order = sorted(range(len(rows)), key=lambda place: (np.isnan(group[place]), group[place]), reverse=True)
        lead = F(group[order[0]] - group[order[1]])
        out[rows[order[0]]] = lead / F(std32(group) + EPSILON) if by_std else lead
    return _spread(out, data.mask)


def gdpo(data: Rewards) -> Both:
    """The components normalised each on its own by `grpo`, added up, and whitened over the batch."""
    names = data.config.get("gdpo_reward_keys", None)
    assert names, (
        "GDPO requires 'algorithm.gdpo_reward_keys' listing the individual reward component keys returned by "
        "compute_score (e.g. ['format_reward', 'accuracy_reward'])."
    )
    given = data.config.get("gdpo_reward_weights", None)
    weights = [F(weight) for weight in given] if given is not None else [F(1)] * len(names)
    total: Floats | None = None
    for name, weight in zip(names, weights, strict=False):
        assert name in data.components, (
            f"GDPO reward key '{name}' not found in non_tensor_batch. Available keys: {list(data.components)}. "
            f"Make sure your compute_score returns a dict containing '{name}'."
        )
        rewards = np.zeros(data.mask.shape, dtype=F)
        assert data.last is not None
        rewards[np.arange(len(rewards)), data.last] = np.asarray(data.components[name], dtype=F)
        part = weight * grpo(Rewards(rewards, data.mask, data.uids, config=data.config))[0]
        total = part if total is None else total + part
    assert total is not None
    out = _whitened(total, data.mask) * data.mask.astype(F)
    return out, out


def reinforce_plus_plus_baseline(data: Rewards) -> Both:
    """A reward less the mean of its group, whitened over all tokens of the batch."""
    scores = data.scores
    out = np.empty_like(scores)
    for rows in data.groups.values():
        out[rows] = scores[rows] - (F(0) if len(rows) == 1 else mean32(scores[rows]))
    tokens = _spread(out, data.mask)[0]
    tokens = _whitened(tokens, data.mask) * data.mask.astype(F)
    return tokens, tokens


def rloo(data: Rewards) -> Both:
    """A reward less the mean of its siblings."""
    scores = data.scores
    out = scores.copy()
    for rows in data.groups.values():
        if len(rows) > 1:
            count, others = F(len(rows)), F(len(rows) - 1)
            out[rows] = scores[rows] * count / others - mean32(scores[rows]) * count / others
    return _spread(out, data.mask)


def rloo_vectorized(data: Rewards) -> Both:
    """The same, in another order; a row that is alone in its group has no advantage."""
    scores = data.scores
    out = np.zeros_like(scores)
    for rows in data.groups.values():
        count = F(len(rows))
        total = _one_by_one(scores[rows])
        out[rows] = (count * scores[rows] - total) / max(F(count - F(1)), F(1)) * F(len(rows) > 1)
    return _spread(out, data.mask)


def opo(data: Rewards) -> Both:
    """A reward less the mean of its group, weighted by the lengths."""
    scores, lengths = data.scores, data.mask.sum(axis=-1)
    out = np.empty_like(scores)
    for rows in data.groups.values():
        baseline = F(0)
        if len(rows) > 1:
            weighted = sum32(lengths[rows].astype(F) * scores[rows])
            baseline = F(weighted / F(lengths[rows].sum()))
        out[rows] = scores[rows] - baseline
    return _spread(out, data.mask)


def gpg(data: Rewards) -> Both:
    """A reward less the mean of its group, more the fewer rows of the batch have a reward."""
    scores = data.scores
    # torch divides a number by a tensor as the number times one over the tensor.
    alpha = F(F(F(1) / F(max(int(np.count_nonzero(scores)), 1))) * F(len(scores)))
    out = np.empty_like(scores)
    for rows in data.groups.values():
        out[rows] = alpha * (scores[rows] - (F(0) if len(rows) == 1 else mean32(scores[rows]))) / F(1)
    return _spread(out, data.mask)


def reinforce_plus_plus(data: Rewards) -> Both:
    """The discounted reward, whitened over all tokens of the batch."""
    gamma, mask = F(data.config.gamma), data.mask.astype(F)
    returns = np.zeros_like(data.rewards)
    running = np.zeros(len(returns), dtype=F)
    for column in range(returns.shape[1] - 1, -1, -1):
        new = data.rewards[:, column] + gamma * running
        returns[:, column] = new * mask[:, column]
        running = new * mask[:, column] + running * (F(1) - mask[:, column])
    return _whitened(returns, data.mask) * mask, returns


def remax(data: Rewards) -> Both:
    """The reward to come, less that of the greedy response."""
    if data.baselines is None:
        raise TypeError("compute_remax_outcome_advantage() missing 1 required positional argument: 'reward_baselines'")
    mask = data.mask.astype(F)
    rewards = data.rewards * mask
    returns = np.cumsum(rewards[:, ::-1], axis=-1, dtype=np.float64).astype(F)[:, ::-1]
    return returns - data.baselines[:, None] * mask, returns


def gae(data: Rewards) -> Both:
    """Generalised advantage estimates with the critic's values, whitened over all tokens of the batch."""
    assert data.values is not None
    gamma, mask, values = float(data.config.gamma), data.mask.astype(F), data.values
    discount = F(gamma * float(data.config.lam))
    next_values = last = np.zeros(len(values), dtype=F)
    columns = []
    for column in range(values.shape[1] - 1, -1, -1):
        there, other = mask[:, column], F(1) - mask[:, column]
        delta = data.rewards[:, column] + F(gamma) * next_values - values[:, column]
        now = delta + discount * last
        next_values = values[:, column] * there + other * next_values
        last = now * there + other * last
        columns.append(last)
    advantages = np.stack(columns[::-1], axis=1)
    return _whitened(advantages, data.mask), advantages + values


ESTIMATORS: dict[str, Callable[[Rewards], Both]] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_vectorized": grpo_vectorized,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "rloo_vectorized": rloo_vectorized,
    "opo": opo,
    "gpg": gpg,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}


TOKEN_BASELINES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})
"""Estimators that need probabilities of the actor, which is not played."""


def _spread(scores: Floats, mask: np.ndarray[Any, Any]) -> Both:
    tokens = (scores[:, None] * mask.astype(F)).astype(F)
    return tokens, tokens


def _one_by_one(values: Floats) -> Any:
    total = F(0)
    for value in values:
        total = F(total + value)
    return total


def _whitened(values: Floats, mask: np.ndarray[Any, Any]) -> Any:
    """Mean 0 and variance 1 over the trained tokens. Raises `ValueError` where there are fewer than two of them."""
    count = int(mask.sum())
    mean = masked_mean32(values, mask)
    centered = values - mean
    variance = masked_mean32(centered * centered, mask)
    if count == 0:
        raise ValueError("At least one element in the mask has to be 1.")
    if count == 1:
        raise ValueError("The sum of the mask is one, which can cause a division by zero.")
    variance = F(variance * F(F(count) / F(count - 1)))
    return (values - mean) * F(F(1) / np.sqrt(F(variance + F(1e-8))))


__all__ = ["ESTIMATORS", "TOKEN_BASELINES", "Rewards", "estimate"]
