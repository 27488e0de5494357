"""The quota of a source whose limits many processes share: the ledgers keep to a share that changes."""

from __future__ import annotations

import math

import pytest

from qreward_plugins.config import Limits
from qreward_plugins.quotas.ledger import MARGIN_S
from qreward_plugins.quotas.shared import SharedQuota

from ..kit import each_of


def shared(**limits):
    return SharedQuota(Limits.model_validate(limits), source="s")


def send(quota, count, now, tokens=0.0):
    for _ in range(count):
        assert quota.wait_s(tokens, now) == 0.0
        quota.reserve(tokens, 0.0, now).sent(now)


@each_of(
    ("limits", "share"),
    [
        ({"requests_per_minute": 10}, {}),
        ({"tokens_per_minute": 10}, {}),
        ({"concurrency": 10}, {}),
        ({"requests_per_minute": 10, "window": "bucket"}, {}),
        # A fraction of a request is none.
        ({"requests_per_minute": 60, "concurrency": 9}, {"requests": 0.9, "concurrency": 9.0}),
        ({"requests_per_minute": 60, "concurrency": 9}, {"requests": 9.0, "concurrency": 0.9}),
        ({"requests_per_minute": 60, "concurrency": 9}, {"requests": 9.0}),
    ],
)
def test_nothing_may_be_sent_without_a_share_of_each_limit_that_is_valid(limits, share):
    quota = shared(**limits)
    assert quota.wait_s(1.0, 0.0) == math.inf
    quota.resize(dict.fromkeys(quota.limits(), 9.0), workers=4, now=0.0)
    quota.valid_until = 10.0
    assert quota.wait_s(1.0, 9.99) == 0.0
    assert quota.wait_s(1.0, 10.0) == math.inf
    quota.resize(share, workers=4, now=0.0)
    assert quota.wait_s(1.0, 0.0) == math.inf


def test_the_share_limits_what_is_sent_in_a_window():
    quota = shared(requests_per_minute=60)
    quota.resize({"requests": 3.0}, workers=4, now=0.0)
    send(quota, 3, 0.0)
    assert quota.wait_s(0.0, 0.0) == pytest.approx(60.0 + MARGIN_S)
    quota.resize({"requests": 5.0}, workers=4, now=1.0)
    send(quota, 2, 1.0)
    quota.resize({"requests": 1.0}, workers=4, now=2.0)
    assert quota.wait_s(0.0, 60.5) > 0.0
    assert quota.wait_s(0.0, 61.5) == 0.0


def test_it_says_what_was_spent_and_when_that_leaves_the_window():
    quota = shared(requests_per_minute=60, tokens_per_minute=1000, concurrency=5)
    quota.resize({"requests": 9.0, "tokens": 900.0, "concurrency": 5.0}, workers=4, now=0.0)
    send(quota, 1, 0.0, tokens=100.0)
    waiting = quota.reserve(30.0, 20.0, 5.0)
    window_s = 60.0 + MARGIN_S
    assert quota.spent("requests", 10.0) == ((pytest.approx(window_s - 10.0), 1.0), (math.inf, 1.0))
    assert quota.spent("tokens", 10.0) == ((pytest.approx(window_s - 10.0), 100.0), (math.inf, 50.0))
    assert quota.spent("concurrency", 10.0) == ((math.inf, 2.0),)
    waiting.sent(20.0)
    assert quota.spent("tokens", 20.0)[-1] == (math.inf, 20.0)
    waiting.release(30.0, prompt_tokens=30.0, completion_tokens=5.0)
    assert sum(amount for _, amount in quota.spent("tokens", 30.0)) == 135.0
    assert quota.spent("concurrency", 30.0) == ((math.inf, 1.0),)


def test_a_part_of_a_bucket_has_as_much_of_its_rate():
    quota = shared(requests_per_minute=60, window="bucket", burst=10)
    quota.resize({"burst": 2.0}, workers=5, now=0.0)
    quota.reserve(0.0, 0.0, 0.0).sent(0.0)
    assert 0.0 < quota.wait_s(0.0, 0.0) <= MARGIN_S + 1e-6  # the way to the server may vary
    quota.reserve(0.0, 0.0, 0.0).sent(0.0)
    assert quota.drained(0.0) == pytest.approx(2.0)
    assert quota.refilled_in_s(0.0) == pytest.approx(10.0, abs=0.2)
    assert quota.wait_s(0.0, 0.0) == pytest.approx(5.0, abs=0.2)
    # Of a larger part as much is gone, and it fills faster.
    quota.resize({"burst": 4.0}, workers=5, now=0.0)
    assert quota.drained(0.0) == pytest.approx(2.0)
    assert quota.refilled_in_s(0.0) == pytest.approx(5.0, abs=0.2)


def test_forecasts_take_an_equal_part_where_the_share_is_less():
    quota = shared(requests_per_minute=60, tokens_per_minute=600)
    quota.resize({"requests": 3.0, "tokens": 500.0}, workers=4, now=0.0)
    assert quota.per_window()[0] == 15.0
    assert quota.burst == 15.0
    assert quota.tokens_per_window() == 500.0
    assert 600.0 <= quota.most_tokens < 601.0, "a request fits if it fits the whole limit"
    slots = SharedQuota(Limits(concurrency=10), source="s", slots=2)
    slots.resize({"concurrency": 9.0}, workers=1, now=0.0)
    assert slots.concurrency == 2


def test_a_limit_that_is_lowered_lowers_the_share_and_one_that_is_raised_does_not():
    quota = shared(requests_per_minute=60, tokens_per_minute=600)
    quota.resize({"requests": 30.0, "tokens": 600.0}, workers=2, now=0.0)
    send(quota, 5, 0.0)
    quota.retune(Limits(requests_per_minute=10, tokens_per_minute=6000, concurrency=3), 1.0)
    assert quota.share == {"requests": 10.0, "tokens": 600.0, "concurrency": 0.0}
    assert quota.workers == 2
    assert sum(amount for _, amount in quota.spent("requests", 1.0)) == 5.0


def test_a_bucket_that_is_retuned_while_it_has_no_share_is_not_filled_by_that():
    quota = shared(requests_per_minute=60, window="bucket", burst=10)
    quota.resize({"burst": 10.0}, workers=2, now=0.0)
    for _ in range(10):
        quota.reserve(0.0, 0.0, 0.0).sent(0.0)
    quota.resize({}, workers=2, now=0.0)
    quota.retune(Limits(requests_per_minute=6000, window="bucket", burst=10), 0.0)
    quota.resize({"burst": 1.0}, workers=2, now=0.5)
    assert quota.refilled_in_s(0.5) >= 0.4, "a part of one gets ten a second"
