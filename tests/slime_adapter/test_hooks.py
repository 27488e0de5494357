"""slime's hooks: filters of groups, logs of a step and of an evaluation."""

from __future__ import annotations

import asyncio

import pytest

import slime_adapter
from qreward_plugins import JudgeUnavailable
from qreward_plugins.testing import FakeSlimeTrainer, slime_stand_in
from tests.kit import each_of


@pytest.fixture
def groups(make_group):
    """A group with a reward for each 1, and a failed sample for each 0; slime's few names are there."""

    def make(*scored):
        group = make_group(*["text"] * len(scored))
        for sample, is_scored in zip(group, scored, strict=True):
            sample.reward = 0.5
            sample.metadata = {"qreward": {"excluded": not is_scored, "cause": "" if is_scored else "infra/deadline"}}
        return group

    with slime_stand_in():
        yield make


@pytest.fixture
def scored(make_args, make_group):
    """Samples with rewards, scored by the real adapter; "break" fails."""

    def make(*responses, group=0, metadata=None, **arguments):
        args, samples = make_args(**arguments), make_group(*responses, group=group, metadata=metadata or {})
        for sample, reward in zip(samples, asyncio.run(slime_adapter.reward(args, samples)), strict=True):
            sample.reward = reward
        return args, samples

    return make


@each_of(
    ("min_scored", "group", "keep"),
    [
        ("all", (1, 1, 0, 1), False),
        (3, (1, 1, 0, 1), True),
    ],
)
def test_a_group_with_too_few_rewards_is_dropped_under_its_reason(make_args, groups, min_scored, group, keep):
    args = make_args(tree={"groups": {"min_scored": min_scored}})
    output = slime_adapter.drop_failed_groups(args, groups(*group))
    expected = (keep, None if keep else "qreward_failed", False)
    assert (output.keep, output.reason, output.keep_when_insufficient) == expected
    # A rollout may have become several samples.
    assert slime_adapter.drop_failed_groups(args, [groups(*group[:2]), groups(*group[2:])]).keep is keep


def test_the_reward_of_another_function_counts_if_it_is_a_number(make_args, groups):
    group = groups(1, 1)
    group[0].metadata = group[1].metadata = {}
    group[0].reward, group[1].reward = 1.0, None
    assert not slime_adapter.drop_failed_groups(make_args(), group).keep
    group[1].reward = 0.0
    assert slime_adapter.drop_failed_groups(make_args(), group).keep


def test_a_judge_that_is_down_ends_in_one_error_with_what_became_of_its_calls(make_args, judge):
    judge.stop()
    engine = {"max_attempts": 1, "deadline_s": 1.0}
    tree = make_args(tree={"engine": engine, "groups": {"give_up_after": 1}}).qreward
    flags = {
        "custom_rm_path": "slime_adapter.reward",
        "dynamic_sampling_filter_path": "slime_adapter.drop_failed_groups",
    }
    with (
        slime_stand_in(),
        FakeSlimeTrainer(**flags, qreward=tree) as trainer,
        pytest.raises(JudgeUnavailable, match=r"The last failure: .*could not connect"),
    ):
        trainer.rollout()


def test_slimes_filter_of_flat_groups_sees_the_scored_samples(make_args, groups):
    args = make_args(tree={"groups": {"min_scored": 2}}, reward_key=None)
    assert slime_adapter.drop_failed_and_flat_groups(args, groups(1, 0)).reason == "qreward_failed"
    group = groups(1, 0, 1)
    group[1].reward = 1.0  # a stand-in
    assert slime_adapter.drop_failed_and_flat_groups(args, group).reason == "zero_std_0.5"
    group[2].reward = 1.0
    assert slime_adapter.drop_failed_and_flat_groups(args, group).keep


def test_the_step_is_summed_up_in_slimes_own_dict(scored):
    args, samples = scored("2", "4", "break", "6", metadata={"data_source": "sums"})
    metrics = {"rollout/other": 1}
    assert slime_adapter.log_rollout(3, args, samples, metrics, 0.5) is False
    told = {name.removeprefix("rollout/qreward/"): value for name, value in metrics.items() if "qreward" in name}
    assert metrics["rollout/other"] == 1
    assert (told["samples"], told["failed"], told["failed_rate"]) == (4.0, 1.0, 0.25)
    assert (told["reward/mean"], told["flat_rate"], told["data/sums/failed_rate"]) == (pytest.approx(0.4), 0.0, 0.25)
    assert sum(value for name, value in told.items() if name.startswith("blame_s/")) > 0


def test_a_sample_that_slime_never_asked_for_gets_a_stand_in_before_slime_reads_it(scored, make_group):
    args, samples = scored("2", "4", reward_key="score")
    (aborted,) = make_group("unfinished")
    metrics = {}
    slime_adapter.log_rollout(3, args, [*samples, aborted], metrics, 0.5)
    assert aborted.reward["score"] == pytest.approx(0.3)
    assert aborted.remove_sample
    assert metrics["rollout/qreward/failed"] == 1.0


RATES = ("rollout/qreward/failed_rate", "eval/a/qreward/failed_rate")


def test_where_slime_has_no_dict_the_hooks_log_by_themselves(scored):
    args, samples = scored("2", "break")
    logged = []
    args.qreward_log = lambda args, metrics, step_key: logged.append((step_key, metrics))
    with slime_stand_in():
        assert slime_adapter.log_rollout(3, args, samples, None, 0.5) is False
        slime_adapter.log_eval(2, args, {"a": {"samples": samples}}, None)
    told = [(step, metrics[step], metrics[rate]) for (step, metrics), rate in zip(logged, RATES, strict=True)]
    assert told == [("rollout/step", 3, 0.5), ("eval/step", 2, 0.5)]


def test_pass_rates_need_whole_groups(scored):
    args, samples = scored("2", "4", "break", "6", group=None, log_passrate=True, n_samples_per_eval_prompt=2)
    data = {"a": {"rewards": [0.2, 0.4, 0.4, 0.6], "truncated": [False] * 4, "samples": samples}}
    slime_adapter.log_eval(2, args, data, {})
    assert data["a"]["rewards"] == [0.2, 0.4]


def test_samples_of_another_reward_function_are_left_alone(make_args, make_group):
    samples = make_group("a", "b", group=None)
    data = {"a": {"rewards": [0.1, 0.2], "truncated": [False] * 2, "samples": samples}, "b": {"rewards": [1.0]}}
    before, metrics = dict(data), {}
    assert slime_adapter.log_eval(2, make_args(), data, metrics) is False
    assert slime_adapter.log_rollout(2, make_args(), samples, metrics, 1.0) is False
    assert (data, metrics) == (before, {})
