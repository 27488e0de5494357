"""What verl computes from rewards, in numpy and float64: advantages (core_algos.py, ray_trainer.py) and metrics
(metric_utils.py).

A test asks of them which rows train and in which direction, so they agree with verl to 1e-6, not to the last bit. What
no reward can change is not played; nor are lengths, turns, the critic's metrics, and what verl draws by chance from the
responses of a prompt (`best@`, `worst@`, `maj@`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..data_proto import VerlDataProto

Array: TypeAlias = "np.ndarray[Any, Any]"

EPSILON = 1e-6

ESTIMATORS = ("gae", "grpo", "reinforce_plus_plus", "rloo")


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
    tokens, mask = np.asarray(batch["token_level_rewards"], dtype=np.float64), np.asarray(batch["response_mask"])
    with np.errstate(all="ignore"):
        if name in ("grpo", "rloo"):
            by = "siblings" if name == "rloo" else "deviation" if norm_adv_by_std_in_grpo else ""
            compared = _compared(tokens.sum(axis=-1), data.non_tensor_batch["uid"], by=by)
            advantages = returns = compared[:, None] * mask
        elif name == "gae":
            values = np.asarray(batch["values"], dtype=np.float64)
            advantages = _backwards(tokens, mask, values, float(config.gamma), float(config.lam))
            advantages, returns = _whitened(advantages, mask), advantages + values
        else:
            # Without a critic and with lambda 1, what is left is the discounted reward.
            returns = _backwards(tokens, mask, np.zeros_like(tokens), float(config.gamma), 1.0) * mask
            advantages = _whitened(returns, mask)
        batch["advantages"], batch["returns"] = advantages.astype(np.float32), returns.astype(np.float32)
    return data


def _compared(scores: Array, uids: Sequence[Any], *, by: str) -> Array:
    """A score less the mean of its group: by the group's deviation, or that of its siblings alone. A row alone in its
    group keeps its score.
    """
    groups: dict[Any, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    out = scores.copy()
    for rows in groups.values():
        if len(rows) > 1:
            less = scores[rows] - scores[rows].mean()
            deviation = scores[rows].std(ddof=1) + EPSILON if by == "deviation" else 1.0
            out[rows] = less * len(rows) / (len(rows) - 1) if by == "siblings" else less / deviation
    return np.asarray(out)


def _backwards(tokens: Array, mask: Array, values: Array, gamma: float, lam: float) -> Array:
    """The advantage of each token over the values, from the last token on. Tokens outside the mask are skipped."""
    next_values, last = np.zeros(len(values)), np.zeros(len(values))
    advantages = np.zeros_like(values)
    for column in reversed(range(values.shape[1])):
        there = mask[:, column]
        now = tokens[:, column] + gamma * next_values - values[:, column] + gamma * lam * last
        next_values = np.where(there, values[:, column], next_values)
        last = np.where(there, now, last)
        advantages[:, column] = last
    return advantages


def _whitened(values: Array, mask: Array) -> Array:
    """Mean 0 and variance 1 over the trained tokens. Raises `ValueError` where there are fewer than two of them."""
    if mask.sum() < 2:
        raise ValueError("the batch has fewer than two tokens to train")
    trained = values[mask.astype(bool)]
    return np.asarray((values - trained.mean()) / np.sqrt(trained.var(ddof=1) + 1e-8) * mask)


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
