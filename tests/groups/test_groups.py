"""The means of whole groups, and which groups are worth training."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc

import pytest

from qreward_plugins import Cause, Failed, GroupGate, JudgeUnavailable, group_means
from qreward_plugins.adapters import RunningMeans, mean_of, number_of
from qreward_plugins.config import Constant, Groups


def test_means_are_over_the_scored_samples_of_each_group():
    assert group_means([0.2, None, 0.4, 1.0], ["a", "a", "a", "b"]) == pytest.approx([0.3, 0.3, 0.3, 1.0])


def test_a_group_without_rewards_has_the_mean_of_everything():
    assert group_means([None, None, 0.5, 1.0], ["a", "a", "b", "b"]) == [0.75] * 4


def test_without_any_reward_there_is_one_number():
    assert group_means([None, None], ["a", "b"]) == [0.0, 0.0]
    assert group_means([], []) == []


def test_a_gate_wants_two_to_compare_unless_told_otherwise():
    gate = GroupGate(Groups())
    assert gate.admit(4, ["infra/deadline"] * 2)
    assert not gate.admit(4, ["infra/deadline"] * 3)
    assert gate.admit(1, [])
    assert not gate.admit(1, ["infra/deadline"])
    gate = GroupGate(Groups(min_scored="all"))
    assert gate.admit(4, [])
    assert not gate.admit(4, ["infra/deadline"])
    gate = GroupGate(Groups(min_scored=3))
    assert gate.admit(4, ["infra/deadline"])
    assert not gate.admit(4, ["infra/deadline"] * 2)
    assert gate.admit(2, []), "a group that is smaller than min_scored cannot have more than all of its samples"


def test_a_gate_that_gives_up_says_what_the_judge_answered_last():
    gate = GroupGate(Groups(give_up_after=2))
    assert not gate.admit(2, ["infra/deadline"] * 2, detail="could not connect (refused)")
    with pytest.raises(
        JudgeUnavailable, match=r"2 groups in a row .*The last failure: could not connect \(refused\)\."
    ):
        gate.admit(2, ["infra/deadline"] * 2)
    assert not gate.admit(2, ["infra/deadline"] * 2)
    with pytest.raises(JudgeUnavailable) as caught:
        gate.admit(2, ["infra/deadline"] * 2)
    assert "The last failure" not in str(caught.value), "it is not that of an earlier count"


def test_a_gate_gives_up_after_so_many_in_a_row_and_says_why():
    gate = GroupGate(Groups(min_scored="all", give_up_after=3))
    for _ in range(2):
        assert not gate.admit(2, ["infra/deadline", "infra/no_source"])
    assert gate.admit(2, [])
    for _ in range(2):
        assert not gate.admit(2, ["infra/deadline", "infra/no_source"])
    with pytest.raises(JudgeUnavailable, match=r"3 groups in a row .*infra/deadline 4 times, infra/no_source 2 times"):
        gate.admit(2, ["infra/deadline", "infra/deadline"])
    assert not gate.admit(2, ["infra/deadline"]), "who catches the error gets another full count"


def test_a_screened_sample_is_left_out_and_nothing_has_failed():
    screened, failed = Failed(Cause.POLICY, "screened"), Failed(Cause.INFRA, "deadline")
    for policy in ("auto", "raise", Constant(constant=-1.0)):
        assert number_of(screened, policy) is None
    assert number_of(failed, Constant(constant=-1.0)) == -1.0
    gate = GroupGate(Groups(give_up_after=1))
    for _ in range(3):
        assert not gate.admit(4, ["policy/screened"] * 2 + ["infra/deadline"])
    with pytest.raises(JudgeUnavailable):
        gate.admit(4, ["policy/screened"] + ["infra/deadline"] * 3)


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


def test_the_mean_of_a_group_can_be_asked_for_at_any_time():
    running = RunningMeans()
    assert running.mean("group") == 0.0
    running.add("group", 0.25)
    running.add("group", 0.75)
    assert running.mean("group") == 0.5
    running.add("group", 1.0, size=3)
    assert running.mean("group") == 0.0, "a group that is complete is forgotten"


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
