"""The breaker beside a model of what it promises, whatever attempts end in whatever order."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qreward_plugins.scheduling.breaker import (
    FAILURES_TO_OPEN,
    FIRST_COOLDOWN_S,
    LONGEST_COOLDOWN_S,
    SHARE_TO_OPEN,
    Breaker,
)


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
        self.pause_s = FIRST_COOLDOWN_S
        self.period = 0

    def opens(self):
        self.opened_at = self.now
        self.period += 1

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0, 10.0, 61.0]))
    def pass_time(self, seconds):
        self.now += seconds

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
        self.row, self.opened_at, self.pause_s = 0, None, FIRST_COOLDOWN_S

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
                if opened:
                    self.pause_s = min(2 * self.pause_s, LONGEST_COOLDOWN_S)
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
            assert wait_s == max(0.0, self.opened_at + self.pause_s - self.now)
        assert self.breaker.failures_in_row == self.row

    @invariant()
    def one_probe_at_a_time(self):
        if self.opened_at is not None:
            assert sum(attempt.probe and attempt.period == self.period for attempt in self.live) <= 1

    def teardown(self):
        """Whatever happened: once everything has ended, one attempt may pass, and an answer opens it to all."""
        for attempt in self.live:
            self.breaker.abandoned(probe=attempt.probe)
        self.now += LONGEST_COOLDOWN_S
        assert self.breaker.wait_s(self.now) == 0
        self.breaker.started()
        self.breaker.succeeded()
        assert self.breaker.wait_s(self.now) == 0
        assert self.breaker.closed


TestBreakerOfASource = BreakerOfASource.TestCase
TestBreakerOfASource.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
