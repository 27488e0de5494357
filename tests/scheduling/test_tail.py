"""The tail of latencies: how much longer an old attempt takes, learned from those that were given up as well."""

from __future__ import annotations

import random

import pytest

from qreward_plugins.scheduling.latency import Tail

AGES = [0.05 * step for step in range(1, 800)]


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


def test_reading_the_figures_changes_nothing():
    rng, read, unread = random.Random(5), Tail(), Tail()
    for number in range(5000):
        age, given_up = rng.expovariate(0.5), rng.random() < 0.1
        for tail in (read, unread):
            (tail.given_up if given_up else tail.ended)(age)
        read.residual(1.0)
        if number % 1700 == 0:
            assert [unread.hazard(age) for age in AGES] == pytest.approx([read.hazard(age) for age in AGES])
    assert [unread.residual(age) for age in AGES] == pytest.approx([read.residual(age) for age in AGES])
    assert len(unread._noted) < 1000
