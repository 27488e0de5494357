"""What comes out of a scenario, whoever plays it, and what must hold of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .judges import Draft
from .scenarios import Scenario

TOLERANCE = 2e-5
"""Frameworks compute in float32."""
NORMALISING = 1e-3
"""What float32 loses where a group's deviation is small."""


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


# What must hold


def check_run(scenario: Scenario, played: Played) -> bool:
    """How it ended; whether there is anything more to check."""
    assert played.error == scenario.error, played.error_text
    assert not played.complaints, "\n".join(played.complaints)
    return scenario.error is None


def check_failures(scenario: Scenario, step: PlayedStep) -> None:
    """Those samples have failed that had to, and all numbers are finite."""
    failed = {sample.draft for sample in step.samples if sample.failed}
    if scenario.scored in ("all", "none", "unspoilt"):
        assert failed == {sample.draft for sample in step.samples if scenario.fails(sample.draft)}
    if scenario.scored == "some" and all(sample.failed is not None for sample in step.samples):
        assert len(step.samples) - len(failed) == scenario.judge.answers
    for sample in step.samples:
        numbers = (sample.raw, sample.trained, *sample.advantages)
        assert all(number is None or math.isfinite(number) for number in numbers), sample


def check_raw(samples: Sequence[PlayedSample], raw_of_failed: float | None) -> None:
    """Scored samples of a group have the judge's reward and train, failed ones this number (None: any)."""
    for sample in samples:
        if not sample.failed:
            assert sample.raw is None or close(sample.raw, sample.draft.reward), sample
            assert sum(sample.mask), sample
        elif raw_of_failed is not None and sample.raw is not None:
            assert close(sample.raw, raw_of_failed), (raw_of_failed, sample)


def middle_of(samples: Iterable[PlayedSample]) -> float | None:
    """The mean of the scored samples' rewards, None if there are none."""
    rewards = [sample.draft.reward for sample in samples if not sample.failed]
    return statistics.fmean(rewards) if rewards else None


def check_counts(scenario: Scenario, metrics: Mapping[str, float], step: PlayedStep, total: str = "{}") -> None:
    """Metrics without their prefix count the samples and the failures, and all are finite; `total` makes the name of a
    sum.
    """
    assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in metrics.values()), metrics
    count = len(step.samples)
    by_cause = sum(metrics[total.format(f"failed/{cause}")] for cause in ("infra", "verdict", "policy"))
    assert close(metrics[total.format("samples")], count)
    assert close(metrics[total.format("failed")], by_cause)
    assert close(metrics["failed_rate"], by_cause / count)
    assert by_cause == 0 or scenario.judged_by != "screened"
    if all(sample.failed is not None for sample in step.samples):
        # What a monitor took out has not failed.
        out = by_cause + metrics["screened_rate"] * count
        assert close(out, sum(bool(sample.failed) for sample in step.samples))


def by_item(samples: Sequence[PlayedSample]) -> list[list[PlayedSample]]:
    """The groups of a step, each in the order of its samples."""
    groups: dict[int, list[PlayedSample]] = {}
    for sample in samples:
        groups.setdefault(sample.draft.item, []).append(sample)
    return list(groups.values())


def own_metrics(step: PlayedStep, prefix: str) -> dict[str, float]:
    """Our metrics by their names after the prefix."""
    return {name.removeprefix(prefix): value for name, value in step.metrics.items() if name.startswith(prefix)}


def close(one: float | None, other: float, tolerance: float = TOLERANCE) -> bool:
    return one is not None and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def outcomes(step: PlayedStep) -> dict[tuple[object, ...], float]:
    """All that training gets, flat: `pytest.approx` compares numbers one level deep."""
    flat: dict[tuple[object, ...], float] = {}
    for sample in step.samples:
        rewards = sample.reward if isinstance(sample.reward, dict) else {"reward": sample.reward}
        numbers = {name: value for name, value in rewards.items() if isinstance(value, (int, float))}
        if sample.trained is None and sample.failed:
            # A stand-in that an evaluation leaves out: the mean of what happened to be scored by then.
            numbers = {}
        numbers |= {"trained_tokens": sum(sample.mask), "removed": sample.removed}
        if sample.trained is not None:
            numbers |= {"trained": sample.trained, **dict(enumerate(sample.advantages))}
        if sample.trained is not None and sample.raw is not None:
            numbers["raw"] = sample.raw
        flat |= {(sample.draft, name): float(value) for name, value in numbers.items()}
    return flat
