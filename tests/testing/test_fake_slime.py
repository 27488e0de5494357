"""The fake slime trainer: which hooks are called with what, where scores go, what failures do, what training gets."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import itertools
import math
import sys
from concurrent.futures import Future

import pytest

from qreward_plugins.testing import DynamicFilterOutput, FakeSlimeTrainer, SlimeSample, slime_stand_in
from slime_adapter.scoring import finished
from tests.kit import each_of

Status = SlimeSample.Status
SMALL = {"rollout_batch_size": 2, "n_samples_per_prompt": 3, "respond": lambda sample, rng: "x y"}
REWARDS = (0.0, 1.0, 5.0, 2.0, 2.0, 2.0)


async def parity(args, sample):
    return float(sample.index % 2)


def in_turn(*rewards):
    async def reward(args, sample):
        return rewards[sample.index % len(rewards)]

    return reward


async def short(args, samples):
    return [1.0] * (len(samples) - 1)


def step_with(*rewards, **flags):
    with FakeSlimeTrainer(**{"custom_rm_path": in_turn(*rewards), **SMALL, **flags}) as trainer:
        return trainer.rollout()


def numbers(groups):
    return [group[0].group_index for group in groups]


@each_of(
    ("given", "error", "message"),
    [
        ({"custom_rm": 1}, TypeError, "no 'custom_rm': did you mean 'custom_rm_path'"),
        ({"prompts": [{"prompt": "x", "labels": "1"}]}, TypeError, "did you mean 'label'"),
        ({"prompts": []}, ValueError, "prompts is empty"),
        ({"advantage_estimator": "reinforce_plus_plus"}, ValueError, "plays the estimators grpo, gspo, cispo, ppo"),
        ({"eval_datasets": {"e": {"rows": ["p"]}}}, TypeError, "settings of one data set are not played"),
        ({"rollout_batch_size": 0}, ValueError, "1 or more"),
        ({"rm_type": "math"}, TypeError, "has no 'rm_type'.*does not play all of slime's flags"),
        ({"custom_reward_post_process_path": "no_such_module.hook"}, ModuleNotFoundError, "no_such_module"),
    ],
)
def test_what_slime_would_not_start_with_and_what_is_not_played_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        FakeSlimeTrainer(**given)


def test_a_batch_has_the_groups_of_the_first_prompts_in_order():
    prompts = [{"prompt": "a", "label": "1", "metadata": {"k": 1}}, "b", SlimeSample(prompt="c")]
    with FakeSlimeTrainer(**{**SMALL, "custom_rm_path": parity, "prompts": prompts}) as trainer:
        step, again = trainer.rollout(), trainer.rollout()
    assert [sample.index for sample in step.samples] == [0, 1, 2, 3, 4, 5]
    assert [sample.prompt for sample in again.samples] == ["c"] * 3 + ["a"] * 3
    assert (step.samples[0].label, step.samples[0].metadata, again.rollout_id) == ("1", {"k": 1}, 1)


def test_what_a_reward_raises_comes_out_once_and_cancels_the_rest(caplog):
    down, cancelled = [True], []

    async def reward(args, sample):
        if not down[0]:
            return 1.0
        if sample.index in (4, 5):
            raise ConnectionError("the judge is down")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(sample.index)

    with FakeSlimeTrainer(custom_rm_path=reward, eval_datasets={"e": ["p"] * 5}, **SMALL) as trainer:
        for play in (trainer.rollout, trainer.evaluate):
            with pytest.raises(ConnectionError, match="judge is down"):
                play()
            assert sorted(cancelled) == [0, 1, 2, 3]
            cancelled.clear()
        down[0] = False
        assert trainer.rollout().raw_rewards == [1.0] * 6
    gc.collect()
    assert "never retrieved" not in caplog.text


@each_of(
    ("flags", "error", "message"),
    [
        ({"custom_rm_path": None}, NotImplementedError, "custom_rm_path"),
        ({"custom_rm_path": "no_such_module.reward"}, ModuleNotFoundError, "no_such_module"),
        ({"custom_rm_path": lambda args, sample: 1.0}, TypeError, "await"),
        ({"custom_rm_path": in_turn(1.0, None)}, TypeError, "must be real number, not NoneType"),
        ({"custom_rm_path": in_turn({"score": 1.0}, {"score": 2.0})}, TypeError, "not dict"),
        ({"custom_rm_path": in_turn(1.0), "reward_key": "score"}, TypeError, "not subscriptable"),
        ({"custom_rm_path": short, "group_rm": True}, TypeError, "must be real number, not NoneType"),
        ({"custom_rm_path": parity, "respond": lambda s, rng: None if s.index == 2 else "x"}, TypeError, "NoneType"),
    ],
)
def test_a_reward_that_cannot_train_ends_the_run(flags, error, message):
    with FakeSlimeTrainer(**{**SMALL, **flags}) as trainer, pytest.raises(error, match=message):
        trainer.rollout()


def test_a_filter_drops_groups_and_others_are_generated():
    def reluctant(args, group):
        return DynamicFilterOutput(keep=False, keep_when_insufficient=True)

    step = step_with(1.0, dynamic_sampling_filter_path=reluctant, over_sampling_batch_size=4)
    assert (numbers(step.groups), numbers(step.dropped)) == ([2, 3], [0, 1])
    answers = itertools.chain([True, False], itertools.repeat(True))
    assert numbers(step_with(1.0, dynamic_sampling_filter_path=lambda *_: next(answers)).groups) == [0, 2]


@pytest.mark.parametrize("partial", [False, True])
def test_held_generations_are_aborted_when_the_batch_is_full_and_go_on_with_partial_rollout(partial):
    def late(sample):
        return sample.group_index >= 2 and sample.status is Status.PENDING

    flags = {**SMALL, "over_sampling_batch_size": 4, "hold": late, "partial_rollout": partial, "custom_rm_path": parity}
    with FakeSlimeTrainer(**{**flags, "respond": lambda sample, rng: "a b c d"}) as trainer:
        first = trainer.rollout()
        assert (numbers(first.groups), numbers(first.aborted), first.reward_calls) == ([0, 1], [2, 3], 6)
        sample = first.aborted[0][0]
        assert (sample.status, sample.response, sample.reward) == (Status.ABORTED, "a b", None)
        assert len(trainer.data_source.buffer) == (2 if partial else 0)
        if partial:
            second = trainer.rollout()
            assert numbers(second.groups) == [2, 3]
            assert (second.samples[0].response, second.samples[0].response_length) == ("a b a b c d", 7)


@each_of(("outcome", "partial"), itertools.product(("late", "raises", "none"), (False, True)))
def test_slime_waits_for_pending_rewards_after_the_abort(outcome, partial):
    async def reward(args, sample):
        if sample.group_index == 2:
            assert not await finished(args, Future())
        if sample.index == 7 and outcome == "raises":
            raise ConnectionError("late")
        return None if sample.index == 7 and outcome == "none" else 1.0

    flags = {"custom_rm_path": reward, "over_sampling_batch_size": 3, "partial_rollout": partial}
    with FakeSlimeTrainer(**SMALL, **flags) as trainer:
        if outcome == "raises" and partial:
            with pytest.raises(ConnectionError, match="late"):
                trainer.rollout()
            return
        step = trainer.rollout()
        if outcome == "raises":
            assert ([str(error) for error in step.lost_errors], step.aborted) == (["late"], [])
            return
        assert [sample.reward for sample in step.aborted[0]] == [1.0, None if outcome == "none" else 1.0, 1.0]
        if partial and outcome == "none":
            with pytest.raises(AssertionError, match="sample 7 is finished and has no reward"):
                trainer.rollout()
        elif partial:
            assert numbers(trainer.rollout().groups)[0] == 2


@each_of(
    ("flags", "expected"),
    [
        ({}, [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]),
        ({"advantage_estimator": "ppo"}, list(REWARDS)),
        ({"rewards_normalization": False}, list(REWARDS)),
    ],
)
def test_rewards_are_normalised_as_the_estimator_wants(flags, expected):
    step = step_with(*REWARDS, grpo_std_normalization=False, **flags)
    assert (step.rewards, step.raw_rewards) == (expected, list(REWARDS))
    assert step.advantages == expected


def remove(*indices):
    def chosen(args, group):
        for sample in group:
            sample.remove_sample = sample.index in indices
        return True

    return {"dynamic_sampling_filter_path": chosen}


def test_a_removed_sample_has_no_loss_but_stays_in_the_statistics_of_its_group():
    step = step_with(*REWARDS, **remove(2), grpo_std_normalization=False)
    assert step.rewards == [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]
    assert step.loss_masks[2] == [0, 0, 0]
    assert step.advantages == [-2.0, -1.0, None, 0.0, 0.0, 0.0]
    poisoned = step_with(0.0, math.nan, 1.0, 0.0, 1.0, 2.0, **remove(1))
    assert [math.isnan(reward) for reward in poisoned.rewards] == [True] * 3 + [False] * 3
    assert poisoned.advantages[1] is None


def test_the_log_hook_adds_numbers_or_takes_over():
    def log(rollout_id, args, samples, extra_metrics, rollout_time):
        extra_metrics["rollout/qreward/failed"] = len(samples)
        args.qreward_log(args, {"rollout/direct": 1}, step_key="rollout/step")
        return rollout_id == 1

    with FakeSlimeTrainer(**SMALL, custom_rm_path=parity, custom_rollout_log_function_path=log) as trainer:
        first, second = trainer.rollout(), trainer.rollout()
    assert first.metrics == {"rollout/qreward/failed": 6, "rollout/direct": 1, "rollout/step": 0}
    assert second.metrics == {"rollout/direct": 1}


def test_an_evaluation_scores_each_data_set_and_the_log_hook_changes_what_is_averaged():
    def log(rollout_id, args, data, extra_metrics):
        data["plain"]["rewards"] = data["plain"]["rewards"][:1]
        return rollout_id == 6

    data_sets = {"plain": ["p", "q"], "labelled": [{"prompt": "r", "label": "1"}]}
    flags = {"custom_eval_rollout_log_function_path": log, "n_samples_per_eval_prompt": 2}
    with FakeSlimeTrainer(**SMALL, custom_rm_path=parity, eval_datasets=data_sets, **flags) as trainer:
        result = trainer.evaluate(5)
        assert trainer.evaluate(6).metrics == {}
    assert result.rewards == {"plain": [0.0], "labelled": [0.0, 1.0]}
    told = [(one.prompt, one.label, one.index, one.group_index) for one in result.data["labelled"]["samples"]]
    assert told == [("r", "1", 0, None), ("r", "1", 1, None)]
    assert result.metrics == {"eval/plain": 0.0, "eval/labelled": 0.5, "eval/step": 5}


def test_evaluation_with_group_rm_is_refused():
    flags = {"custom_rm_path": parity, "group_rm": True, "eval_datasets": {"e": ["p"]}}
    with FakeSlimeTrainer(**flags) as trainer, pytest.raises(AssertionError, match="group_rm"):
        trainer.evaluate()


async def score_by_slimes_sample(args, sample):
    from slime.utils.types import Sample

    assert isinstance(sample, Sample)
    return float(sample.index % 8 // 4)


def keep_ones(args, group):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    return DynamicFilterOutput(keep=group[0].reward == 1.0, reason="zeros")


def log_by_slime(rollout_id, args, samples, extra_metrics, rollout_time):
    from slime.utils.logging_utils import log
    from slime.utils.metric_utils import compute_rollout_step

    log(args, {"rollout/mine": compute_rollout_step(args, rollout_id)}, step_key="rollout/step")


@pytest.mark.skipif(importlib.util.find_spec("slime") is not None, reason="is for where slime is not installed")
def test_hooks_that_import_from_slime_can_be_tested_without_it():
    flags = {
        "custom_rm_path": score_by_slimes_sample,
        "dynamic_sampling_filter_path": keep_ones,
        "custom_rollout_log_function_path": log_by_slime,
    }
    with FakeSlimeTrainer(**flags) as trainer, pytest.raises(ModuleNotFoundError, match="slime"):
        trainer.rollout()
    with slime_stand_in() as needed:
        with FakeSlimeTrainer(**flags) as trainer:
            step = trainer.rollout(4)
        with pytest.raises(ModuleNotFoundError, match=r"slime\.ray"):
            importlib.import_module("slime.ray")
    assert needed
    assert (step.raw_rewards, step.metrics["rollout/dynamic_filter/drop_zeros"]) == ([1.0] * 16, 4)
    assert step.metrics["rollout/mine"] == 4
    assert not [name for name in sys.modules if name.split(".")[0] == "slime"]
