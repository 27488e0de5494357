"""The mean of a group: one number, whoever looks at the group and when."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins import group_means
from qreward_plugins.engine.group_means import UNSCORED, Mean, RunningMeans, mean_of


def test_what_is_kept_of_a_group_does_not_grow_with_its_samples():
    running, rng = RunningMeans(), random.Random(1)
    for _ in range(100):
        running.add("eval", rng.uniform(-1, 1))
    tracemalloc.start()
    for _ in range(50_000):
        running.add("eval", rng.uniform(-1, 1))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 20_000


def test_the_mean_does_not_depend_on_the_order_and_does_not_overflow():
    rewards = [0.1, 0.7, -0.3, 1e-17, 1e16]
    means = set()
    for order in itertools.permutations(rewards):
        running = RunningMeans()
        for reward in order:
            running.add("group", reward)
        running.follow("group", means.add)
    assert len(means) == 1
    running, told = RunningMeans(), []
    for _ in range(8):
        running.add("group", 3.4e38)
    running.follow("group", told.append)
    assert told == [3.4e38]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_the_mean_is_bit_for_bit_that_of_a_whole_group(rewards):
    """A failed sample has one number, whether it is told of its siblings or a hook looks at the group."""
    running, told = RunningMeans(), []
    for reward in rewards:
        running.add("group", reward)
    running.follow("group", told.append)
    assert told == group_means([*rewards, None], [0] * (len(rewards) + 1))[-1:]


def test_means_of_huge_rewards_are_finite():
    assert mean_of([1.7e308, 1.7e308, None]) == 1.7e308
    assert mean_of([None]) == mean_of([]) == UNSCORED


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 9))
def test_the_mean_of_equal_rewards_is_that_reward(reward, count):
    """Otherwise a failed sample of a group of equal rewards would have an advantage."""
    assert mean_of([reward] * count) == reward


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_the_mean_is_the_exact_one_rounded_once(rewards):
    assert Mean(rewards).value == float(sum(map(Fraction, rewards)) / len(rewards))


def test_the_mean_of_a_group_can_be_asked_for_at_any_time():
    running = RunningMeans()
    assert running.mean("group") == UNSCORED
    running.add("group", 0.25)
    running.add("group", 0.75)
    assert running.mean("group") == 0.5
    running.add("group", 1.0, size=3)
    assert running.mean("group") == UNSCORED, "a group that is complete is forgotten"


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_has_no_mean(reward):
    """NaN would become the mean of a whole group."""
    running = RunningMeans()
    running.add("group", 0.5)
    for take in (
        lambda: mean_of([0.5, reward]),
        lambda: group_means([reward], ["a"]),
        lambda: running.add("group", reward),
    ):
        with pytest.raises(ValueError, match="finite"):
            take()
    assert running.mean("group") == 0.5
