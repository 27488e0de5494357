"""Admission by the rate of outcomes."""

from __future__ import annotations

import pytest

from qreward_plugins.server.load import WINDOW_S, Load


def loaded(*, per_s: float, seconds: int, under_way: int, most: int = 10_000) -> Load:
    load = Load(most)
    load.began(under_way + int(per_s * seconds))
    for second in range(seconds):
        load.ended(int(per_s), float(second))
    return load


def test_samples_that_can_be_done_in_time_are_admitted():
    load = loaded(per_s=10, seconds=10, under_way=100)
    assert load.retry_after_s(100, 25.0, 10.0) is None


def test_a_refusal_says_when_the_samples_can_be_done_in_time():
    load = loaded(per_s=10, seconds=10, under_way=400)
    assert load.retry_after_s(100, 25.0, 10.0) == pytest.approx(25.0)


def test_with_few_outcomes_no_rate_is_known():
    load = loaded(per_s=1, seconds=10, under_way=400)
    assert load.retry_after_s(100, 1.0, 10.0) is None


def test_old_outcomes_do_not_count():
    load = loaded(per_s=10, seconds=10, under_way=400)
    assert load.retry_after_s(100, 1.0, 11.0 + WINDOW_S) is None


def test_the_most_samples_hold_without_a_rate():
    load = Load(100)
    load.began(90)
    assert load.retry_after_s(10, 1.0, 0.0) is None
    assert load.retry_after_s(11, 1.0, 0.0) == WINDOW_S
    load.left(90)
    assert load.retry_after_s(1000, 1.0, 0.0) is None


def test_of_many_samples_those_that_can_be_done_may_come():
    load = loaded(per_s=10, seconds=10, under_way=100)
    assert load.room(100, 25.0, 10.0) == 100
    assert load.room(400, 25.0, 10.0) == 150
    assert load.room(400, 5.0, 10.0) == 0
    crowded = Load(100)
    crowded.began(90)
    assert crowded.room(50, 1.0, 0.0) == 10
    full = loaded(per_s=10, seconds=10, under_way=100, most=120)
    assert full.room(100, float("inf"), 10.0) == 20
    crowded.left(90)
    assert crowded.room(1000, 1.0, 0.0) == 1000
