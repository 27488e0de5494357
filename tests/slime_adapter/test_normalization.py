"""The post-process hook: slime's numbers where nothing failed, and the scored samples' own where something did."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest

import slime_adapter

torch = pytest.importorskip("torch", reason="torch is not installed")

ESTIMATORS = ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo"]


def make_args(estimator="grpo", *, size=4, groups=1, normalize=True, std=True, key=None):
    return SimpleNamespace(
        advantage_estimator=estimator,
        n_samples_per_prompt=size,
        rollout_batch_size=groups,
        rewards_normalization=normalize,
        grpo_std_normalization=std,
        reward_key=key,
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


def normalized(rewards, *, mean, std):
    """The group formula, in double precision."""
    there = [reward for reward in rewards if reward is not None]
    middle = sum(there) / len(there) if there and mean else 0.0
    spread = math.sqrt(sum((r - middle) ** 2 for r in there) / (len(there) - 1)) if len(there) > 1 else 0.0
    if mean and len(there) < 2:
        return [0.0] * len(rewards)
    return [0.0 if r is None else (r - middle) / ((spread + 1e-6) if std else 1.0) for r in rewards]


@pytest.mark.parametrize(
    ("estimator", "normalize", "std"), [*itertools.product(ESTIMATORS, [True, False], [True, False])]
)
def test_failed_samples_stay_out_of_every_estimators_statistics(make_group, estimator, normalize, std):
    groups = [[0.1, None, 0.7, 0.4], [1.0, 0.5, 0.25, 0.0], [None, None, None, None], [None, 0.3, None, None]]
    samples = batch(make_group, *groups)
    args = make_args(estimator, groups=4, normalize=normalize, std=std)
    raw, rewards = slime_adapter.post_process(args, samples)
    by_group = normalize and estimator not in ("ppo", "reinforce_plus_plus")
    if by_group:
        scaled = std and estimator != "reinforce_plus_plus_baseline"
        expected = [number for group in groups for number in normalized(group, mean=True, std=scaled)]
    else:
        expected = raw
    assert rewards == pytest.approx(expected, abs=1e-5)
    masked = [sample.remove_sample or sample.loss_mask == [0, 0, 1] for sample in samples]
    assert masked == [reward is None for group in groups for reward in group]
    everything = [r for group in groups for r in group if r is not None]
    means = [0.4, 0.4375, sum(everything) / len(everything), 0.3]
    assert raw == pytest.approx([m if r is None else r for group, m in zip(groups, means, strict=True) for r in group])


def slimes_own(args, raw):
    """What slime computes without a hook (slime/ray/rollout.py), for rewards that are all there."""
    rewards = torch.tensor(raw, dtype=torch.float)
    regular = len(raw) == args.n_samples_per_prompt * args.rollout_batch_size
    rewards = rewards.reshape(-1, args.n_samples_per_prompt) if regular else rewards.view(-1, len(raw))
    rewards = rewards - rewards.mean(dim=-1, keepdim=True)
    if args.grpo_std_normalization:
        rewards = rewards / (rewards.std(dim=-1, keepdim=True) + 1e-6)
    return rewards.flatten().tolist()


@pytest.mark.parametrize(("size", "groups", "std"), [(8, 32, True), (7, 3, False), (2, 5, True)])
def test_where_nothing_failed_the_numbers_are_slimes_to_the_last_bit(make_group, size, groups, std):
    rng = random.Random(size)
    samples = batch(make_group, *[[rng.uniform(-3, 7) for _ in range(size)] for _ in range(groups)])
    args = make_args(size=size, groups=groups, std=std)
    raw, rewards = slime_adapter.post_process(args, samples)
    assert raw == [sample.reward for sample in samples]
    assert rewards == slimes_own(args, raw)


def test_where_rollouts_became_several_samples_the_batch_is_one_group_as_in_slime(make_group):
    samples = batch(make_group, [0.1, 0.2, 0.3, 0.4, 0.9], [0.5, 0.6])
    args = make_args(size=2, groups=2)
    _, rewards = slime_adapter.post_process(args, samples)
    assert rewards == slimes_own(args, [sample.reward for sample in samples])
    samples = batch(make_group, [0.1, None, 0.3, 0.4, 0.9], [0.5, 0.6])
    _, rewards = slime_adapter.post_process(args, samples)
    assert rewards == pytest.approx(normalized([0.1, None, 0.3, 0.4, 0.9, 0.5, 0.6], mean=True, std=True), abs=1e-5)


@pytest.mark.parametrize("broken", [None, math.nan, math.inf, -math.inf, "0.5x", 1e39, {"other": 1.0}])
def test_a_broken_reward_of_anybody_is_a_failed_sample(make_group, broken):
    samples = batch(make_group, [0.2, 0.4, 0.6, 0.0])
    samples[3].reward = broken
    samples[3].metadata = {}
    raw, rewards = slime_adapter.post_process(make_args(), samples)
    assert raw == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert rewards == pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-4)
    assert [sample.remove_sample for sample in samples] == [False, False, False, True]


def test_a_group_of_one_has_no_deviation_and_no_nan(make_group):
    _, rewards = slime_adapter.post_process(make_args(size=1, groups=2), batch(make_group, [0.3], [0.9]))
    assert rewards == [0.0, 0.0]


def test_the_key_of_dict_rewards_chooses_what_trains(make_group):
    samples = make_group("a", "b")
    samples[0].reward, samples[1].reward = {"acc": 1, "score": 9.0}, {"acc": 0, "score": 9.0}
    raw, rewards = slime_adapter.post_process(make_args("ppo", size=2, key="acc"), samples)
    assert raw == rewards == [1, 0]


def test_other_peoples_removed_samples_still_count_as_in_slime(make_group):
    samples = batch(make_group, [0.0, 1.0])
    samples[1].remove_sample = True
    raw, rewards = slime_adapter.post_process(make_args(size=2, std=False), samples)
    assert (raw, rewards) == ([0.0, 1.0], [-0.5, 0.5])


def test_reinforce_plus_plus_keeps_one_token_of_a_failed_sample_because_it_dies_without(make_group):
    samples = batch(make_group, [0.5, None])
    slime_adapter.post_process(make_args("reinforce_plus_plus", size=2), samples)
    assert [(sample.remove_sample, sample.loss_mask) for sample in samples] == [(False, None), (False, [0, 0, 1])]


@pytest.mark.parametrize("normalize_advantages", [True, False])
def test_where_everything_failed_whitening_still_has_a_token(make_group, normalize_advantages):
    samples = batch(make_group, [None, None])
    samples[1].response_length = 5
    args = make_args(size=2)
    args.normalize_advantages = normalize_advantages
    _, rewards = slime_adapter.post_process(args, samples)
    assert rewards == [0.0, 0.0]
    left = [not sample.remove_sample for sample in samples]
    assert left == [False, normalize_advantages]
    assert samples[1].loss_mask == ([0, 0, 0, 0, 1] if normalize_advantages else None)


LARGE = [3.4e38, 3.4e38, -3.4e38, 1.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [LARGE, [-3.4e38, 3.4e38, 3.4e38, 3.4e38], [3.4e38, -3.4e38, None, None]], ids=str)
def test_what_overflows_in_32_bits_on_the_way_is_finite_in_the_end(make_group, estimator, rewards):
    ordinary = [0.1, None, 0.7, 0.4]
    args = make_args(estimator, groups=2)
    raw, trained = slime_adapter.post_process(args, batch(make_group, rewards, ordinary))
    assert torch.tensor(raw, dtype=torch.float).isfinite().all()
    assert torch.tensor(trained, dtype=torch.float).isfinite().all()
    alone = slime_adapter.post_process(make_args(estimator, groups=1), batch(make_group, ordinary))
    assert trained[4:] == alone[1]
    if estimator == "grpo":
        assert trained[:4] == pytest.approx(normalized(rewards, mean=True, std=True), abs=1e-5)
