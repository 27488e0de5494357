"""What is learned of a source: its breaker beside a model of what it promises, whatever attempts end in whatever order;
its speed, a line over size that is drawn to proportionality at first, and that one straggler does not bend; and the
tail: how much longer an old attempt takes, learned from those that were given up as well.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qreward_plugins.quotas.pauses import FAILURES_TO_OPEN, SHARE_TO_OPEN, Breaker
from qreward_plugins.scheduling.latency import SHORTEST_S, Speed, Tail


class Attempt:
    """One attempt under way. `probe`: it started while the breaker was open, in its `period`-th time of being so."""

    def __init__(self, probe, period):
        self.probe, self.period = probe, period


class BreakerOfASource(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.breaker = Breaker()
        self.now = 1000.0
        self.live: list[Attempt] = []
        self.row = 0
        self.opened_at: float | None = None
        self.period = 0

    def opens(self):
        self.opened_at = self.now
        self.period += 1

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0, 10.0, 61.0]))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(pace_s=st.sampled_from([0.0, 0.5, 10.0, 30.0]))
    def change_pace(self, pace_s):
        self.breaker.pace_s = pace_s

    @rule(many=st.integers(1, 8))
    def start(self, many):
        for _ in range(many):
            if self.breaker.wait_s(self.now) > 0:
                return
            self.live.append(Attempt(not self.breaker.closed, self.period))
            self.breaker.started()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def answer(self, data):
        self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.breaker.succeeded()
        self.row, self.opened_at = 0, None

    @precondition(lambda self: self.live)
    @rule(data=st.data(), many=st.integers(1, 8))
    def fail(self, data, many):
        for _ in range(min(many, len(self.live))):
            attempt = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            in_flight = len(self.live)
            opened = self.breaker.failed(self.now, probe=attempt.probe, in_flight=in_flight)
            self.row += 1
            if self.opened_at is not None:
                assert opened is attempt.probe, "while it is open, only a probe decides"
            else:
                assert opened is (self.row >= max(FAILURES_TO_OPEN, SHARE_TO_OPEN * in_flight))
            if opened:
                self.opens()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def tell_nothing(self, data):
        attempt = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        closed = self.breaker.closed
        self.breaker.abandoned(probe=attempt.probe)
        assert self.breaker.closed is closed

    @rule()
    def fall_silent(self):
        assert self.breaker.trip(self.now) is (self.opened_at is None)
        if self.opened_at is None:
            self.opens()

    @invariant()
    def it_is_open_as_long_as_it_says(self):
        wait_s = self.breaker.wait_s(self.now)
        assert self.breaker.closed is (self.opened_at is None)
        if self.opened_at is None:
            assert wait_s == 0
        elif wait_s == math.inf:
            assert any(attempt.probe for attempt in self.live), "it waits for a probe that is not under way"
        else:
            assert wait_s == max(0.0, self.opened_at + self.breaker.pace_s - self.now)
        assert self.breaker.failures_in_row == self.row

    @invariant()
    def one_probe_at_a_time(self):
        if self.opened_at is not None:
            assert sum(attempt.probe and attempt.period == self.period for attempt in self.live) <= 1

    def teardown(self):
        """Whatever happened: once everything has ended, one attempt may pass, and an answer opens it to all."""
        for attempt in self.live:
            self.breaker.abandoned(probe=attempt.probe)
        self.now += self.breaker.pace_s
        assert self.breaker.wait_s(self.now) == 0
        self.breaker.started()
        self.breaker.succeeded()
        assert self.breaker.wait_s(self.now) == 0
        assert self.breaker.closed


TestBreakerOfASource = BreakerOfASource.TestCase
TestBreakerOfASource.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# The speed


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


# The tail


def tail_of(ended, given_up=()):
    tail = Tail()
    for age in ended:
        tail.ended(age)
    for age in given_up:
        tail.given_up(age)
    return tail


def test_before_anything_is_known_an_old_attempt_is_taken_for_a_straggler():
    tail = Tail()
    assert tail.residual(0.0) == pytest.approx(1.2, abs=0.15)
    assert tail.residual(0.8) < tail.residual(0.0)
    assert tail.residual(3.0) > 3.0


def test_ends_are_expected_in_step_with_what_was_seen():
    rng = random.Random(3)
    tail = tail_of(rng.expovariate(1.0) for _ in range(4000))
    for age in (0.5, 1.0, 2.0):
        assert tail.hazard(age) == pytest.approx(age, rel=0.15)


def test_attempts_that_were_given_up_are_not_forgotten():
    usual, slow = [1.0] * 1600, [1.5] * 160
    forgetful, mistaken, right = tail_of(usual), tail_of(usual + slow), tail_of(usual, slow)
    assert right.residual(1.2) > mistaken.residual(1.2) + 0.5
    assert right.hazard(1.3) < forgetful.hazard(1.3)
    assert right.hazard(1.5) < mistaken.hazard(1.5)
