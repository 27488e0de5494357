"""The learned concurrency, rule by rule."""

from __future__ import annotations

import pytest

from qreward_plugins.quotas.concurrency import UNDECLARED_CONCURRENCY, ConcurrencyWindow


def round_trip(window: ConcurrencyWindow, now: float) -> None:
    """As many answers as the window allows in flight."""
    window.filled()
    for _ in range(int(window.size)):
        window.answered(now)


def test_it_starts_wide_and_doubles_until_the_first_cut():
    window = ConcurrencyWindow()
    sizes = []
    for trip in range(3):
        round_trip(window, float(trip))
        sizes.append(window.size)
    assert sizes == [2 * UNDECLARED_CONCURRENCY, 4 * UNDECLARED_CONCURRENCY, 8 * UNDECLARED_CONCURRENCY]
    assert not window.cut
    for trip in range(10):
        round_trip(window, float(trip))
    assert window.size == 1024


def test_it_grows_only_while_it_is_really_used():
    window = ConcurrencyWindow()
    for _ in range(100):
        window.answered(0.0)
    assert window.size == UNDECLARED_CONCURRENCY
    window.filled()
    for _ in range(100):
        window.answered(0.0)
    assert window.size == 2 * UNDECLARED_CONCURRENCY


def test_a_cut_is_of_what_was_really_in_flight():
    window = ConcurrencyWindow()
    assert window.throttled(1.0, 0.5, 9)
    assert window.size == pytest.approx(7.0)


def test_what_was_sent_before_a_cut_does_not_cut_again():
    window = ConcurrencyWindow()
    assert window.throttled(10.0, 9.9, 31)
    assert not window.throttled(10.5, 9.95, 20)
    assert window.throttled(10.5, 10.1, 20)


def test_a_request_that_is_rejected_with_none_in_flight_says_nothing_of_concurrency():
    window = ConcurrencyWindow()
    assert not window.throttled(10.0, 9.9, 0)
    assert not window.cut


def test_after_a_cut_it_grows_by_one_for_a_window_of_answers():
    window = ConcurrencyWindow()
    window.throttled(0.0, 0.0, 99)
    before = window.size
    round_trip(window, 1.0)
    assert window.size == pytest.approx(before + 1, abs=0.1)


def test_answers_to_requests_from_before_the_storm_are_no_evidence_in_it():
    window = ConcurrencyWindow()
    for second in range(5):
        window.throttled(100.0 + second, 99.99 + second, 31 - 6 * second)
        window.answered(95.0)
    for trip in range(6):
        round_trip(window, 130.0 + trip)
    assert window.size > 0.65 * UNDECLARED_CONCURRENCY


def test_beyond_where_it_was_throttled_last_it_grows_faster_and_faster():
    window = ConcurrencyWindow()
    window.throttled(0.0, 0.0, 3)  # at four
    trips = 0
    while window.size < 64:
        round_trip(window, 1.0 + trips)
        trips += 1
    assert trips < 20
