"""What comes out of a scenario, whoever plays it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .judges import Draft


@dataclass(frozen=True)
class PlayedSample:
    """A sample as it was handed to training, or as an evaluation left it (then without what trains)."""

    draft: Draft
    reward: Any
    """slime's reward, a number or a dict; of ROLL `scores`, which it logs and counts as correct where it is 1."""
    raw: float | None
    """Before normalisation; None where only the trainer saw the batch."""
    trained: float | None
    """After normalisation."""
    advantages: tuple[float, ...]
    """What each token is trained with."""
    mask: tuple[int, ...]
    """One 0 or 1 for each token of the response."""
    failed: bool | None
    """Whether it has no reward; None where nothing tells."""
    cause: str = ""
    group: Any = None
    """slime's group, ROLL's domain."""
    removed: bool = False
    status: str = "completed"


@dataclass(frozen=True)
class PlayedStep:
    """A training step or an evaluation."""

    samples: tuple[PlayedSample, ...]
    metrics: Mapping[str, Any]
    columns: tuple[str, ...] = ()
    """The names of all that ROLL's batch carries."""
    default: tuple[float, ...] | None = None
    """What slime's own normalisation makes of the same rewards. None where some sample has failed."""


@dataclass(frozen=True)
class Played:
    """What came out of a scenario."""

    steps: tuple[PlayedStep, ...]
    evaluations: tuple[PlayedStep, ...] = ()
    error: str | None = None
    """Name of the error that ended the run."""
    error_text: str = ""
    said: tuple[str, ...] = ()
    """Warnings of the adapter."""
    complaints: tuple[str, ...] = ()
    """What Python found wrong: tasks and sockets left behind, exceptions that nobody took."""


def once(play: Callable[[Any], Played]) -> Callable[[Any], Played]:
    """`play`, which plays a scenario once for all tests that ask."""
    outcomes: dict[str, Played] = {}

    def recall(scenario: Any) -> Played:
        if scenario.name not in outcomes:
            outcomes[scenario.name] = play(scenario)
        return outcomes[scenario.name]

    return recall
