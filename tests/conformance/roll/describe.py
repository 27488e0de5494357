"""A batch of ROLL's in plain numbers, and what the tests look at of it, whoever has made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..judges import Draft, read_response
from ..played import PlayedSample, PlayedStep
from ..scenarios import Scenario
from .scenarios import masks


def describe(batch: Any, texts: Sequence[str], raw: Iterable[float | None] | None = None) -> dict[str, Any]:
    """The samples of a batch in order, with the texts of their responses and the rewards before normalisation, and the
    names of what it carries.
    """
    tensors, count = batch.batch, len(texts)
    masked = tensors["final_response_mask" if "final_response_mask" in tensors else "response_mask"]
    advantages = np.asarray(tensors["advantages"]) if "advantages" in tensors else [None] * count
    rewards = np.asarray(tensors["response_level_rewards"]).tolist()
    columns = {
        "response": texts,
        "domain": batch.non_tensor_batch["domain"],
        "score": np.asarray(tensors["scores"]).tolist(),
        "reward": rewards,
        "raw": raw or [None] * count,
        "advantage": [None if row is None else _largest(row) for row in advantages],
        "mask": np.asarray(masked).sum(-1).tolist(),
    }
    samples = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return {"samples": samples, "columns": sorted([*tensors.keys(), *batch.non_tensor_batch.keys()])}


def played_step(told: Mapping[str, Any], scenario: Scenario) -> PlayedStep:
    """A step as `describe` tells it, with its metrics."""
    samples = tuple(played_sample(sample, scenario) for sample in told["samples"])
    return PlayedStep(samples, told["metrics"], tuple(told["columns"]))


def played_sample(told: Mapping[str, Any], scenario: Scenario) -> PlayedSample:
    """A sample as `describe` tells it."""
    draft = read_response(told["response"]) if told["response"] else Draft(-1, -1)
    trains = told["advantage"] is not None
    return PlayedSample(
        draft,
        told["score"],
        told["raw"],
        told["reward"] if trains else None,
        (told["advantage"],) if trains else (),
        (1,) * int(told["mask"]),
        not told["mask"] if masks(scenario) else scenario.fails(draft),
        group=told["domain"],
    )


def _largest(values: Any) -> float:
    """The value farthest from zero; NaN where there is one."""
    return float(values[np.abs(values).argmax()]) if np.isfinite(values).all() else float("nan")
