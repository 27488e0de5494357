"""The means of whole groups, and which groups are worth training."""

from __future__ import annotations

import pytest

from qreward_plugins import GroupGate, JudgeUnavailable, group_means
from qreward_plugins.config import Groups


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
