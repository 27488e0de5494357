"""slime's own rollout with every judge: the job goes on, and what failed does not train."""

from __future__ import annotations

import pytest

from ..judges import Judge
from . import scenarios
from .checks import check
from .real import play
from .scenarios import Scenario


@pytest.mark.parametrize("scenario", scenarios.EVERY_JUDGE_IN_EVERY_MODE, ids=str)
def test_no_judge_ends_the_job_or_trains_what_it_did_not_score(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", [*scenarios.BAD_MINUTES, *scenarios.MORE_BAD_MINUTES], ids=str)
def test_a_bad_minute_costs_no_innocent_sample(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", scenarios.PARTIAL_JUDGES, ids=str)
def test_nor_with_partial_rollout(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", scenarios.ESTIMATORS, ids=str)
def test_every_estimator_gets_the_rewards_that_slime_itself_would_give_it(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", scenarios.REWARD_KEY, ids=str)
def test_rewards_are_dicts_where_slime_asks_for_a_key(play_once, scenario):
    played = play_once(scenario)
    check(scenario, played)
    step = played.steps[0]
    causes = {sample.cause for sample in step.samples}
    assert "" in causes
    assert len(causes) > 1, "some have failed"
    for cause in causes:
        share = sum(sample.cause == cause for sample in step.samples) / len(step.samples)
        assert step.metrics[f"rollout/error_cat/{cause}"] == pytest.approx(share)


@pytest.mark.parametrize("scenario", scenarios.WITHOUT_HOOK, ids=str)
def test_without_the_post_process_hook_nothing_breaks_and_the_flag_is_named_once(new_player, scenario):
    played = play(scenario, new_player)
    check(scenario, played)
    again = play(scenario, new_player)
    check(scenario, again)
    assert len(played.said) == 1
    assert "--custom-reward-post-process-path slime_adapter.post_process" in played.said[0]


def test_with_the_hook_nothing_is_said(player):
    scenario = Scenario("hook", Judge(spoils=scenarios.uneven), "unspoilt", engine={"max_attempts": 20})
    assert play(scenario, player).said == ()


def test_waiting_is_told_to_slime(play_once):
    (scenario,) = (each for each in scenarios.EVERY_JUDGE_IN_EVERY_MODE if each.name == "slow-single")
    (step,) = play_once(scenario).steps
    assert all(sample.seconds > 0 for sample in step.samples)
    assert step.metrics["perf/non_generation_time/max"] == max(sample.seconds for sample in step.samples)


def test_a_generation_that_was_lost_is_a_failed_sample(player):
    """The server ends a generation as aborted though slime did not ask: that sample never sees the reward function."""
    scenario = Scenario("lost", Judge(), "any")
    (step,) = play(scenario, player, loses=lambda draft: draft.draft == 2).steps
    lost = [sample for sample in step.samples if sample.status == "aborted"]
    assert len(lost) == scenarios.GROUPS
    assert all(sample.removed and sample.trained == 0.0 and not any(sample.mask) for sample in lost)


def test_a_generation_that_was_lost_is_a_failed_sample_with_a_reward_key_too(player):
    scenario = Scenario("lost", Judge(), "any", reward_key="score", log_category="cause")
    played = play(scenario, player, loses=lambda draft: draft.draft == 2)
    assert played.error is None, played.error_text
    lost = [sample for sample in played.steps[0].samples if sample.status == "aborted"]
    assert len(lost) == scenarios.GROUPS
    assert all(sample.removed and sample.trained == 0.0 and not any(sample.mask) for sample in lost)
