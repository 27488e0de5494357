"""Dynamic sampling: failed groups are replaced, and a dead judge ends the run instead of the batch never filling."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

import slime_adapter
from qreward_plugins import JudgeUnavailable
from qreward_plugins.testing import FakeSlimeTrainer, JudgeServer, slime_stand_in


@pytest.fixture
def groups(make_group):
    def make(*scored, cause="infra/deadline"):
        group = make_group(*["text"] * len(scored))
        for sample, is_scored in zip(group, scored, strict=True):
            sample.reward = 0.5
            sample.metadata = {"qreward": {"excluded": not is_scored, "cause": "" if is_scored else cause}}
        return group

    return make


def test_a_group_with_a_failed_sample_is_dropped_under_its_reason(make_args, groups):
    args = make_args(tree={"groups": {"min_scored": "all"}})
    output = slime_adapter.drop_failed_groups(args, groups(1, 1, 0, 1))
    assert (output.keep, output.reason, output.keep_when_insufficient) == (False, "qreward_failed", False)
    output = slime_adapter.drop_failed_groups(args, groups(1, 1, 1, 1))
    assert (output.keep, output.reason) == (True, None)


def test_min_scored_says_how_many_are_enough(make_args, groups):
    args = make_args(tree={"groups": {"min_scored": 3}})
    assert slime_adapter.drop_failed_groups(args, groups(1, 1, 0, 1)).keep
    assert not slime_adapter.drop_failed_groups(args, groups(1, 0, 0, 1)).keep
    assert slime_adapter.drop_failed_groups(args, groups(1, 1)).keep


def test_a_group_of_rollouts_that_became_several_samples_is_looked_into(make_args, groups):
    one, two = groups(1, 1), groups(1, 0)
    args = make_args(tree={"groups": {"min_scored": 4}})
    assert not slime_adapter.drop_failed_groups(args, [one, two]).keep
    assert slime_adapter.drop_failed_groups(args, [one, one]).keep


def test_what_another_function_scored_is_judged_by_its_number(make_args, make_group):
    group = make_group("a", "b")
    group[0].reward, group[1].reward = 1.0, None
    assert not slime_adapter.drop_failed_groups(make_args(), group).keep
    group[1].reward = 0.0
    assert slime_adapter.drop_failed_groups(make_args(), group).keep


def test_a_dead_judge_ends_in_one_clear_error(make_args, groups):
    args = make_args(tree={"groups": {"give_up_after": 3}})
    for _ in range(2):
        assert not slime_adapter.drop_failed_groups(args, groups(0, 0)).keep
    with pytest.raises(JudgeUnavailable, match=r"3 groups in a row .*infra/deadline 6 times"):
        slime_adapter.drop_failed_groups(args, groups(0, 0))


def test_a_dead_judge_is_named_with_what_became_of_its_calls():
    with slime_stand_in(), JudgeServer() as judge:
        tree = {
            "sources": {"judge": {"kind": "openai", "base_url": judge.base_url, "model": "judge"}},
            "judges": {"quality": {"kind": "llm"}},
            "engine": {"max_attempts": 1, "deadline_s": 2.0},
            "groups": {"give_up_after": 2},
        }
        judge.stop()
        flags = {
            "custom_rm_path": "slime_adapter.reward",
            "dynamic_sampling_filter_path": "slime_adapter.drop_failed_groups",
        }
        prompts = [{"prompt": "What is 2 + 2?", "label": "4"}] * 4
        with (
            FakeSlimeTrainer(**flags, qreward=tree, prompts=prompts) as trainer,
            pytest.raises(JudgeUnavailable, match=r"The last failure: .*could not connect"),
        ):
            trainer.rollout()


def test_a_group_that_is_kept_starts_the_count_anew(make_args, groups):
    args = make_args(tree={"groups": {"give_up_after": 2}})
    for _ in range(5):
        assert not slime_adapter.drop_failed_groups(args, groups(1, 0)).keep
        assert slime_adapter.drop_failed_groups(args, groups(1, 1)).keep


def test_flat_groups_can_be_dropped_with_it(make_args, groups, monkeypatch):
    seen = []
    module = ModuleType("slime.rollout.filter_hub.dynamic_sampling_filters")
    module.check_reward_nonzero_std = lambda args, samples: seen.append(samples) or SimpleNamespace(keep="slime's word")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert not slime_adapter.drop_failed_and_flat_groups(make_args(), groups(1, 0)).keep
    assert seen == []
    group = groups(1, 1)
    assert slime_adapter.drop_failed_and_flat_groups(make_args(), group).keep == "slime's word"
    assert seen == [group]
