"""The metrics of a step that rewards move (metric_utils.py, `compute_data_metrics`), in float32 as torch has them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .float_sums import mean32, var32


def data_metrics(
    *,
    scores: Any,
    rewards: Any,
    advantages: Any,
    returns: Any,
    mask: Any,
    prompt_lengths: Any,
    response_lengths: Any,
    widths: tuple[int, int],
    num_turns: Any,
    values: Any = None,
) -> dict[str, Any]:
    """`critic/...`, `response_length/...`, `prompt_length/...` and `num_turns/...` of one step.

    `scores` and `rewards` are sums by row; `widths` are those of the prompts' and the responses' tensors.
    """
    trained = np.asarray(mask).astype(bool)
    lengths = np.asarray(response_lengths, dtype=np.float32)
    prompts = np.asarray(prompt_lengths, dtype=np.float32)
    there = lengths != 0
    metrics: dict[str, Any] = {
        **_spread("critic/score", np.asarray(scores)[there]),
        **_spread("critic/rewards", np.asarray(rewards)[there]),
        **_spread("critic/advantages", np.asarray(advantages)[trained]),
        **_spread("critic/returns", np.asarray(returns)[trained]),
    }
    if values is not None:
        metrics |= _value_metrics(np.asarray(values)[trained], np.asarray(returns)[trained])
    metrics |= _lengths("response_length", lengths, widths[1])
    metrics |= _lengths("response_length_non_aborted", lengths[there], widths[1])
    metrics["response/aborted_ratio"] = float(mean32(~there))
    metrics |= _lengths("prompt_length", prompts, widths[0])
    turns = np.asarray(num_turns, dtype=np.int32)
    return metrics | {"num_turns/min": turns.min(), "num_turns/max": turns.max(), "num_turns/mean": turns.mean()}


def _spread(name: str, values: Any) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys((f"{name}/mean", f"{name}/max", f"{name}/min"), math.nan)
    return {
        f"{name}/mean": float(mean32(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def _lengths(name: str, lengths: Any, width: int) -> dict[str, float]:
    if not len(lengths):
        return {**_spread(name, lengths), f"{name}/clip_ratio": math.nan}
    return {**_spread(name, lengths), f"{name}/clip_ratio": float(mean32(lengths == width))}


def _value_metrics(values: Any, returns: Any) -> dict[str, float]:
    spread = _spread("critic/values", values)
    if not len(values):
        return {**spread, "critic/vf_explained_var": math.nan}
    with np.errstate(all="ignore"):
        unexplained = np.float32(var32(returns - values) / np.float32(var32(returns) + np.float32(1e-5)))
    return {**spread, "critic/vf_explained_var": float(np.float32(np.float32(1) - unexplained))}
