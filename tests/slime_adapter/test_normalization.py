"""The post-process hook: slime's numbers over the scored samples of each group."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

import slime_adapter
from qreward_plugins.journal.stories import Stories, Wanted
from qreward_plugins.testing import FakeSlimeTrainer
from slime_adapter import settings
from tests.kit import each_of

TREE = {"sources": {"f": {"kind": "function", "function": "json:loads"}}, "judges": {"f": {"kind": "function"}}}
FLOAT32_MAX = 3.4028234663852886e38
ESTIMATORS = ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo"]


def make_args(estimator="grpo", *, size=4, groups=1, normalize=True, std=True, **more):
    return SimpleNamespace(
        qreward=TREE,
        advantage_estimator=estimator,
        n_samples_per_prompt=size,
        rollout_batch_size=groups,
        rewards_normalization=normalize,
        grpo_std_normalization=std,
        **more,
    )


def batch(make_group, *groups):
    """Samples with these rewards; None: failed, with a stand-in that must not count."""
    samples = []
    for number, rewards in enumerate(groups):
        for sample, reward in zip(make_group(*map(str, rewards), group=number), rewards, strict=True):
            sample.reward = 99.0 if reward is None else reward
            sample.metadata = {"qreward": {"excluded": reward is None}}
            samples.append(sample)
    return samples


def normalized(rewards, *, std=True):
    """slime's formula (slime/ray/rollout.py) over the rewards that are there."""
    there = [reward for reward in rewards if reward is not None]
    if len(there) < 2:
        return [0.0] * len(rewards)
    middle = sum(there) / len(there)
    spread = math.sqrt(sum((r - middle) ** 2 for r in there) / (len(there) - 1))
    return [0.0 if r is None else (r - middle) / ((spread + 1e-6) if std else 1.0) for r in rewards]


@each_of(("estimator", "normalize", "std"), itertools.product(ESTIMATORS, [True, False], [True, False]))
def test_failed_samples_stay_out_of_every_estimators_statistics(make_group, estimator, normalize, std):
    groups = [[0.1, None, 0.7, 0.4], [1.0, 0.5, 0.25, 0.0], [None, None, None, None], [None, 0.3, None, None]]
    samples = batch(make_group, *groups)
    args = make_args(estimator, groups=4, normalize=normalize, std=std)
    raw, rewards = slime_adapter.post_process(args, samples)
    everything = [r for group in groups for r in group if r is not None]
    whole = sum(everything) / len(everything)
    means = [0.4, 0.4375, whole, 0.3]
    assert raw == pytest.approx([m if r is None else r for group, m in zip(groups, means, strict=True) for r in group])
    if estimator == "reinforce_plus_plus":
        assert rewards == pytest.approx([whole if r is None else r for group in groups for r in group])
    elif normalize and estimator != "ppo":
        scaled = std and estimator != "reinforce_plus_plus_baseline"
        assert rewards == pytest.approx([number for group in groups for number in normalized(group, std=scaled)])
    else:
        assert rewards == raw
    masked = [sample.remove_sample or sample.loss_mask == [0, 0, 1] for sample in samples]
    assert masked == [reward is None for group in groups for reward in group]


def test_where_rollouts_became_several_samples_the_batch_is_one_group_as_in_slime(make_group):
    samples = batch(make_group, [0.1, None, 0.3, 0.4, 0.9], [0.5, 0.6])
    _, rewards = slime_adapter.post_process(make_args(size=2, groups=2), samples)
    assert rewards == pytest.approx(normalized([0.1, None, 0.3, 0.4, 0.9, 0.5, 0.6]))


@each_of("broken", [None, math.nan, math.inf, -math.inf, "0.5x", 1e39, {"other": 1.0}])
def test_a_broken_reward_of_any_function_is_a_failed_sample(make_group, broken):
    samples = batch(make_group, [0.2, 0.4, 0.6, 0.0])
    samples[3].reward = broken
    samples[3].metadata = {}
    raw, rewards = slime_adapter.post_process(make_args(), samples)
    assert raw == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert rewards == pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-4)
    assert [sample.remove_sample for sample in samples] == [False, False, False, True]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_the_token_that_reinforce_plus_plus_keeps_of_a_failed_sample_has_the_mean_return(make_group, gamma):
    samples = batch(make_group, [1.0, 0.2, None])
    samples[1].loss_mask = [1, 0, 0]
    args = make_args("reinforce_plus_plus", size=3, gamma=gamma)
    _, rewards = slime_adapter.post_process(args, samples)
    # Three tokens of the first response, one of the second.
    returns = [gamma**2 * 1.0, gamma * 1.0, 1.0, 0.2]
    assert rewards == pytest.approx([1.0, 0.2, sum(returns) / 4])
    assert [(sample.remove_sample, sample.loss_mask) for sample in samples] == [
        (False, None),
        (False, [1, 0, 0]),
        (False, [0, 0, 1]),
    ]


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_the_journal_has_what_slime_trains_on(make_args, tmp_path, estimator):
    said, path = ["1", "4", "break", "9"], tmp_path / "journal.sqlite"
    with FakeSlimeTrainer(
        qreward=make_args(tree={"engine": {"journal": {"path": str(path)}, "max_attempts": 1}}).qreward,
        respond=lambda sample, rng: said[sample.index % 4],
        custom_rm_path="slime_adapter.reward",
        custom_reward_post_process_path="slime_adapter.post_process",
        advantage_estimator=estimator,
        rollout_batch_size=2,
    ) as trainer:
        step = trainer.rollout()
        settings._adapters[0][1].training.flush()
        settings.close()
    with Stories([str(path)]) as stories:
        found, _ = stories.find(Wanted(), 99)
    trained = [story.trained[story.entries[0].sample_id] for story in found]
    trained.sort(key=lambda each: int(each.sample_id))
    assert [each.masked for each in trained] == [False, False, True, False] * 2
    assert [each.reward for each in trained] == pytest.approx(step.raw_rewards)
    advantages = [None] * 8 if estimator == "ppo" else pytest.approx(step.rewards)
    assert [each.advantage for each in trained] == advantages


@each_of("estimator", ESTIMATORS)
def test_what_overflows_in_32_bits_on_the_way_is_finite_in_the_end(make_group, estimator):
    samples = batch(make_group, [3.4e38, 3.4e38, -3.4e38, 1.0], [0.1, None, 0.7, 0.4])
    raw, trained = slime_adapter.post_process(make_args(estimator, groups=2), samples)
    assert max(map(abs, [*raw, *trained])) <= FLOAT32_MAX
