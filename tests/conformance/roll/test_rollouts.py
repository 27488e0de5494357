"""ROLL's own scheduler and reward workers with every judge: the run goes on, or ends in one error that says why."""

from __future__ import annotations

import pytest

from ..judges import GROUPS
from . import scenarios
from .checks import check, check_remedy


@pytest.mark.parametrize("scenario", scenarios.ALIVE, ids=str)
def test_no_judge_ends_the_run_or_trains_what_it_did_not_score(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", [*scenarios.BAD_MINUTES, *scenarios.MORE_BAD_MINUTES], ids=str)
def test_a_bad_minute_costs_no_innocent_sample(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", scenarios.VALIDATED, ids=str)
def test_validation_counts_what_the_judge_calls_correct(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", scenarios.ASYNCHRONOUS, ids=str)
def test_prompts_may_be_sampled_ahead(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", scenarios.TWO_WORKERS, ids=str)
def test_several_workers_share_a_domain(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("scenario", scenarios.DEAD, ids=str)
def test_a_judge_without_verdicts_ends_the_run_with_one_error(play_once, scenario):
    played = play_once(scenario)
    check(scenario, played)
    assert "3 groups in a row had fewer than 1 samples with a reward" in played.error_text
    # A source that answers nothing but nonsense is put to rest: then that is why there is no verdict.
    expected = ("infra",) if scenario.name.startswith(("refused", "broken")) else ("verdict", "infra/garbage")
    assert any(cause in played.error_text for cause in expected), played.error_text


def test_a_judge_that_dies_in_mid_batch_ends_the_run_once_no_group_has_a_reward(play_once):
    scenario, _ = scenarios.DYING
    check(scenario, play_once(scenario))


def test_a_judge_that_dies_in_mid_batch_leaves_a_finite_batch_without_the_loop(play_once):
    _, scenario = scenarios.DYING
    played = play_once(scenario)
    check(scenario, played)
    (step,) = played.steps
    assert step.metrics["qreward/failed_sum"] == len(step.samples) - scenario.judge.answers


@pytest.mark.parametrize("scenario", scenarios.WITHOUT_LOOP, ids=str)
def test_without_the_loop_everything_is_finite_and_the_remedy_is_named_once(play_once, scenario):
    played = play_once(scenario)
    check(scenario, played)
    check_remedy(played)


def test_a_group_with_too_few_rewards_is_replaced(play_once):
    scenario = scenarios.WHOLE_GROUPS
    played = play_once(scenario)
    check(scenario, played)
    (step,) = played.steps
    _, *others = scenarios.drawn()
    assert {sample.draft.item for sample in step.samples} == set(others[:GROUPS])


@pytest.mark.parametrize("scenario", scenarios.ON_FAILURE, ids=str)
def test_a_failure_is_what_the_configuration_says(play_once, scenario):
    check(scenario, play_once(scenario))
