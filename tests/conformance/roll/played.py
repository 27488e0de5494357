"""What comes out of a scenario, whoever plays it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..judges import Draft


@dataclass(frozen=True)
class PlayedSample:
    """A sample as it was handed to training, or as validation left it."""

    draft: Draft
    domain: str
    score: float
    """`scores` of the batch: what ROLL logs, and counts as correct in validation where it is exactly 1."""
    raw: float | None
    """`response_level_rewards` before normalisation; None where only the trainer saw the batch."""
    trained: float | None
    """`response_level_rewards` after normalisation, None for validation."""
    advantage: float | None
    """The advantage farthest from zero of its tokens, None for validation."""
    mask: int
    """Tokens that train (`final_response_mask`)."""


@dataclass(frozen=True)
class PlayedStep:
    """A training step, or a validation."""

    samples: tuple[PlayedSample, ...]
    metrics: Mapping[str, Any]
    """What ROLL logs of the step, reduced by ROLL."""
    tensors: tuple[str, ...] = ()
    non_tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Played:
    """What came out of a scenario."""

    steps: tuple[PlayedStep, ...]
    error: str | None = None
    """Name of the error that ended the run."""
    error_text: str = ""
    said: tuple[str, ...] = ()
    """Warnings of the logger `roll_adapter`."""
    complaints: tuple[str, ...] = ()
    """What Python found wrong: tasks and sockets left behind, exceptions that nobody took."""
