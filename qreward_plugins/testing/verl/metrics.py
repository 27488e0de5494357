"""The metrics that rewards move (metric_utils.py): those of a step, and those of a validation.

Not played: lengths, turns, the critic's, and what verl draws by chance from the responses of a prompt (`best@`,
`worst@`, `maj@`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

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
