"""Collects metrics and reduces them by the suffix of their names, as ROLL does (functionals.py, `reduce_metrics`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .protocol import RollDataProto

_REDUCERS: dict[str, Any] = {
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "p50": lambda values: np.percentile(values, 50),
    "p99": lambda values: np.percentile(values, 99),
    "std": np.std,
    "sum": np.sum,
}


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce lists by the suffix `@tag` or `_tag` of their name, else to their mean; keep numbers.

    Raises `ValueError` for an unknown `@tag`, and numpy's errors for lists with anything but numbers.
    """
    reduced: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, (int, float, np.number, torch.Tensor)):
            reduced[name] = value
        elif isinstance(value, (list, tuple, np.ndarray)):
            reduced[name] = value if len(value) == 0 else float(_reducer(name)(value))
        else:
            reduced[name] = float(np.mean(value))
    return reduced


def _reducer(name: str) -> Any:
    _, at, tag = name.rpartition("@")
    if at:
        if tag.strip() not in _REDUCERS:
            raise ValueError(f"Unknown reducer tag {tag!r} in metric {name!r}; known are {', '.join(_REDUCERS)}")
        return _REDUCERS[tag.strip()]
    return next((reducer for tag, reducer in _REDUCERS.items() if name.endswith(f"_{tag}")), np.mean)


class Durations:
    """The number and duration of a domain's requests."""

    def __init__(self) -> None:
        self._took_s: dict[str, list[float]] = {"generate": [], "reward": []}

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._took_s[kind].append(time.monotonic() - started_s)

    def log(self, prefix: str) -> dict[str, float]:
        """The metrics since the last call."""
        metrics: dict[str, float] = {}
        for kind, took_s in self._took_s.items():
            metrics[f"{prefix}/{kind}/count"] = len(took_s)
            metrics[f"{prefix}/{kind}/min"] = min(took_s, default=0.0)
            metrics[f"{prefix}/{kind}/max"] = max(took_s, default=0.0)
            metrics[f"{prefix}/{kind}/mean"] = sum(took_s) / len(took_s) if took_s else 0.0
            took_s.clear()
        return metrics


def batch_metrics(parts: Mapping[str, RollDataProto], prompts: int, off_policy_ratio: float) -> dict[str, Any]:
    """The metrics that a scheduler adds: scores by domain, and mean, max and min of the workers' metrics."""
    own = {
        "scheduler/collect_query_count": prompts,
        "scheduler/query_use_count": prompts,
        "scheduler/off_policy_ratio": off_policy_ratio,
    }
    metrics: dict[str, Any] = dict(own)
    for domain, part in parts.items():
        metrics.update(_spread_of(f"scheduler/{domain}/score", part.batch["scores"]))
        for name, value in part.meta_info.get("metrics", {}).items():
            numbers = np.mean(value).item(), np.max(value).item(), np.min(value).item()
            metrics.update(_spread(f"scheduler/{domain}/{name}", *numbers))
        # ROLL adds its own numbers to those of every response first.
        for name, number in own.items():
            metrics.update(_spread(f"scheduler/{domain}/{name}", number, number, number))
    return metrics


def _spread(name: str, mean: float, high: float, low: float) -> dict[str, float]:
    return {f"{name}/mean": mean, f"{name}/max": high, f"{name}/min": low}


def _spread_of(name: str, values: torch.Tensor) -> dict[str, float]:
    return _spread(name, values.mean().item(), values.max().item(), values.min().item())


def value_metrics(batch: RollDataProto) -> dict[str, float]:
    """ROLL's `critic/` and `token/` metrics that depend on rewards (metrics_manager.py)."""
    scores = batch.batch["scores"]
    rewards = batch.batch["token_level_rewards"].sum(-1)
    trained = batch.batch["final_response_mask"].bool()
    lengths = batch.batch["response_mask"][:, 1:].sum(-1).float()
    metrics = {
        "critic/correct/mean": (scores == 1).float().mean().item(),
        **_spread_of("critic/score", scores),
        **_spread_of("critic/rewards", rewards),
        **_spread_of("token/response_length", lengths),
    }
    if trained.any():
        metrics |= _spread_of("critic/advantages", batch.batch["advantages"][trained])
    return metrics
