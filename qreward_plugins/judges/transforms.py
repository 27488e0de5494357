"""Maps the score of a reward model to a reward: the steps of `transform`, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..config.judge_models import Interval
from ..config.nodes import Node, Number, takes
from .calibration import Calibration


def _not_zero(scale: float) -> float:
    if scale == 0:
        raise ValueError("0 would give every response the same reward")
    return scale


def _as_mapping(step: Any) -> Any:
    """Read the step `sigmoid`, which has no settings."""
    if isinstance(step, str) and step != "sigmoid":
        raise ValueError("only the step `sigmoid` has no settings; write the others as {zscore: FILE}")
    return {step: True} if isinstance(step, str) else step


def _as_list(steps: Any) -> Any:
    """Read a single step."""
    return [steps] if isinstance(steps, (str, dict)) else steps


class Affine(Node):
    """scale * score + shift."""

    scale: Annotated[Number, AfterValidator(_not_zero)] = 1.0
    """Factor on the score; below 0 for a model that gives good responses low scores. Default: 1."""

    shift: Number = 0.0
    """Added after the factor. Default: 0."""


class TransformStep(Node):
    """One step; exactly one of its keys is set."""

    affine: Affine | None = None
    """`{scale: 0.5, shift: 1}`: scale * score + shift."""

    clip: Interval | None = None
    """`[-3, 3]`: scores beyond this range are set to its end."""

    sigmoid: Literal[True] | None = None
    """`sigmoid`: 1 / (1 + exp(-score)), 0 to 1."""

    zscore: Annotated[str, Field(min_length=1)] | None = None
    """Path to a file of reference scores that `qreward calibrate` has written: (score - mean) / standard deviation. It
    must be the first step, because the file describes the scores as they come from the model."""

    @model_validator(mode="after")
    def _one(self) -> TransformStep:
        keys = sorted(self.model_fields_set)
        if len(keys) != 1:
            raise ValueError("a step has exactly one of the keys affine, clip, sigmoid and zscore")
        return self


def _zscore_first(steps: tuple[TransformStep, ...]) -> tuple[TransformStep, ...]:
    if any(step.zscore is not None for step in steps[1:]):
        raise ValueError("zscore must be the first step")
    return steps


TransformSteps = Annotated[
    tuple[Annotated[TransformStep, BeforeValidator(_as_mapping)], ...],
    AfterValidator(_zscore_first),
    BeforeValidator(_as_list),
    takes("a step, or a list of steps"),
]
"""A list of steps, or a single one."""


def zscore_file(steps: Sequence[TransformStep]) -> str | None:
    """Return the path of the calibration that the steps use; None if they use none."""
    return next((step.zscore for step in steps if step.zscore is not None), None)


class Transform:
    """The steps of a judge. `calibration` holds the reference scores of the step `zscore`, if there is one."""

    def __init__(self, steps: Sequence[TransformStep], calibration: Calibration | None) -> None:
        self._apply = [_function(step, calibration) for step in steps]

    def __call__(self, score: float) -> float:
        """Return the reward. It may be infinite."""
        for apply in self._apply:
            score = apply(score)
        return score

    def inverse(self, reward: float, *, low: float = -1e6, high: float = 1e6) -> float:
        """Return a score from `low` to `high` whose reward is near `reward`. All steps are monotone."""
        rising = self(high) >= self(low)
        for _ in range(80):
            middle = (low + high) / 2
            if (self(middle) < reward) == rising:
                low = middle
            else:
                high = middle
        return high if rising else low


def sigmoid(score: float) -> float:
    """Return 1 / (1 + exp(-score)) without overflow."""
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


def _function(step: TransformStep, calibration: Calibration | None) -> Callable[[float], float]:
    if step.affine is not None:
        scale, shift = step.affine.scale, step.affine.shift
        return lambda score: scale * score + shift
    if step.clip is not None:
        low, high = step.clip
        return lambda score: min(max(score, low), high)
    if step.zscore is not None:
        if calibration is None:
            raise ValueError("the step zscore needs a calibration")
        mean, deviation = calibration.mean, calibration.std
        return lambda score: (score - mean) / deviation
    return sigmoid
