"""Pacing, and when a server is taken to be a bucket."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.quotas import BucketEvidence, Pace
from qreward_plugins.quotas.pace import JITTER_S


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
            assert sum(start <= at <= end for at in sent) <= burst + rate * (end - start) + 1e-6


@settings(max_examples=100, deadline=None)
@given(
    pauses=st.lists(st.floats(0, 3, allow_nan=False), max_size=10),
    burst=st.integers(1, 5),
    seconds=st.floats(0, 30).filter(lambda seconds: abs(seconds * 2 - round(seconds * 2)) > 1e-3),
)
def test_capacity_is_what_can_be_sent(pauses, burst, seconds):
    pace, now = Pace(2.0, burst), 0.0
    for pause in pauses:
        now += pause
        if pace.wait_s(now) == 0:
            pace.spend(now)
    promised, until, sent = pace.capacity(now + seconds, now), now + seconds, 0
    while True:
        now += pace.wait_s(now)
        if now > until + 1e-7:
            break
        pace.spend(now)
        sent += 1
    assert sent == promised


def test_another_rate_keeps_what_went_ahead():
    pace = Pace(1.0, 3)
    for _ in range(3):
        pace.spend(0.0)
    pace.change(0.5, 1, 0.0)
    assert pace.wait_s(0.0) == pytest.approx(3 * (2.0 + JITTER_S))
    pace.change(10.0, 1, 0.0)
    assert pace.wait_s(0.0) == pytest.approx(3 * (0.1 + JITTER_S))


def test_three_throttles_within_a_window_are_evidence_and_pacing_is_on_trial():
    evidence = BucketEvidence()
    assert [evidence.throttled(at, 60.0) for at in (0.0, 61.0, 100.0)] == [False, False, False]
    assert evidence.throttled(120.0, 60.0)
    assert evidence.paced_until == 240.0
    assert [evidence.throttled(at, 60.0) for at in (241.0, 242.0, 243.0)] == [False, False, True]
    assert evidence.paced_until == 243.0 + 240.0  # twice as long
    for at in (9000.0, 9001.0):
        assert not evidence.throttled(at, 60.0)
    assert evidence.throttled(9002.0, 60.0)
    assert evidence.paced_until == 9002.0 + 120.0  # too long ago to have anything to do with it
