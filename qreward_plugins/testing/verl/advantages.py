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

    `values`: the critic's. `baselines`: the greedy response's reward of each row (remax). `parts`: the single rewards
    of each row (gdpo). `config`: verl's node `algorithm`.
    """

    tokens: Array
    mask: Array
    uids: Sequence[Any]
    config: Any
    by_std: bool
    values: Array | None = None
    baselines: Array | None = None
    parts: Sequence[Array] = ()

    def compared(self, compare: Callable[[Array], Array], scores: Array | None = None) -> Array:
        """Each row's advantage at all its tokens. `compare` gets the scores of a group."""
        scores = self.tokens.sum(axis=-1) if scores is None else scores
        groups: dict[Any, list[int]] = {}
        for row, uid in enumerate(self.uids):
            groups.setdefault(uid, []).append(row)
        out = np.empty_like(scores)
        for rows in groups.values():
            out[rows] = compare(scores[rows])
        return np.asarray(out[:, None] * self.mask)

    def normed(self, group: Array) -> Array:
        """A reward less the mean of its group, by the group's deviation. A row alone in its group keeps its reward."""
        mean, std = (0.0, 1.0) if len(group) == 1 else (group.mean(), group.std(ddof=1))
        return np.asarray((group - mean) / (std + EPSILON) if self.by_std else group - mean)

    def whitened(self, values: Array) -> Array:
        """Mean 0 and variance 1 over the trained tokens. Raises `ValueError` where there are fewer than two of them."""
        if self.mask.sum() < 2:
            raise ValueError("the batch has fewer than two tokens to train")
        trained = values[self.mask.astype(bool)]
        return np.asarray((values - trained.mean()) / np.sqrt(trained.var(ddof=1) + 1e-8)) * self.mask


def grpo(data: Rewards) -> Both:
    tokens = data.compared(data.normed)
    return tokens, tokens


def rloo(data: Rewards) -> Both:
    """A reward less the mean of its siblings."""
    tokens = data.compared(
        lambda group: group if len(group) == 1 else (group - group.mean()) * len(group) / (len(group) - 1)
    )
    return tokens, tokens


def gdpo(data: Rewards) -> Both:
    """GRPO of each single reward, added up with `gdpo_reward_weights`, and whitened over all tokens of the batch."""
    weights = data.config.get("gdpo_reward_weights") or [1.0] * len(data.parts)
    added = sum(weight * data.compared(data.normed, part) for weight, part in zip(weights, data.parts, strict=True))
    tokens = data.whitened(np.asarray(added))
    return tokens, tokens


def reinforce_plus_plus(data: Rewards) -> Both:
    """The discounted reward, whitened over all tokens of the batch."""
    returns, running = np.zeros_like(data.tokens), np.zeros(len(data.tokens))
    for column in reversed(range(returns.shape[1])):
        now = data.tokens[:, column] + float(data.config.gamma) * running
        returns[:, column] = now * data.mask[:, column]
        running = np.where(data.mask[:, column], now, running)
    return data.whitened(returns), returns


def remax(data: Rewards) -> Both:
    """The reward to come, less that of the greedy response."""
    assert data.baselines is not None
    returns = np.cumsum((data.tokens * data.mask)[:, ::-1], axis=-1)[:, ::-1]
    return returns - data.baselines[:, None] * data.mask, returns


def gae(data: Rewards) -> Both:
    """Generalised advantage estimates with the critic's values, whitened over all tokens of the batch."""
    assert data.values is not None
    gamma, lam, values = float(data.config.gamma), float(data.config.lam), data.values
    next_values, last = np.zeros(len(values)), np.zeros(len(values))
    advantages = np.zeros_like(values)
    for column in reversed(range(values.shape[1])):
        there = data.mask[:, column]
        now = data.tokens[:, column] + gamma * next_values - values[:, column] + gamma * lam * last
        next_values = np.where(there, values[:, column], next_values)
        last = np.where(there, now, last)
        advantages[:, column] = last
    return data.whitened(advantages), advantages + values


ESTIMATORS: dict[str, Callable[[Rewards], Both]] = {
    each.__name__: each for each in (gae, gdpo, grpo, reinforce_plus_plus, remax, rloo)
}

NOT_PLAYED = (
    *("gpg", "grpo_passk", "grpo_vectorized", "opo", "optimal_token_baseline", "reinforce_plus_plus_baseline"),
    *("rloo_vectorized", "tir_optimal_token_baseline"),
)
"""Estimators of verl that this stand-in refuses by name."""


def compute_advantage(
    data: VerlDataProto, adv_estimator: Any, norm_adv_by_std_in_grpo: bool = True, config: Any = None, **_: Any
) -> VerlDataProto:
    """`verl.trainer.ppo.ray_trainer.compute_advantage`: sets `advantages` and `returns`.

    Raises `ValueError` for an estimator that verl does not know, and `NotImplementedError` for one that is not played.
    """
    name, batch = str(adv_estimator), data.batch
    if name in NOT_PLAYED or config.get("use_pf_ppo", False):
        what = f"algorithm.adv_estimator={name}" if name in NOT_PLAYED else "algorithm.use_pf_ppo"
        raise NotImplementedError(f"{what} is not played by FakeVerlTrainer; it plays {', '.join(ESTIMATORS)}")
    if name not in ESTIMATORS:
        raise ValueError(f"Unknown advantage estimator simply: {name}")

    def column(key: str) -> Any:
        return np.asarray(batch[key], dtype=np.float64) if key in batch else None

    parts = config.gdpo_reward_keys if name == "gdpo" else ()
    with np.errstate(all="ignore"):
        found = ESTIMATORS[name](
            Rewards(
                tokens=column("token_level_rewards"),
                mask=np.asarray(batch["response_mask"]),
                uids=list(data.non_tensor_batch["uid"]),
                config=config,
                by_std=norm_adv_by_std_in_grpo or name == "gdpo",
                values=column("values"),
                baselines=column("reward_baselines"),
                parts=[np.asarray(data.non_tensor_batch[key], dtype=np.float64) for key in parts],
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
    sessions = [key.rpartition("_")[0] for key in batch_keys]
    order = sorted(range(len(sessions)), key=lambda row: int(batch_keys[row].rpartition("_")[2]))
    last = {sessions[row]: row for row in order}
    final = compute_advantage(data.select_idxs(list(last.values())), adv_estimator=adv_estimator, **named)
    first = np.asarray(final.batch["response_mask"]).argmax(axis=1)
    scores = dict(zip(last, np.asarray(final.batch["advantages"])[np.arange(len(final)), first], strict=True))
    tokens = np.array([scores[session] for session in sessions])[:, None] * np.asarray(data.batch["response_mask"])
    data.batch["advantages"] = data.batch["returns"] = tokens.astype(np.float32)
    return data
