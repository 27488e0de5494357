"""The limits of strict servers, compared with a full recount."""

from __future__ import annotations

import random

import pytest

from qreward_plugins.simulation.strict_limits import SHORTEST_WAIT_S, RequestBucket, Window


def moments(rng, count):
    """Ascending times in quarters of a second, so that windows end exactly at entries."""
    now = 0.0
    for _ in range(count):
        now += rng.choice((0.0, 0.25, 0.25, 0.5, 3.0))
        yield now


@pytest.mark.parametrize("seed", range(10))
def test_a_request_window_admits_exactly_what_a_recount_admits(seed):
    rng = random.Random(seed)
    limit, window_s = rng.randint(1, 8), rng.choice((1.0, 4.0))
    book = Window(limit, window_s)
    admitted = []
    for now in moments(rng, 400):
        recent = [time for time in admitted if time > now - window_s]
        wait_s = book.wait_s(1, now)
        assert book.used(now) == len(recent)
        assert (wait_s == 0) == (len(recent) < limit)
        if wait_s == 0:
            book.enter(1, now)
            admitted.append(now)
        else:
            # What it asks for is the truth: a place is free then, and not a moment sooner.
            assert sum(time > now + wait_s - window_s for time in admitted) < limit
            assert sum(time > now + wait_s - 0.001 - window_s for time in admitted) >= limit


@pytest.mark.parametrize("seed", range(10))
def test_a_token_window_admits_exactly_what_a_recount_admits(seed):
    rng = random.Random(seed)
    limit, window_s = rng.randint(50, 200), rng.choice((1.0, 4.0))
    book = Window(limit, window_s)
    admitted = []
    refused = 0
    for now in moments(rng, 400):
        tokens = rng.randint(1, 80)
        recent = sum(amount for time, amount in admitted if time > now - window_s)
        wait_s = book.wait_s(tokens, now)
        assert book.used(now) == recent
        assert (wait_s == 0) == (recent + tokens <= limit)
        if wait_s == 0:
            book.enter(tokens, now)
            admitted.append((now, tokens))
        elif tokens <= limit:
            refused += 1
            later = now + wait_s
            assert tokens + sum(amount for time, amount in admitted if time > later - window_s) <= limit
            assert tokens + sum(amount for time, amount in admitted if time > later - 0.001 - window_s) > limit
        if admitted:
            assert book.reset_s(now) == pytest.approx(max(0.0, admitted[-1][0] + window_s - now))
    assert refused > 0


def test_more_tokens_than_the_limit_never_fit():
    book = Window(100, 60.0)
    assert book.wait_s(101, 5.0) == 60.0


@pytest.mark.parametrize("seed", range(10))
def test_a_bucket_lets_no_interval_have_more_than_its_burst_and_what_refilled(seed):
    rng = random.Random(seed)
    per_minute, burst = rng.choice((60, 240)), rng.randint(1, 6)
    book = RequestBucket(per_minute, burst)
    admitted = []
    for now in moments(rng, 300):
        wait_s = book.wait_s(1, now)
        if wait_s == 0:
            book.enter(1, now)
            admitted.append(now)
    rate_per_s = per_minute / 60
    for first, start in enumerate(admitted):
        for last, end in enumerate(admitted[first:], first):
            assert last - first + 1 <= burst + rate_per_s * (end - start) + 1e-6
    # And it is not stricter than that: at the beginning all of the burst goes at once.
    fresh = RequestBucket(per_minute, burst)
    for _ in range(burst):
        assert fresh.wait_s(1, 0.0) == 0
        fresh.enter(1, 0.0)
    assert fresh.wait_s(1, 0.0) == pytest.approx(1 / rate_per_s)
    assert fresh.used(0.0) == burst
    assert fresh.reset_s(0.0) == pytest.approx(burst / rate_per_s)
    assert fresh.wait_s(1, 1 / rate_per_s) == 0


def test_nobody_is_told_to_come_back_at_once():
    window = Window(1, 60.0)
    window.enter(1, 0.0)
    assert window.wait_s(1, 59.9999) == SHORTEST_WAIT_S
