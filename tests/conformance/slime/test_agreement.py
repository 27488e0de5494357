"""The fake trainer is worth something as far as it does what slime does: same scenario, same outcome.

Without slime the fake's half runs alone, held against what must hold of slime.
"""

from __future__ import annotations

import pytest

from . import fake
from .checks import check
from .played import Played, PlayedSample, PlayedStep
from .scenarios import SHARED

BY_CHANCE = ("some", "any")
"""Where who is scored depends on who comes first, only how many is the same."""


@pytest.fixture(scope="module")
def played_by_fake():
    """What the fake made of a scenario, played once."""
    outcomes: dict[str, Played] = {}

    def play(scenario):
        if scenario.name not in outcomes:
            outcomes[scenario.name] = fake.play(scenario)
        return outcomes[scenario.name]

    return play


@pytest.mark.parametrize("scenario", SHARED, ids=str)
def test_the_fake_does_what_must_hold_of_slime(played_by_fake, scenario):
    check(scenario, played_by_fake(scenario))


@pytest.mark.parametrize("scenario", SHARED, ids=str)
def test_slime_and_the_fake_agree(play_once, played_by_fake, scenario):
    ours, theirs = played_by_fake(scenario), play_once(scenario)
    assert ours.error == theirs.error, (ours.error_text, theirs.error_text)
    assert len(ours.steps) == len(theirs.steps)
    for kind in ("steps", "evaluations"):
        for mine, slimes in zip(getattr(ours, kind), getattr(theirs, kind), strict=True):
            assert len(mine.samples) == len(slimes.samples)
            assert failures(mine) == failures(slimes)
            assert names(mine) == names(slimes)
            if scenario.scored not in BY_CHANCE:
                assert outcomes(mine) == pytest.approx(outcomes(slimes), abs=1e-5)
                assert advantages(mine) == pytest.approx(advantages(slimes), abs=1e-4)


def advantages(step: PlayedStep) -> dict[object, float]:
    """What every token is trained with; nothing for an evaluation."""
    if not step.advantages:
        return {}
    return {
        (sample.draft, place): value
        for sample, values in zip(step.samples, step.advantages, strict=True)
        for place, value in enumerate(values)
    }


def failures(step: PlayedStep) -> dict[str, float]:
    """What the metrics say of failures."""
    return {name: value for name, value in step.metrics.items() if name.rpartition("/")[2] in ("failed", "failed_rate")}


def names(step: PlayedStep) -> set[str]:
    """The metrics of rewards, without those that tell how the time went."""
    return {name for name in step.metrics if "/qreward/" in name and "/blame_s/" not in name}


def outcomes(step: PlayedStep) -> dict[tuple[object, ...], float]:
    """All that training gets, flat: `pytest.approx` compares numbers one level deep."""
    flat: dict[tuple[object, ...], float] = {}
    for sample in step.samples:
        for name, value in told(sample).items():
            flat[(sample.draft, name)] = value
    return flat


def told(sample: PlayedSample) -> dict[str, float]:
    numbers = sample.reward if isinstance(sample.reward, dict) else {"reward": sample.reward}
    numbers = {name: value for name, value in numbers.items() if isinstance(value, (int, float))}
    if sample.raw is None and sample.failed:
        # A stand-in that evaluation leaves out: the mean of what happened to be scored by then.
        numbers = {}
    if sample.raw is not None:
        numbers |= {"raw": sample.raw, "trained": sample.trained, "trains": float(any(sample.mask))}
    return {**numbers, "failed": float(sample.failed), "removed": float(sample.removed)}
