"""The barrier's state alone: whatever order things come in, what is given out has the mean that failed samples get."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.engine.barrier_state import BarrierState
from qreward_plugins.engine.group_means import UNSCORED

KEY = ("u1", "5")


class Heard(dict):
    """What the state told of groups that closed; once each."""

    def __call__(self, key, mean):
        assert key not in self
        self[key] = mean


@st.composite
def plays(draw):
    """The outcomes of a group, and an order of reports, repeated reports and early closes in which they come."""
    outcomes = draw(st.lists(st.none() | st.floats(-100, 100), min_size=1, max_size=8))
    moves = [*range(len(outcomes)), *draw(st.lists(st.integers(0, len(outcomes) - 1), max_size=4))]
    moves += ["close"] * draw(st.integers(0, 2))
    told = draw(st.sampled_from(("all", "none", "first")))
    return outcomes, draw(st.permutations(moves)), told


@settings(max_examples=500, deadline=None)
@given(plays())
def test_the_mean_of_what_is_given_out_is_what_every_failed_sample_got(play):
    outcomes, moves, told = play
    heard = Heard()
    state = BarrierState(heard)
    given_out = {}
    for number, move in enumerate(moves):
        if move == "close":
            state.close(KEY)
            continue
        size = len(outcomes) if told == "all" or (told == "first" and number == 0) else None
        answer = state.report(KEY, str(move), outcomes[move], size)
        trains_on = outcomes[move] if answer is None else answer
        if trains_on is not None:
            assert given_out.setdefault(move, trains_on) == trains_on, "a second report changes nothing"
    if KEY not in heard:
        assert "close" not in moves
        assert told != "all" or None not in outcomes, "nobody needs the mean of a group without a failed sample"
        state.close(KEY)
    mean = heard[KEY]
    assert math.isfinite(mean)
    waited = {move for move in range(len(outcomes)) if move not in given_out}
    assert all(outcomes[move] is None for move in waited)
    given_out.update(dict.fromkeys(waited, mean))
    assert all(given_out[move] == mean for move, outcome in enumerate(outcomes) if outcome is None)
    assert sum(given_out.values()) / len(given_out) == pytest.approx(mean, abs=1e-9)


def test_a_group_closes_with_its_last_report_at_the_mean_of_the_scored():
    heard = Heard()
    state = BarrierState(heard)
    assert state.report(KEY, "0", None, 4) is None
    assert state.report(KEY, "1", 0.2, 4) is None
    assert state.report(KEY, "2", 0.6, 4) is None
    assert heard == {}
    assert state.report(KEY, "3", None, 4) == pytest.approx(0.4)
    assert heard == {KEY: pytest.approx(0.4)}


def test_a_group_that_failed_whole_has_one_constant():
    state = BarrierState()
    assert state.report(KEY, "0", None, 2) is None
    assert state.report(KEY, "1", None, 2) == UNSCORED


def test_a_sample_too_many_keeps_its_reward_where_nobody_failed():
    """ROLL starts more trajectories of a group than it trains (`group_size_redundancy`)."""
    heard = Heard()
    state = BarrierState(heard)
    for sample, reward in (("0", 0.25), ("1", 0.75), ("2", 0.5)):
        assert state.report(KEY, sample, reward, 2) is None
    assert heard == {}
    assert state.report(KEY, "3", None, 2) == 0.5
    assert state.report(KEY, "4", 1.0, 2) == 0.5, "now the mean is given out"
    assert heard == {KEY: 0.5}


def test_who_comes_after_an_early_close_gets_the_mean_scored_or_not():
    state = BarrierState()
    state.report(KEY, "0", None, 4)
    state.report(KEY, "1", 0.5, 4)
    assert state.close(KEY) == 0.5
    assert state.report(KEY, "2", 0.9, 4) == 0.5
    assert state.report(KEY, "3", None, 4) == 0.5
    assert state.close(KEY) == 0.5


def test_a_report_that_comes_twice_counts_once_and_is_answered_the_same():
    heard = Heard()
    state = BarrierState(heard)
    state.report(KEY, "0", 1.0, 3)
    assert state.report(KEY, "0", 1.0, 3) is None
    assert state.report(KEY, "0", 0.0, 3) == 1.0, "another verdict of the same sample: the first one was given out"
    state.report(KEY, "1", None, 3)
    assert heard == {}
    state.report(KEY, "2", 0.0, 3)
    assert heard == {KEY: 0.5}
    assert state.report(KEY, "0", 1.0, 3) is None
    assert state.report(KEY, "1", None, 3) == 0.5


def test_a_failed_sample_that_is_scored_after_all_counts_as_scored():
    state = BarrierState()
    state.report(KEY, "0", None, 2)
    state.report(KEY, "0", 0.25, 2)
    assert state.report(KEY, "1", None, 2) == 0.25


def test_groups_are_told_apart_by_uid_and_step():
    state = BarrierState()
    state.report(("u", "1"), "0", 1.0, 2)
    state.report(("u", "2"), "0", 3.0, 2)
    assert state.report(("u", "1"), "1", None, 2) == 1.0
    assert state.report(("u", "2"), "1", None, 2) == 3.0


def test_memory_is_bounded_and_an_open_group_is_closed_before_it_is_forgotten():
    heard = Heard()
    state = BarrierState(heard, detailed=10, remembered=20)
    for number in range(1000):
        state.report((str(number), "0"), "0", 1.0, 2)
        state.report((str(number), "0"), "1", None, None if number % 2 else 2)
    assert len(state._groups) == 10
    assert len(state._means) == 20
    assert len(heard) == 1000
    assert state.mean(("985", "0")) == 1.0, "the mean is remembered longer than the reports"
    assert state.report(("985", "0"), "2", 7.0, 3) == 1.0
    assert state.mean(("3", "0")) is None


def test_a_group_in_use_is_not_the_one_forgotten():
    state = BarrierState(detailed=3)
    state.report(KEY, "0", 1.0, 3)
    for number in range(50):
        state.report((str(number), "0"), "0", 1.0, 2)
        state.report(KEY, "1", None, 3)
    assert state.report(KEY, "2", 3.0, 3) is None
    assert state.mean(KEY) == 2.0


def test_what_processes_remember_restores_a_state():
    state = BarrierState()
    state.restore(KEY, 4, {"0": 0.25, "1": None}, None)
    state.restore(KEY, 4, {"1": None, "2": 0.75}, None)
    assert state.mean(KEY) is None
    state.restore(KEY, 4, {"3": None}, None)
    assert state.mean(KEY) == 0.5


def test_a_mean_that_was_given_out_is_restored_though_the_reports_say_otherwise():
    state = BarrierState()
    state.restore(KEY, 2, {"0": 1.0, "1": None}, 0.25)
    assert state.mean(KEY) == 0.25
    assert state.report(KEY, "0", 1.0, 2) is None, "its own reward was given out"
    assert state.report(KEY, "2", 9.0, 2) == 0.25
    state.restore(KEY, 2, {}, 0.75)
    assert state.mean(KEY) == 0.25, "what is known here stands"


@st.composite
def regenerations(draw):
    """Reports of a group's samples in any order, some of them generated anew, each by its sample and generation."""
    size = draw(st.integers(1, 4))
    sample = st.tuples(st.integers(0, size - 1), st.integers(0, 3))
    rewards = st.dictionaries(sample, st.none() | st.floats(-100, 100), min_size=1, max_size=10)
    moves = draw(st.lists(sample | st.just("close"), min_size=1, max_size=16))
    return size, draw(rewards), moves


@given(regenerations())
def test_what_is_generated_anew_never_trains_on_an_earlier_reward(play):
    size, rewards, moves = play
    heard = Heard()
    state = BarrierState(heard)
    said = set()
    for move in moves:
        if move == "close":
            state.close(KEY)
            continue
        sample, generation = move
        reward = rewards.get(move)
        answer = state.report(KEY, str(sample), reward, size, generation=str(generation))
        said.add(move)
        assert state.knows(KEY, str(sample), str(generation)) or KEY in heard
        if answer is not None:
            assert answer == heard[KEY], "its own reward, or the mean of the group"
        elif reward is None:
            assert KEY not in heard


def test_a_new_response_takes_the_place_of_the_earlier_one():
    heard = Heard()
    state = BarrierState(heard)
    assert state.report(KEY, "0", 0.2, 3, generation="a") is None
    assert state.report(KEY, "0", 0.8, 3, generation="b") is None
    assert state.report(KEY, "0", 0.8, 3, generation="b") is None, "the same report, sent again"
    assert state.report(KEY, "1", 0.4, 3, generation="c") is None
    assert state.report(KEY, "2", None, 3, generation="d") == pytest.approx(0.6)
    assert state.report(KEY, "2", 1.0, 3, generation="e") is None, "after the group is closed, too"
    assert state.report(KEY, "1", None, 3, generation="f") == pytest.approx(0.6)
    state.restore(KEY, 3, {"0": 0.2}, None)
    assert state.knows(KEY, "0", "b"), "what a process remembers is not newer"
