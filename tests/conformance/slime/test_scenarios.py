"""slime's own rollout with every judge: the job goes on, what failed does not train, and the fake does the same.

Without slime the fake's half runs alone, held against what must hold of slime.
"""

from __future__ import annotations

import re

import pytest

from ..checks import outcomes
from ..judges import GROUPS, Judge
from ..played import once
from ..scenarios import Scenario
from . import fake, scenarios
from .checks import check
from .real import play

FLAG = ("--data-source-path", "slime_adapter.DataSource")


played_by_fake = once(fake.play)


@pytest.mark.parametrize("scenario", scenarios.ALONE, ids=str)
def test_the_fake_does_what_must_hold_of_slime(scenario):
    check(scenario, played_by_fake(scenario))


@pytest.mark.parametrize("scenario", scenarios.SHARED, ids=str)
def test_slime_does_it_and_the_fake_agrees(play_once, scenario):
    theirs, ours = play_once(scenario), played_by_fake(scenario)
    check(scenario, theirs)
    pairs = [*zip(ours.steps, theirs.steps, strict=True), *zip(ours.evaluations, theirs.evaluations, strict=True)]
    for mine, slimes in pairs:
        assert names(mine) == names(slimes)
        # Elsewhere who is scored depends on who comes first.
        if scenario.scored != "some":
            assert outcomes(mine) == pytest.approx(outcomes(slimes), abs=1e-4)
    if items := scenarios.FILTERED_ITEMS.get(scenario.name):
        assert {sample.draft.item for sample in theirs.steps[0].samples} == items
        assert theirs.steps[0].metrics.get("rollout/dynamic_filter/drop_qreward_failed", 0) == (items != {0, 1})
    if scenario in scenarios.FILTERED_DEAD:
        reasons = "infra/garbage|verdict/invalid" if scenario.judge.listens else "infra/"
        assert re.search(reasons, theirs.error_text), theirs.error_text
    if scenario in scenarios.REWARD_KEY:
        (step,) = theirs.steps
        causes = {sample.cause for sample in step.samples}
        assert causes > {""}
        for cause in causes:
            share = sum(sample.cause == cause for sample in step.samples) / len(step.samples)
            assert step.metrics[f"rollout/error_cat/{cause}"] == pytest.approx(share)


def names(step):
    """The metrics of rewards, without those that tell how the time went."""
    return {name for name in step.metrics if "/qreward/" in name and "/blame_s/" not in name}


@pytest.mark.parametrize("scenario", scenarios.NOT_FAKED, ids=str)
def test_what_only_slime_plays(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("key", [None, "score"])
def test_a_generation_that_was_lost_is_a_failed_sample(player, key):
    """The server ends a generation as aborted though slime did not ask: that sample never sees the reward function."""
    played = play(Scenario("lost", Judge(), "any", reward_key=key), player, loses=lambda draft: draft.draft == 2)
    assert played.error is None, played.error_text
    lost = [sample for sample in played.steps[0].samples if sample.status == "aborted"]
    assert len(lost) == GROUPS
    assert all(sample.removed and sample.trained == 0.0 and not any(sample.mask) for sample in lost)
    assert played.said == ()


def test_a_mistake_ends_the_run_before_anything_is_generated(player):
    scenario = Scenario("start", Judge(), "all", evaluate=True)
    played = play(scenario, player, flags=[*FLAG, "--group-rm"])
    assert (played.error, played.steps) == ("ConfigurationError", ())
    assert "--eval-function-path slime_adapter.eval_rollout" in played.error_text


def test_a_run_without_mistakes_is_slimes_own_and_another_reward_function_is_one(player):
    scenario = Scenario("start", Judge(), "all")
    check(scenario, play(scenario, player, flags=FLAG))
    played = play(scenario, player, flags=[*FLAG, "--rm-type", "math"], custom_rm=None)
    assert played.error == "ConfigurationError"
    assert "Add --custom-rm-path slime_adapter.reward" in played.error_text
