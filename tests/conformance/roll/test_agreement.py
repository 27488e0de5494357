"""The fake trainer is worth something as far as it does what ROLL does: same scenario, same outcome.

Without ROLL the fake's half runs alone, held against what must hold of ROLL.
"""

from __future__ import annotations

import pytest

from .checks import check
from .scenarios import SHARED, Played, PlayedStep

fake = pytest.importorskip(f"{__package__}.fake", reason="FakeRollTrainer is not there yet")


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
def test_the_fake_does_what_must_hold_of_roll(played_by_fake, scenario):
    check(scenario, played_by_fake(scenario))


@pytest.mark.parametrize("scenario", SHARED, ids=str)
def test_roll_and_the_fake_agree(play_once, played_by_fake, scenario):
    ours, theirs = played_by_fake(scenario), play_once(scenario)
    assert ours.error == theirs.error, (ours.error_text, theirs.error_text)
    for mine, rolls in zip(ours.steps, theirs.steps, strict=True):
        assert outcomes(mine, scenario) == pytest.approx(outcomes(rolls, scenario), abs=1e-4)
        assert counts(mine) == pytest.approx(counts(rolls))
        assert names(mine) == names(rolls)


def outcomes(step: PlayedStep, scenario) -> dict[tuple[object, ...], float]:
    """All that training gets of every sample, flat: `pytest.approx` compares numbers one level deep."""
    by_chance = scenario.mode == "single" and not scenario.masks and not scenario.validation
    flat: dict[tuple[object, ...], float] = {}
    for sample in step.samples:
        told = {"score": sample.score, "raw": sample.raw, "trained": sample.trained, "advantage": sample.advantage}
        if by_chance:
            # A failed sample has the mean of those that happened to be scored by then, and moves its whole group.
            told = {} if scenario.scored == "unspoilt" else told
        for name, value in {**told, "trains": float(bool(sample.mask))}.items():
            if value is not None:
                flat[(sample.draft, sample.domain, name)] = value
    return flat


def counts(step: PlayedStep) -> dict[str, float]:
    """What the metrics say of samples and failures."""
    kinds = ("samples_sum", "failed_sum", "failed_rate", "infra_sum", "verdict_sum", "policy_sum")
    return {name: value for name, value in step.metrics.items() if "qreward/" in name and name.endswith(kinds)}


def names(step: PlayedStep) -> set[str]:
    """The metrics of rewards, without ROLL's own further reductions of them."""
    return {name for name in step.metrics if name.startswith("qreward/")}
