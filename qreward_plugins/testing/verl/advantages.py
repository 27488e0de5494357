"""The advantages that verl computes from rewards (core_algos.py, ray_trainer.py), in numpy and float64.

A test asks of them which rows train and in which direction, so they agree with verl to 1e-6, not to the last bit. What
no reward can change is not played.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .protocol import VerlDataProto

Array: TypeAlias = "np.ndarray[Any, Any]"
Both: TypeAlias = "tuple[Array, Array]"

EPSILON = 1e-6


@dataclass(frozen=True)
class Rewards:
    """What an estimator gets: token rewards and the response mask as (rows, response length), and each row's group.

    `baselines`: the greedy response's reward of each row (remax). `values`: the critic's. `config`: verl's node
    `algorithm`.
    """

    rewards: Array
    mask: Array
    uids: Sequence[Any]
    config: Any
    values: Array | None = None
    baselines: Array | None = None

    @property
    def scores(self) -> Array:
        return np.asarray(self.rewards.sum(axis=-1))

    @property
    def groups(self) -> dict[Any, list[int]]:
        groups: dict[Any, list[int]] = {}
        for row, uid in enumerate(self.uids):
            groups.setdefault(uid, []).append(row)
        return groups


def grpo(data: Rewards) -> Both:
    """A reward less the mean of its group, by the group's deviation. A row alone in its group keeps its reward."""
    by_std = bool(data.config.get("norm_adv_by_std_in_grpo", True))

    def compare(group: Array, _: Array) -> Array:
        mean, std = (0.0, 1.0) if len(group) == 1 else (group.mean(), group.std(ddof=1))
        return np.asarray((group - mean) / (std + EPSILON) if by_std else group - mean)

    return _by_group(data, compare)


def grpo_passk(data: Rewards) -> Both:
    """Only the best of a group has an advantage: its lead over the second. Raises `ValueError` for a group of one."""
    by_std = bool(data.config.get("norm_adv_by_std_in_grpo", True))

    def compare(group: Array, _: Array) -> Array:
        if len(group) < 2:
            raise ValueError(f"Pass@k requires at least 2 samples per group. Got {len(group)}.")
        # NaN is greater than any number to torch, and of equal ones the first comes first.
        order = sorted(range(len(group)), key=lambda place: (np.isnan(group[place]), group[place]), reverse=True)
        lead = np.zeros_like(group)
        lead[order[0]] = group[order[0]] - group[order[1]]
        return np.asarray(lead / (group.std(ddof=1) + EPSILON) if by_std else lead)

    return _by_group(data, compare)


def rloo(data: Rewards) -> Both:
    """A reward less the mean of its siblings."""

    def compare(group: Array, _: Array) -> Array:
        count = len(group)
        return group if count == 1 else np.asarray((group - group.mean()) * count / (count - 1))

    return _by_group(data, compare)


def opo(data: Rewards) -> Both:
    """A reward less the mean of its group, weighted by the lengths."""

    def compare(group: Array, lengths: Array) -> Array:
        return group if len(group) == 1 else np.asarray(group - (lengths * group).sum() / lengths.sum())

    return _by_group(data, compare)


def gpg(data: Rewards) -> Both:
    """A reward less the mean of its group, more the fewer rows of the batch have a reward."""
    alpha = len(data.scores) / max(int(np.count_nonzero(data.scores)), 1)
    return _by_group(data, lambda group, _: alpha * _centred(group))


def reinforce_plus_plus_baseline(data: Rewards) -> Both:
    """A reward less the mean of its group, whitened over all tokens of the batch."""
    tokens = _whitened(_by_group(data, lambda group, _: _centred(group))[0], data.mask) * data.mask
    return tokens, tokens


def reinforce_plus_plus(data: Rewards) -> Both:
    """The discounted reward, whitened over all tokens of the batch."""
    gamma, mask = float(data.config.gamma), data.mask
    returns, running = np.zeros_like(data.rewards), np.zeros(len(data.rewards))
    for column in reversed(range(returns.shape[1])):
        now = data.rewards[:, column] + gamma * running
        returns[:, column] = now * mask[:, column]
        running = np.where(mask[:, column], now, running)
    return _whitened(returns, mask) * mask, returns


def remax(data: Rewards) -> Both:
    """The reward to come, less that of the greedy response."""
    if data.baselines is None:
        raise TypeError("compute_remax_outcome_advantage() missing 1 required positional argument: 'reward_baselines'")
    returns = np.cumsum((data.rewards * data.mask)[:, ::-1], axis=-1)[:, ::-1]
    return returns - data.baselines[:, None] * data.mask, returns


def gae(data: Rewards) -> Both:
    """Generalised advantage estimates with the critic's values, whitened over all tokens of the batch."""
    assert data.values is not None
    gamma, lam, values = float(data.config.gamma), float(data.config.lam), data.values
    next_values, last = np.zeros(len(values)), np.zeros(len(values))
    advantages = np.zeros_like(values)
    for column in reversed(range(values.shape[1])):
        there = data.mask[:, column]
        now = data.rewards[:, column] + gamma * next_values - values[:, column] + gamma * lam * last
        next_values = np.where(there, values[:, column], next_values)
        last = np.where(there, now, last)
        advantages[:, column] = last
    return _whitened(advantages, data.mask), advantages + values


ESTIMATORS: dict[str, Callable[[Rewards], Both]] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}

NOT_PLAYED = frozenset(
    {"gdpo", "grpo_vectorized", "rloo_vectorized", "optimal_token_baseline", "tir_optimal_token_baseline"}
)
"""Estimators of verl that this stand-in refuses by name."""


def compute_advantage(
    data: VerlDataProto,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> VerlDataProto:
    """`verl.trainer.ppo.ray_trainer.compute_advantage`: sets `advantages` and `returns`.

    Raises `ValueError` for an estimator that verl does not know, and `NotImplementedError` for one that is not played.
    """
    name, batch = str(adv_estimator), data.batch
    if name in NOT_PLAYED or (config is not None and config.get("use_pf_ppo", False)):
        what = f"algorithm.adv_estimator={name}" if name in NOT_PLAYED else "algorithm.use_pf_ppo"
        raise NotImplementedError(f"{what} is not played by FakeVerlTrainer; it plays {', '.join(ESTIMATORS)}")
    if name not in ESTIMATORS:
        raise ValueError(f"Unknown advantage estimator simply: {name}")

    def column(key: str) -> Array | None:
        return np.asarray(batch[key], dtype=np.float64) if key in batch else None

    rewards = column("token_level_rewards")
    assert rewards is not None
    with np.errstate(all="ignore"):
        found = ESTIMATORS[name](
            Rewards(
                rewards=rewards,
                mask=np.asarray(batch["response_mask"]),
                uids=list(data.non_tensor_batch.get("uid", ())),
                config=config,
                values=column("values"),
                baselines=column("reward_baselines"),
            )
        )
        batch["advantages"], batch["returns"] = (each.astype(np.float32) for each in found)
    return data


def compute_advantage_for_multi_trajectories(
    data: VerlDataProto, batch_keys: Sequence[str], adv_estimator: Any, **named: Any
) -> VerlDataProto:
    """V1's: with GRPO the last output of each session counts, and the session's other outputs get its advantage."""
    if str(adv_estimator) != "grpo":
        return compute_advantage(data, adv_estimator=adv_estimator, **named)
    last: dict[str, tuple[int, int]] = {}
    for row, key in enumerate(batch_keys):
        session, _, index = key.rpartition("_")
        if session not in last or last[session][0] < int(index):
            last[session] = (int(index), row)
    places = {session: place for place, session in enumerate(last)}
    final = compute_advantage(data.select_idxs([row for _, row in last.values()]), adv_estimator=adv_estimator, **named)
    first = np.asarray(final.batch["response_mask"]).argmax(axis=1)
    scores = np.asarray(final.batch["advantages"])[np.arange(len(final)), first]
    chosen = scores[[places[key.rpartition("_")[0]] for key in batch_keys]]
    tokens = chosen[:, None] * np.asarray(data.batch["response_mask"]).astype(np.float32)
    data.batch["advantages"], data.batch["returns"] = tokens, tokens.copy()
    return data


def _by_group(data: Rewards, compare: Callable[[Array, Array], Array]) -> Both:
    """Each row's advantage at all its tokens. `compare` gets the scores and the lengths of a group."""
    scores, lengths = data.scores, data.mask.sum(axis=-1)
    out = np.empty_like(scores)
    for rows in data.groups.values():
        out[rows] = compare(scores[rows], lengths[rows])
    tokens = out[:, None] * data.mask
    return tokens, tokens


def _centred(group: Array) -> Array:
    return group if len(group) == 1 else np.asarray(group - group.mean())


def _whitened(values: Array, mask: Array) -> Array:
    """Mean 0 and variance 1 over the trained tokens. Raises `ValueError` where there are fewer than two of them."""
    count = int(mask.sum())
    if count < 2:
        raise ValueError(
            "The sum of the mask is one, which can cause a division by zero."
            if count
            else "At least one element in the mask has to be 1."
        )
    trained = values[mask.astype(bool)]
    return np.asarray((values - trained.mean()) / np.sqrt(trained.var(ddof=1) + 1e-8))


__all__ = ["ESTIMATORS", "NOT_PLAYED", "compute_advantage", "compute_advantage_for_multi_trajectories"]
