"""slime's dynamic sampling with a filter on rewards: failed groups are replaced, and a dead judge ends that."""

from __future__ import annotations

import re

import pytest

from . import scenarios
from .checks import check
from .scenarios import FILTERED, FILTERED_ALL, FILTERED_ALL_MASKED, FILTERED_DEAD, FILTERED_KEPT


def test_a_group_with_a_single_reward_is_replaced(play_once):
    played = play_once(FILTERED)
    check(FILTERED, played)
    (step,) = played.steps
    assert {sample.draft.item for sample in step.samples} == {0, 2}
    assert step.metrics["rollout/dynamic_filter/drop_qreward_failed"] == 1


@pytest.mark.parametrize("scenario", [FILTERED_ALL, FILTERED_ALL_MASKED], ids=str)
def test_a_group_with_a_failed_sample_is_replaced_where_all_must_be_scored(play_once, scenario):
    played = play_once(scenario)
    check(scenario, played)
    (step,) = played.steps
    assert {sample.draft.item for sample in step.samples} == {1, 2}
    assert step.metrics["rollout/dynamic_filter/drop_qreward_failed"] == 1


def test_a_group_with_enough_rewards_is_kept(play_once):
    played = play_once(FILTERED_KEPT)
    check(FILTERED_KEPT, played)
    (step,) = played.steps
    assert {sample.draft.item for sample in step.samples} == set(range(scenarios.GROUPS))
    assert "rollout/dynamic_filter/drop_qreward_failed" not in step.metrics


@pytest.mark.parametrize("scenario", FILTERED_DEAD, ids=str)
def test_a_judge_that_never_answers_ends_the_run_with_an_error_that_says_why(play_once, scenario):
    played = play_once(scenario)
    check(scenario, played)
    reasons = "infra/garbage|verdict/invalid" if scenario.judge.listens else "infra/"
    assert re.search(reasons, played.error_text), played.error_text
