"""One quota, asked and used as the scheduler does."""

from __future__ import annotations

import math

import pytest

from qreward_plugins.config.models import Limits
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.quotas import MARGIN_S, Quota


def quota(processes: int = 1, **limits: object) -> Quota:
    return Quota(Limits.model_validate(limits), source="a", processes=processes)


def test_concurrency_has_no_time_and_comes_back_on_release():
    subject = quota(concurrency=2)
    held = [subject.reserve(0, 0, 0.0), subject.reserve(0, 0, 0.0)]
    assert subject.wait_s(0, 0.0) == math.inf
    held[0].release(0.0)
    held[0].release(0.0)
    assert subject.in_flight == 1
    assert subject.wait_s(0, 0.0) == 0


def test_tokens_are_an_upper_bound_until_settled():
    subject = quota(tokens_per_minute=1000)
    reservation = subject.reserve(400, 500, 0.0)
    assert subject.wait_s(200, 0.0) == pytest.approx(60 + MARGIN_S)
    reservation.release(0.0, prompt_tokens=80, completion_tokens=20)
    assert subject.wait_s(900, 0.0) == 0
    assert subject.wait_s(901, 0.0) > 0
    assert not subject.fits_ever(1001)


def test_a_completion_counts_from_when_it_has_come():
    subject = quota(tokens_per_minute=1000)
    reservation = subject.reserve(400, 500, 0.0)
    reservation.sent(1.0)
    assert subject.wait_s(501, 70.0) > 0  # the prompt has left the window, the completion may yet be written
    reservation.release(70.0, completion_tokens=300)
    assert subject.wait_s(700, 70.0) == 0
    assert subject.wait_s(701, 70.0) == pytest.approx(60 + MARGIN_S)


def test_a_request_that_is_written_late_counts_from_then():
    subject = quota(requests_per_minute=1)
    reservation = subject.reserve(0, 0, 0.0)
    assert subject.wait_s(0, 100.0) > 0
    reservation.sent(110.0)
    assert subject.wait_s(0, 120.0) == pytest.approx(50 + MARGIN_S)


def test_a_request_that_nobody_reported_as_sent_counts_from_its_end():
    subject = quota(requests_per_minute=1)
    subject.reserve(0, 0, 0.0).release(30.0)
    assert subject.wait_s(0, 40.0) == pytest.approx(50 + MARGIN_S)


def test_requests_in_flight_in_a_loop_that_was_closed_hold_nothing_for_ever():
    subject = quota(requests_per_minute=2, tokens_per_minute=1000, concurrency=2)
    for _ in range(2):
        subject.reserve(100, 400, 0.0)
    subject.forget_in_flight(10.0)
    assert subject.wait_s(500, 10.0) == pytest.approx(60 + MARGIN_S)
    assert subject.wait_s(1000, 70.0 + MARGIN_S) == 0


def test_processes_keep_to_equal_shares():
    subject = quota(processes=8, requests_per_minute=20, concurrency=17, tokens_per_minute=800)
    assert subject.concurrency == 2
    for _ in range(2):
        assert subject.wait_s(0, 0.0) == 0
        subject.reserve(0, 0, 0.0).release(0.0)
    assert subject.wait_s(0, 0.0) > 0
    assert not subject.fits_ever(101)


def test_a_share_below_one_is_an_error_that_names_both_limits():
    with pytest.raises(ConfigurationError) as caught:
        quota(processes=8, requests_per_minute=5, concurrency=4)
    assert [mistake.path for mistake in caught.value.mistakes] == [
        "sources.a.limits.concurrency",
        "sources.a.limits.requests_per_minute",
    ]
    assert "at most 4 processes" in str(caught.value)


def test_less_than_one_request_a_window_is_one_in_a_longer_window():
    subject = quota(requests_per_minute=6, window_s=1)
    subject.reserve(0, 0, 0.0).release(0.0)
    assert subject.wait_s(0, 0.0) == pytest.approx(10 + MARGIN_S)


def test_a_short_window_scales_the_rate():
    subject = quota(requests_per_minute=600, window_s=1)
    for _ in range(10):
        subject.reserve(0, 0, 0.0).release(0.0)
    assert subject.wait_s(0, 0.0) == pytest.approx(1 + MARGIN_S)


def test_auto_changes_to_pacing_only_when_throttled_clearly_below_the_limit():
    subject = quota(requests_per_minute=60)
    for _ in range(60):
        subject.reserve(0, 0, 0.0).release(0.0)
    assert not any(subject.throttled(1.0) for _ in range(5))
    assert not subject.use(1.0).paced
    assert [subject.throttled(200.0) for _ in range(3)] == [False, False, True]
    subject.reserve(0, 0, 200.0).release(200.0)
    assert subject.wait_s(0, 200.0) == pytest.approx(1.0)


def test_throttling_now_and_then_over_a_long_run_is_no_evidence_for_pacing():
    subject = quota(requests_per_minute=60)
    assert not any(subject.throttled(100.0 * number) for number in range(20))


def test_tokens_that_explain_the_throttling_are_no_evidence_for_pacing():
    subject = quota(requests_per_minute=60, tokens_per_minute=1000)
    subject.reserve(900, 50, 0.0).release(0.0)
    assert not any(subject.throttled(1.0) for _ in range(5))


def test_a_declared_bucket_is_paced_from_the_start():
    subject = quota(requests_per_minute=60, window="bucket", burst=2)
    waits = []
    for _ in range(3):
        waits.append(subject.wait_s(0, 0.0))
        subject.reserve(0, 0, 0.0).release(0.0)
    assert waits == [0, 0, pytest.approx(1.0)]
