"""One line of metrics for several steps or mini-batches. verl has two classes `MetricsAggregator`, whose rules differ:
that of the fully asynchronous trainer (experimental/fully_async_policy/detach_utils.py; without what is made of
seconds) and that of V1 (trainer/ppo/v1/utils.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

_BY_NAME: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sum", ("timing_s/",)),
    ("avg", ("mean", "avg", "average")),
    ("max", ("max", "maximum")),
    ("min", ("min", "minimum")),
    ("sum", ("sum", "total")),
)
"""What is done with a metric whose name contains one of the texts; the first that fits. Else it is averaged."""

_KNOWN = {
    "perf/time_per_step": "sum",
    "timing_s/agent_loop/tool_calls/min": "min",
    "timing_s/agent_loop/tool_calls/mean": "avg",
    "timing_s/agent_loop/tool_calls/max": "max",
    "fully_async/count/total_generated_samples": "last",
    "fully_async/count/stale_samples_processed": "last",
    "fully_async/count/stale_trajectory_processed": "last",
    "fully_async/count/current_param_version": "last",
    "fully_async/count/dropped_stale_samples": "last",
    "training/global_step": "last",
    "dynamic_resource/mq_size": "last",
    "dynamic_resource/train_compute_time_s": "sum",
    "dynamic_resource/train_allocated_time_s": "sum",
}


class MetricsAggregator:
    """The metrics of the steps since the last `reset`."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add_step_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step. What is no number is left out."""
        for name, value in metrics.items():
            if isinstance(value, (int, float, np.number)):
                self._values.setdefault(name, []).append(float(value))

    def get_aggregated_metrics(self) -> dict[str, float]:
        """One value for each metric; empty where no step was added."""
        return {name: _one_of(name, values) for name, values in self._values.items()}

    def reset(self) -> None:
        """Forget the steps."""
        self._values.clear()


def _one_of(name: str, values: list[float]) -> float:
    way = _KNOWN.get(name) or _way_of(name.lower())
    if way == "last":
        return values[-1]
    if way == "avg":
        return sum(values) / len(values)
    return max(values) if way == "max" else min(values) if way == "min" else sum(values)


def _way_of(name: str) -> str:
    return next((way for way, texts in _BY_NAME if any(text in name for text in texts)), "avg")


_SUMMED = frozenset(
    f"{prefix}/{name}"
    for prefix in ("training", "validation")
    for name in (
        "off_policy/evicted_samples",
        "filter_groups/evicted_samples",
        "filter_groups/discarded_surplus_samples",
        "rollout_failure/evicted_samples",
    )
)


class MiniBatchMetrics:
    """The metrics of the mini-batches of one step of V1: added up, the largest, the smallest, or the mean weighted by
    samples, as their names say.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, int]]] = {}
        self._counters: dict[str, Counter[float]] = {}

    def add(self, metrics: Mapping[str, Any], count: int) -> None:
        """The metrics of a mini-batch of `count` samples."""
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                self._counters.setdefault(name, Counter()).update(value)
                continue
            weight = count
            if name.endswith("/off_policy/evicted_samples_staleness/mean"):
                weight = int(metrics.get(name.removesuffix("_staleness/mean"), count))
            self._values.setdefault(name, []).append((float(value), weight))

    def aggregated(self) -> dict[str, Any]:
        """One value for each metric."""
        counters = {name: dict(counter) for name, counter in self._counters.items() if counter}
        return {name: _of_mini_batches(name, values) for name, values in self._values.items()} | counters


def _of_mini_batches(name: str, weighted: list[tuple[float, int]]) -> float:
    values = [value for value, _ in weighted]
    if name in _SUMMED:
        return sum(values)
    if "max" in name.lower():
        return max(values)
    if "min" in name.lower():
        return min(values)
    if "sum" in name.lower() or "total" in name.lower():
        return sum(values)
    total = sum(weight for _, weight in weighted)
    if not total:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in weighted) / total


__all__ = ["MetricsAggregator", "MiniBatchMetrics"]
