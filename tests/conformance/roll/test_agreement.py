"""The fake trainer is worth something as far as it does what ROLL does: same scenario, same outcome.

Without ROLL the fake's half runs alone, held against what must hold of ROLL.
"""

from __future__ import annotations

import pytest

from .checks import check, check_remedy, has_failed
from .played import Played, PlayedSample, PlayedStep
from .scenarios import ROLLOUTS, SHARED, WITHOUT_LOOP, Scenario

torch = pytest.importorskip("torch", reason="FakeRollTrainer needs torch")
torch.set_num_threads(1)

from . import fake  # noqa: E402

BY_CHANCE = (
    *("/time/", "/latency_s", "/attempts_", "/tokens_", "/cost_usd_"),
    # Whether nonsense is the verdict's fault or the source's depends on how much of it came before.
    *("/failed/infra_", "/failed/verdict_"),
)
"""In the names of metrics that differ between two runs of ROLL itself."""


@pytest.fixture(scope="module")
def played_by_fake():
    """What the fake made of a scenario, played once."""
    outcomes: dict[str, Played] = {}

    def play(scenario):
        if scenario.name not in outcomes:
            outcomes[scenario.name] = fake.play(scenario)
        return outcomes[scenario.name]

    return play


@pytest.mark.parametrize("scenario", [each for each in ROLLOUTS if not each.asynchronous], ids=str)
def test_the_fake_does_what_must_hold_of_roll(played_by_fake, scenario):
    check(scenario, played_by_fake(scenario))


@pytest.mark.parametrize("scenario", WITHOUT_LOOP, ids=str)
def test_the_remedy_is_named_on_the_fake_as_well(played_by_fake, scenario):
    check_remedy(played_by_fake(scenario))


@pytest.mark.parametrize("scenario", [each for each in SHARED if not each.asynchronous], ids=str)
def test_roll_and_the_fake_agree(play_once, played_by_fake, scenario):
    ours, theirs = played_by_fake(scenario), play_once(scenario)
    assert ours.error == theirs.error, (ours.error_text, theirs.error_text)
    assert len(ours.steps) == len(theirs.steps)
    for mine, rolls in zip(ours.steps, theirs.steps, strict=True):
        assert outcomes(mine, scenario) == pytest.approx(outcomes(rolls, scenario), abs=1e-4)
        assert numbers(mine) == pytest.approx(numbers(rolls), abs=1e-6)
        assert names(mine) == names(rolls)
        assert set(mine.tensors) <= set(rolls.tensors)
        assert set(mine.non_tensors) <= set(rolls.non_tensors)


def outcomes(step: PlayedStep, scenario: Scenario) -> dict[tuple[object, ...], float]:
    """All that training gets of every sample, flat: `pytest.approx` compares numbers one level deep."""
    return {
        (sample.draft, sample.domain, name): value
        for sample in step.samples
        for name, value in told(sample, scenario).items()
        if value is not None
    }


def told(sample: PlayedSample, scenario: Scenario) -> dict[str, float | None]:
    numbers = {"score": sample.score, "tokens": float(sample.mask)}
    if not (scenario.mode == "single" and scenario.scored == "unspoilt" and not scenario.loop):
        return {**numbers, "raw": sample.raw, "trained": sample.trained, "advantage": sample.advantage}
    # A failed sample has the mean of those that happened to be scored by then, and moves its whole group.
    return numbers if has_failed(scenario, sample) else {**numbers, "raw": sample.raw}


def names(step: PlayedStep) -> set[str]:
    """The metrics of rewards, but for what a batch waited for: that is by chance."""
    return {name for name in step.metrics if name.startswith("qreward/") and "qreward/blame_s/" not in name}


def numbers(step: PlayedStep) -> dict[str, float]:
    """Those that are no matter of time."""
    return {name: step.metrics[name] for name in names(step) if not any(part in name for part in BY_CHANCE)}
