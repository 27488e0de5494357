"""The metrics that rewards move (metric_utils.py): those of a step, and those of a validation.

Not played: the shares of cut and of aborted responses, the critic's, and what verl draws by chance from the responses
of a prompt (`best@`, `worst@`, `maj@`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Nested: TypeAlias = "dict[str, dict[str, dict[str, float]]]"
_Columns: TypeAlias = "dict[str, list[Any]]"


def data_metrics(
    *, scores: Any, rewards: Any, advantages: Any, returns: Any, mask: Any, lengths: tuple[Any, Any], num_turns: Any
) -> dict[str, Any]:
    """`critic/...`, `prompt_length/...`, `response_length/...` and `num_turns/...` of one step. `scores` and `rewards`
    are sums by row; `lengths` are those of the prompts and of the responses.
    """
    trained = np.asarray(mask).astype(bool)
    prompts, responses = (np.asarray(each, dtype=np.float64) for each in lengths)
    there = responses != 0
    columns = {
        "critic/score": np.asarray(scores)[there],
        "critic/rewards": np.asarray(rewards)[there],
        "critic/advantages": np.asarray(advantages)[trained],
        "critic/returns": np.asarray(returns)[trained],
        "prompt_length": prompts,
        "response_length": responses,
        "num_turns": np.asarray(num_turns),
    }
    return {name: value for column, values in columns.items() for name, value in _spread(column, values).items()}


def validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos: Mapping[str, Sequence[Any]],
    seed: int = 42,
    expected_acc_counts: Mapping[tuple[str, str], int] | None = None,
) -> Nested:
    """`process_validation_metrics`: `{data source: {variable: {"mean@n": ..., "std@n": ...}}}`, the mean over prompts
    of what the n responses of each show. None and texts are left out. `expected_acc_counts`: sessions that are missing
    count as an `acc` of 0.
    """
    rows: dict[str, dict[str, _Columns]] = {}
    for place, source in enumerate(data_sources):
        columns = rows.setdefault(source, {}).setdefault(sample_uids[place], {})
        for name, values in infos.items():
            columns.setdefault(name, []).append(values[place])
    _count_missing(rows, expected_acc_counts or {})
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for source, by_uid in rows.items():
        for columns in by_uid.values():
            for name, listed in columns.items():
                for metric, value in _of_prompt(listed).items():
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
    if not len(values):
        return dict.fromkeys((f"{name}/mean", f"{name}/max", f"{name}/min"), np.nan)
    return {f"{name}/mean": values.mean(), f"{name}/max": values.max(), f"{name}/min": values.min()}


def _count_missing(rows: dict[str, dict[str, _Columns]], expected: Mapping[tuple[str, str], int]) -> None:
    with_acc = {
        source
        for source, by_uid in rows.items()
        if any(value is not None for columns in by_uid.values() for value in columns.get("acc", ()))
    }
    for (source, uid), count in expected.items():
        if source in with_acc:
            columns = rows[source].setdefault(uid, {})
            seen = [value for value in columns.get("acc", ()) if value is not None]
            columns["acc_success_only"] = seen
            columns["acc"] = seen + [0.0] * max(count - len(seen), 0)


def _of_prompt(listed: Sequence[Any]) -> dict[str, float]:
    values = [value for value in listed if value is not None]
    if not values or isinstance(values[0], str):
        return {}
    count = len(values)
    metrics = {f"mean@{count}": float(np.mean(values))}
    return metrics if count == 1 else metrics | {f"std@{count}": float(np.std(values))}


__all__ = ["data_metrics", "named", "validation_metrics"]
