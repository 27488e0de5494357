"""The ledger against a brute-force oracle: no window ever holds more than the limit, and no wait is longer than
needed.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.quotas import MARGIN_S, Ledger, Pace

steps = st.lists(
    st.tuples(
        st.floats(0, 30, allow_nan=False),  # seconds until the next request asks
        st.integers(1, 40),  # its amount
        st.floats(0, 90, allow_nan=False),  # how late it is really written
        st.one_of(st.none(), st.integers(0, 60)),  # what it really took, once known
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps=steps)
def test_no_window_holds_more_than_the_limit(steps):
    limit, window = 100.0, 60.0
    ledger = Ledger(limit, window)
    now, seen = 0.0, []
    for pause, amount, late, really in steps:
        now += pause
        wait = ledger.wait_s(amount, now)
        assert math.isfinite(wait)
        rounds = 0
        while wait > 0:
            now += wait
            wait = ledger.wait_s(amount, now)
            rounds += 1
            assert rounds < 200
        entry = ledger.hold(amount)
        now += late
        ledger.stamp(entry, now)
        if really is not None:
            really = min(really, amount)  # what is reserved is an upper bound
            ledger.amend(entry, really)
        seen.append((now, amount if really is None else really))
    for at, _ in seen:
        inside = sum(amount for when, amount in seen if at <= when < at + window)
        assert inside <= limit + 1e-6


def test_the_window_is_spent_at_once_and_recycles_after_its_length():
    ledger = Ledger(3, 60)
    for _ in range(3):
        assert ledger.wait_s(1, 10.0) == 0
        ledger.stamp(ledger.hold(1), 10.0)
    assert ledger.wait_s(1, 10.0) == pytest.approx(60 + MARGIN_S)
    assert ledger.wait_s(1, 70.0 + MARGIN_S) == 0


def test_a_late_write_moves_the_window_with_it():
    ledger = Ledger(1, 60)
    entry = ledger.hold(1)
    ledger.stamp(entry, 5.0)
    ledger.stamp(entry, 6.0)
    assert ledger.wait_s(1, 60.2) == pytest.approx(5 + MARGIN_S - 0.2)


def test_what_is_held_does_not_age():
    ledger = Ledger(2, 60)
    entry = ledger.hold(1)
    ledger.stamp(ledger.hold(1), 0.0)
    assert ledger.spent(500.0) == 1  # the one that is held
    assert ledger.wait_s(2, 500.0) == pytest.approx(60 + MARGIN_S)  # it could be written any moment
    ledger.stamp(entry, 520.0)
    assert ledger.wait_s(2, 560.0) == pytest.approx(20 + MARGIN_S)
    assert ledger.wait_s(2, 580.0 + MARGIN_S) == 0


def test_what_nobody_will_stamp_ages_from_now():
    ledger = Ledger(3, 60)
    for _ in range(3):
        ledger.hold(1)
    ledger.stamp_all(100.0)
    assert ledger.wait_s(1, 100.0) == pytest.approx(60 + MARGIN_S)
    assert ledger.spent(160.0 + MARGIN_S) == 0


def test_settling_gives_back_what_was_reserved_in_vain():
    ledger = Ledger(1000, 60)
    entry = ledger.hold(900)
    assert ledger.wait_s(200, 1.0) > 0
    ledger.amend(entry, 300)
    assert ledger.wait_s(200, 1.0) == 0
    assert ledger.spent(1.0) == 300
    ledger.stamp(entry, 1.0)
    ledger.amend(entry, 400)
    assert ledger.spent(2.0) == 400


def test_settling_after_the_window_changes_nothing():
    ledger = Ledger(1000, 60)
    entry = ledger.hold(900)
    ledger.stamp(entry, 0.0)
    assert ledger.spent(100.0) == 0
    ledger.amend(entry, 300)
    assert ledger.spent(100.0) == 0


def test_more_than_the_limit_never_fits():
    assert Ledger(10, 60).wait_s(11, 0.0) == math.inf


@settings(max_examples=100, deadline=None)
@given(pauses=st.lists(st.floats(0, 3, allow_nan=False), max_size=80), burst=st.integers(1, 5))
def test_pacing_never_exceeds_the_rate_plus_the_burst(pauses, burst):
    rate, pace, now, sent = 2.0, Pace(2.0, burst), 0.0, []
    for pause in pauses:
        now += pause
        now += pace.wait_s(now)
        pace.spend(now)
        sent.append(now)
    for index, start in enumerate(sent):
        for end in sent[index:]:
            inside = sum(start <= at <= end for at in sent)
            assert inside <= burst + rate * (end - start) + 1e-6
