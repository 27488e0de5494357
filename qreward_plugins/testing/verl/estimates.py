"""What verl computes from rewards, in numpy and float64: advantages (core_algos.py, ray_trainer.py) and metrics
(metric_utils.py).

A test asks of them which rows train and in which direction, so they agree with verl to 1e-6, not to the last bit. What
no reward can change is not played; nor are lengths, turns, the critic's metrics, and what verl draws by chance from the
responses of a prompt (`best@`, `worst@`, `maj@`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..data_proto import VerlDataProto

Array: TypeAlias = "np.ndarray[Any, Any]"
Both: TypeAlias = "tuple[Array, Array]"

EPSILON = 1e-6


@dataclass(frozen=True)
class Rewards:
    """What an estimator gets: token rewards and the response mask as (rows, response length), and each row's group.

    `values`: the critic's. `config`: verl's node `algorithm`.
    """

    tokens: Array
    mask: Array
    uids: Sequence[Any]
    config: Any
    by_std: bool
    values: Array | None = None

    def compared(self, compare: Callable[[Array], Array]) -> Array:
        """Each row's advantage at all its tokens. `compare` gets the scores of a group."""
        scores = self.tokens.sum(axis=-1)
        groups: dict[Any, list[int]] = {}
        for row, uid in enumerate(self.uids):
            groups.setdefault(uid, []).append(row)
        out = np.empty_like(scores)
        for rows in groups.values():
            out[rows] = compare(scores[rows]) if len(rows) > 1 else scores[rows]
        return np.asarray(out[:, None] * self.mask)

    def whitened(self, values: Array) -> Array:
        """Mean 0 and variance 1 over the trained tokens. Raises `ValueError` where there are fewer than two of them."""
        if self.mask.sum() < 2:
            raise ValueError("the batch has fewer than two tokens to train")
        trained = values[self.mask.astype(bool)]
        return np.asarray((values - trained.mean()) / np.sqrt(trained.var(ddof=1) + 1e-8)) * self.mask


def grpo(data: Rewards) -> Both:
    """A reward less the mean of its group, by the group's deviation. A row alone in its group keeps its reward."""

    def normed(group: Array) -> Array:
        less = group - group.mean()
        return np.asarray(less / (group.std(ddof=1) + EPSILON) if data.by_std else less)

    tokens = data.compared(normed)
    return tokens, tokens


def rloo(data: Rewards) -> Both:
    """A reward less the mean of its siblings."""
    tokens = data.compared(lambda group: (group - group.mean()) * len(group) / (len(group) - 1))
    return tokens, tokens


def reinforce_plus_plus(data: Rewards) -> Both:
    """The discounted reward, whitened over all tokens of the batch."""
    returns, running = np.zeros_like(data.tokens), np.zeros(len(data.tokens))
    for column in reversed(range(returns.shape[1])):
        now = data.tokens[:, column] + float(data.config.gamma) * running
        returns[:, column] = now * data.mask[:, column]
        running = np.where(data.mask[:, column], now, running)
    return data.whitened(returns), returns


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
    each.__name__: each for each in (gae, grpo, reinforce_plus_plus, rloo)
}


def compute_advantage(
    data: VerlDataProto, adv_estimator: Any, norm_adv_by_std_in_grpo: bool = True, config: Any = None, **_: Any
) -> VerlDataProto:
    """`verl.trainer.ppo.ray_trainer.compute_advantage`: sets `advantages` and `returns`.

    Raises `NotImplementedError` for an estimator that is not played.
    """
    name, batch = str(adv_estimator), data.batch
    if name not in ESTIMATORS or config.get("use_pf_ppo", False):
        what = "use_pf_ppo" if name in ESTIMATORS else f"adv_estimator={name}"
        raise NotImplementedError(
            f"algorithm.{what} is not played by FakeVerlTrainer; it plays {', '.join(ESTIMATORS)}"
        )

    def column(key: str) -> Any:
        return np.asarray(batch[key], dtype=np.float64) if key in batch else None

    with np.errstate(all="ignore"):
        found = ESTIMATORS[name](
            Rewards(
                tokens=column("token_level_rewards"),
                mask=np.asarray(batch["response_mask"]),
                uids=list(data.non_tensor_batch["uid"]),
                config=config,
                by_std=norm_adv_by_std_in_grpo,
                values=column("values"),
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


Nested: TypeAlias = "dict[str, dict[str, dict[str, float]]]"


def data_metrics(batch: Mapping[str, Any]) -> dict[str, Any]:
    """`critic/score/...` and `critic/advantages/...` of one step."""
    trained = np.asarray(batch["response_mask"]).astype(bool)
    written = np.asarray(batch["attention_mask"])[:, batch["prompts"].shape[1] :].any(axis=1)
    return {
        **_spread("critic/score", np.asarray(batch["token_level_scores"]).sum(axis=-1)[written]),
        **_spread("critic/advantages", np.asarray(batch["advantages"])[trained]),
    }


def validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos: Mapping[str, Sequence[Any]],
    expected_acc_counts: Mapping[tuple[str, str], int] | None = None,
) -> Nested:
    """`process_validation_metrics`: `{data source: {variable: {"mean@n": ...}}}`, the mean over prompts of what the n
    responses of each show. None and texts are left out. `expected_acc_counts`: sessions that are missing count as an
    `acc` of 0.
    """
    prompts: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for name, column in infos.items():
        for source, uid, value in zip(data_sources, sample_uids, column, strict=True):
            values = prompts.setdefault((source, uid), {}).setdefault(name, [])
            values += [] if value is None else [value]
    with_acc = {source for (source, _), columns in prompts.items() if columns.get("acc")}
    for prompt, count in (expected_acc_counts or {}).items():
        if prompt[0] in with_acc:
            columns = prompts.setdefault(prompt, {})
            seen = columns.get("acc", [])
            columns |= {"acc_success_only": seen, "acc": seen + [0.0] * max(count - len(seen), 0)}
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (source, _), columns in prompts.items():
        for name, values in columns.items():
            for metric, value in _of_prompt(values).items():
                found.setdefault(source, {}).setdefault(name, {}).setdefault(metric, []).append(value)
    return {
        source: {
            name: {metric: float(np.mean(each)) for metric, each in metrics.items()}
            for name, metrics in by_name.items()
        }
        for source, by_name in found.items()
    }


def named(metrics: Nested, turns: Sequence[Any]) -> dict[str, Any]:
    """The metrics under the names by which the tracker gets them."""
    averages: dict[str, Any] = {}
    for source, by_name in metrics.items():
        core = "acc" if "acc" in by_name else "reward"
        for name, by_metric in by_name.items():
            most = max(int(metric.split("@")[-1]) for metric in by_metric)
            for metric, value in by_metric.items():
                is_core = name == core and metric == f"mean@{most}"
                averages[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
    return averages | (_spread("val-aux/num_turns", np.asarray(turns)) if len(turns) else {})


def _spread(name: str, values: Any) -> dict[str, Any]:
    found = (values.mean(), values.max(), values.min()) if len(values) else (np.nan,) * 3
    return dict(zip((f"{name}/mean", f"{name}/max", f"{name}/min"), found, strict=True))


def _of_prompt(values: Sequence[Any]) -> dict[str, float]:
    if not values or isinstance(values[0], str):
        return {}
    return {f"mean@{len(values)}": float(np.mean(values))}
