"""The breaker: when it opens, who probes, and that a source which merely errs now and then stays open to everybody."""

from __future__ import annotations

import math

import pytest

from qreward_plugins.scheduling.breaker import FAILURES_TO_OPEN, FIRST_COOLDOWN_S, LONGEST_COOLDOWN_S, Breaker


def opened(now=100.0):
    breaker = Breaker()
    assert [breaker.failed(now, probe=False, in_flight=1) for _ in range(FAILURES_TO_OPEN)][-1]
    return breaker


def test_it_opens_after_failures_in_a_row_only():
    breaker = Breaker()
    for _ in range(10):
        for _ in range(FAILURES_TO_OPEN - 1):
            assert not breaker.failed(0.0, probe=False, in_flight=1)
        breaker.succeeded()
    assert breaker.closed
    assert breaker.wait_s(0.0) == 0


def test_one_probe_passes_after_the_pause():
    breaker = opened(now=100.0)
    assert breaker.wait_s(101.0) == pytest.approx(FIRST_COOLDOWN_S - 1)
    assert breaker.wait_s(100.0 + FIRST_COOLDOWN_S) == 0
    breaker.started()
    assert breaker.wait_s(100.0 + FIRST_COOLDOWN_S) == math.inf
    breaker.succeeded()
    assert breaker.closed


def test_a_failed_probe_doubles_the_pause_up_to_the_longest():
    breaker, now, pauses = opened(now=0.0), 0.0, []
    for _ in range(6):
        now += breaker.wait_s(now)
        breaker.started()
        breaker.failed(now, probe=True, in_flight=1)
        pauses.append(breaker.wait_s(now))
    assert pauses == [10, 20, 40, LONGEST_COOLDOWN_S, LONGEST_COOLDOWN_S, LONGEST_COOLDOWN_S]


def test_a_probe_that_told_nothing_lets_another_one_pass():
    breaker = opened(now=0.0)
    breaker.started()
    breaker.abandoned(probe=True)
    assert breaker.wait_s(FIRST_COOLDOWN_S) == 0


def test_an_answer_of_an_attempt_from_before_closes_it():
    breaker = opened()
    breaker.succeeded()
    assert breaker.wait_s(100.0) == 0
