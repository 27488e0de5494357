"""ROLL's own scheduler and reward workers with every judge: the run goes on, or ends in one error that says why; and
the fake does the same.

Without ROLL the fake's half runs alone, held against what must hold of ROLL.
"""

from __future__ import annotations

import pytest

from ..checks import outcomes
from ..judges import GROUPS
from ..played import once
from . import fake, scenarios
from .checks import check
from .scenarios import masks

BY_CHANCE = (
    *("/time/", "latency_s", "attempts_", "tokens_", "cost_usd_", "blame_s/"),
    # Whether nonsense is the verdict's fault or the source's depends on how much of it came before.
    *("/failed/infra_", "/failed/verdict_"),
)
"""In the names of metrics that differ between two runs of ROLL itself."""


played_by_fake = once(fake.play)


@pytest.mark.parametrize("scenario", scenarios.ALONE, ids=str)
def test_the_fake_does_what_must_hold_of_roll(scenario):
    check(scenario, played_by_fake(scenario))


@pytest.mark.parametrize("scenario", scenarios.SHARED, ids=str)
def test_roll_does_it_and_the_fake_agrees(play_once, scenario):
    theirs, ours = play_once(scenario), played_by_fake(scenario)
    check(scenario, theirs)
    for mine, rolls in zip(ours.steps, theirs.steps, strict=True):
        # Elsewhere a failed sample has the mean of those that happened to be scored by then.
        if masks(scenario) or scenario.mode != "single" or scenario.scored != "unspoilt":
            assert outcomes(mine) == pytest.approx(outcomes(rolls), abs=1e-4)
        assert numbers(mine) == pytest.approx(numbers(rolls), abs=1e-6)
        assert set(mine.columns) <= set(rolls.columns)
    if scenario in scenarios.ENDING:
        assert "3 groups in a row had fewer than 1 samples with a reward" in theirs.error_text
        # A source that answers nothing but nonsense is put to rest: then that is why there is no verdict.
        expected = ("infra",) if scenario.name.startswith("refused") else ("verdict", "infra/garbage")
        assert any(cause in theirs.error_text for cause in expected), theirs.error_text
    if scenario == scenarios.WHOLE_GROUPS:
        _, *others = scenarios.drawn()
        assert {sample.draft.item for sample in theirs.steps[0].samples} == set(others[:GROUPS])


def numbers(step):
    """Our metrics that are no matter of time."""
    names = (
        name for name in step.metrics if name.startswith("qreward/") and not any(part in name for part in BY_CHANCE)
    )
    return {name: step.metrics[name] for name in names}
