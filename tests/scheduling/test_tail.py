"""The tail of latencies: how much longer an old attempt takes, learned from those that were given up as well."""

from __future__ import annotations

import random

import pytest

from qreward_plugins.scheduling.latency import Tail


def learned(*, ended=(), given_up=()):
    tail = Tail()
    for age in ended:
        tail.ended(age)
    for age in given_up:
        tail.given_up(age)
    return tail


def exponential(count=4000, seed=3):
    rng = random.Random(seed)
    return [rng.expovariate(1.0) for _ in range(count)]


def test_before_anything_is_known_an_old_attempt_is_taken_for_a_straggler():
    tail = Tail()
    assert tail.residual(0.0) == pytest.approx(1.2, abs=0.15)
    assert tail.residual(0.8) < tail.residual(0.0)
    assert tail.residual(3.0) > 3.0


def test_ends_are_expected_in_step_with_what_was_seen():
    tail = learned(ended=exponential())
    for age in (0.5, 1.0, 2.0):
        assert tail.hazard(age) == pytest.approx(age, rel=0.15)
