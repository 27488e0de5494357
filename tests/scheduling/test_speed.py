"""Learned speed: a line over size that is drawn to proportionality at first, and that one straggler does not bend."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.scheduling import Speed
from qreward_plugins.scheduling.latency import SHORTEST_S

answers = st.lists(st.tuples(st.integers(0, 5000), st.floats(0.0, 100.0)), min_size=1, max_size=60)


def taught(pairs):
    speed = Speed()
    for size, seconds in pairs:
        speed.learn(size, seconds)
    return speed


def random_sizes(count, seed=1):
    rng = random.Random(seed)
    return [rng.randint(50, 500) for _ in range(count)]


def test_few_answers_are_drawn_to_proportionality_and_many_are_believed():
    # Whatever the size, it takes 2 s.
    few, many = taught((size, 2.0) for size in (100, 300, 200)), taught((size, 2.0) for size in random_sizes(300))
    assert few.expected_s(400) / few.expected_s(100) > 2
    assert many.expected_s(400) / many.expected_s(100) < 1.25


@pytest.mark.parametrize("base_s", [0.0, 1.0, 5.0])
def test_a_line_is_learned_with_its_constant_part(base_s):
    speed = taught((size, base_s + size / 100) for size in random_sizes(300))
    for size in (60, 200, 480):
        assert speed.expected_s(size) == pytest.approx(base_s + size / 100, rel=0.1)


def test_a_straggler_counts_with_three_times_what_was_expected():
    steady = [(100, 1.0)] * 50
    straggled, tripled, usual = taught(steady), taught(steady), taught(steady)
    straggled.learn(100, 500.0)
    tripled.learn(100, 3.0)
    usual.learn(100, 1.0)
    assert straggled.expected_s(100) == tripled.expected_s(100)
    assert straggled.expected_s(100) > usual.expected_s(100)


def test_one_quick_answer_does_not_make_a_source_quick():
    assert taught([]).longest_s(10) == math.inf
    assert taught([(10, 0.01)]).longest_s(10) >= 30
    assert taught([(10, 0.01)] * 20).longest_s(10) < 0.1


def test_it_follows_a_source_that_changed():
    speed = taught([(100, 1.0)] * 500 + [(100, 8.0)] * 500)
    assert speed.expected_s(100) == pytest.approx(8.0, rel=0.05)
    for _ in range(500):
        speed.learn(100, 2.0)
    assert speed.expected_s(100) == pytest.approx(2.0, rel=0.05)


@given(answers)
def test_a_larger_size_never_takes_less_and_nothing_takes_no_time(pairs):
    speed = taught(pairs)
    expected = [speed.expected_s(size) for size in (0, 1, 10, 1000, 10**6)]
    assert expected == sorted(expected)
    assert expected[0] >= SHORTEST_S
    assert expected[-1] < math.inf


@given(answers, st.floats(0.01, 1000.0))
def test_what_fits_in_a_time_takes_that_time(pairs, seconds):
    speed = taught(pairs)
    size = speed.size_within(seconds)
    if size == math.inf:
        assert speed.expected_s(10**9) <= max(seconds, SHORTEST_S)
    elif size < 0:
        assert speed.expected_s(0) > seconds * 0.999
    else:
        assert speed.expected_s(size) == pytest.approx(max(seconds, SHORTEST_S), rel=1e-6)
