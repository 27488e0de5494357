"""The counts behind the report, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.testing import Violation
from qreward_plugins.testing.report import Tally, quantile


@given(gaps=st.lists(st.integers(0, 30), max_size=60), window=st.integers(1, 40))
def test_the_fullest_window_is_the_brute_force_maximum(gaps: list[int], window: int) -> None:
    tally = Tally(window)
    arrivals: list[int] = []
    now = 0
    for gap in gaps:
        now += gap
        arrivals.append(now)
        tally.arrived(now, credentials=False)
    fullest = max((sum(end - window < at <= end for at in arrivals) for end in arrivals), default=0)
    assert tally.snapshot(now).max_requests_in_window == fullest


def test_memory_is_bounded() -> None:
    tally = Tally(1.0)
    for index in range(20_000):
        tally.arrived(float(index), credentials=False)
        tally.violated(Violation("requests", float(index), 1.0, 0.5))
        tally.answered(float(index))
        tally.scorer_failed(ValueError("x" * 10_000))
    report = tally.snapshot(0.0)
    assert (report.requests, report.violations_total, report.scorer_errors_total) == (20_000, 20_000, 20_000)
    assert [violation.at_s for violation in report.violations] == list(range(1_000))
    assert (len(report.scorer_errors), max(map(len, report.scorer_errors))) == (20, 300)
    assert report.latency_p50_s == 14_999, "of the latest 10,000"
    assert len(tally._arrivals) == 1


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 1.0), (0.01, 1.0), (0.5, 50.0), (0.95, 95.0), (0.99, 99.0), (0.991, 100.0), (1.0, 100.0)],
)
def test_quantiles_are_nearest_rank(share: float, expected: float) -> None:
    assert quantile([float(value) for value in range(1, 101)], share) == expected


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile([], 0.5) is None
