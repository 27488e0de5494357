"""What comes out of a scenario, whoever plays it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..judges import Draft


@dataclass(frozen=True)
class PlayedSample:
    """A sample as it was handed to training, or as evaluation left it."""

    draft: Draft
    group: int | None
    reward: float | Mapping[str, Any] | None
    raw: float | None
    """The raw reward in the train data, None for evaluation."""
    trained: float | None
    """The reward after normalisation in the train data, None for evaluation."""
    mask: tuple[int, ...]
    failed: bool
    cause: str
    removed: bool
    status: str = "completed"
    seconds: float = 0.0
    """What slime was told that it waited (`non_generation_time`)."""


@dataclass(frozen=True)
class PlayedStep:
    """A training step or an evaluation."""

    samples: tuple[PlayedSample, ...]
    metrics: Mapping[str, Any]
    default: tuple[float, ...] | None = None
    """What slime's own normalisation makes of the same rewards. None where some sample has failed."""
    advantages: tuple[tuple[float, ...], ...] = ()
    """What the trainer makes of it: for each sample one number a token. Empty where it ends with an error."""
    training_error: str = ""
    """The error that ends the training, if one does."""


@dataclass(frozen=True)
class Played:
    """What came out of a scenario."""

    steps: tuple[PlayedStep, ...]
    evaluations: tuple[PlayedStep, ...] = ()
    error: str | None = None
    """Name of the error that ended the job."""
    error_text: str = ""
    said: tuple[str, ...] = ()
    """Warnings of the logger `slime_adapter`."""
    complaints: tuple[str, ...] = ()
    """What Python found wrong: tasks and sockets left behind, exceptions that nobody took."""
