"""What verl makes of the scores of a validation (metric_utils.py, `process_validation_metrics`).

For each data source and variable it is the mean over prompts of what the n responses of each prompt show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Nested: TypeAlias = "dict[str, dict[str, dict[str, float]]]"
_Columns: TypeAlias = "dict[str, list[Any]]"

_BOOTSTRAPS = 1000


def validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos: Mapping[str, Sequence[Any]],
    seed: int = 42,
    expected_acc_counts: Mapping[tuple[str, str], int] | None = None,
) -> Nested:
    """`{data source: {variable: {"mean@n": ...}}}`, with `best@`, `worst@` and, where there is a `pred`, `maj@` for
    n > 1. None and texts are left out. `expected_acc_counts`: sessions that are missing count as an `acc` of 0.
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
            for name in columns:
                for metric, value in _of_prompt(columns, name, seed).items():
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
            most = max(int(metric.split("@")[-1].split("/")[0]) for metric in by_metric)
            for metric, value in by_metric.items():
                is_core = name == core and metric.startswith(("mean", "maj", "best")) and f"@{most}" in metric
                averages[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
    if len(turns):
        column = np.asarray(turns)
        averages["val-aux/num_turns/min"] = column.min()
        averages["val-aux/num_turns/max"] = column.max()
        averages["val-aux/num_turns/mean"] = column.mean()
    return averages


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


def _of_prompt(columns: _Columns, name: str, seed: int) -> dict[str, float]:
    values = [value for value in columns[name] if value is not None]
    if not values or isinstance(values[0], str):
        return {}
    count = len(values)
    metrics = {f"mean@{count}": float(np.mean(values))}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(np.std(values))
    votes = columns.get("pred")
    voted = votes is not None and len(votes) == count and all(vote is not None for vote in votes)
    for size in _sizes(count):
        best, worst = _bootstrap(values, size, seed, (np.max, np.min))
        metrics |= {f"best@{size}/mean": best[0], f"best@{size}/std": best[1]}
        metrics |= {f"worst@{size}/mean": worst[0], f"worst@{size}/std": worst[1]}
        if voted:
            pairs = list(zip(votes or (), values, strict=True))
            ((mean, std),) = _bootstrap(pairs, size, seed, (_majority,))
            metrics |= {f"maj@{size}/mean": mean, f"maj@{size}/std": std}
    return metrics


def _sizes(count: int) -> list[int]:
    sizes = []
    size = 2
    while size < count:
        sizes.append(size)
        size *= 2
    return [*sizes, count]


def _bootstrap(
    data: Sequence[Any], size: int, seed: int, reduce: Sequence[Callable[[Any], Any]]
) -> list[tuple[float, float]]:
    chosen = np.random.RandomState(seed).choice(len(data), size=(_BOOTSTRAPS, size), replace=True)
    plain = all(isinstance(value, (int, float, np.number)) and math.isfinite(value) for value in data)
    column = np.empty(len(data), dtype=object)
    column[:] = data
    results = []
    for function in reduce:
        if plain and function in (np.max, np.min):
            numbers = np.asarray([float(value) for value in data])[chosen]
            found = numbers.max(axis=1) if function is np.max else numbers.min(axis=1)
        else:
            found = np.array([function(column[row]) for row in chosen], dtype=np.float64)
        results.append((float(np.mean(found)), float(np.std(found))))
    return results


def _majority(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The first value of the vote that most have."""
    values: dict[Any, list[Any]] = {}
    for vote, value in pairs:
        values.setdefault(vote, []).append(value)
    return max(values.values(), key=len)[0]
