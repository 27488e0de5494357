"""The server's limits, in virtual time, against what anybody would count by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.simulation.strict_limits import SlidingWindow, TokenBucket
from qreward_plugins.testing import ServerLimits

from ..kit import each_of

STEPS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=80)


@given(steps=STEPS, limit=st.integers(1, 12), window=st.integers(1, 40))
def test_sliding_window_is_the_brute_force_count(steps: list[tuple[int, int]], limit: int, window: int) -> None:
    ledger = SlidingWindow(limit, window)
    admitted: list[tuple[int, int]] = []
    now = 0
    for gap, amount in steps:
        now += gap
        used = sum(a for at, a in admitted if now - window < at)
        excess = ledger.take(amount, now)
        # Exact in both directions: it never admits too much, and never rejects what fits.
        assert (excess is None) == (used + amount <= limit)
        if excess is None:
            admitted.append((now, amount))
        else:
            assert excess.over == used + amount - limit
            if amount <= limit:
                back = now + excess.retry_after_s
                assert sum(a for at, a in admitted if back - window < at) + amount <= limit
                just_before = back - 1
                assert sum(a for at, a in admitted if just_before - window < at) + amount > limit
            else:
                assert excess.retry_after_s == window
        assert ledger.announced(now).remaining == limit - sum(a for at, a in admitted if now - window < at)
    for end, _ in admitted:
        assert sum(a for at, a in admitted if end - window < at <= end) <= limit


@given(steps=STEPS, rate=st.integers(1, 5), capacity=st.integers(1, 10))
def test_token_bucket_never_exceeds_rate_and_burst(steps: list[tuple[int, int]], rate: int, capacity: int) -> None:
    bucket = TokenBucket(float(rate), float(capacity))
    admitted: list[tuple[int, int]] = []
    now = 0
    for gap, amount in steps:
        now += gap
        excess = bucket.take(amount, now)
        if excess is None:
            admitted.append((now, amount))
        else:
            # By its own word: at this time it fits, and shortly before it does not.
            assert bucket.excess(amount, now + excess.retry_after_s - 1e-3) is not None
            assert bucket.excess(amount, now + excess.retry_after_s) is None
            now += math.ceil(excess.retry_after_s)
    for first, (start, _) in enumerate(admitted):
        total = 0
        for at, amount in admitted[first:]:
            total += amount
            debt = max(0, amount - capacity)
            assert total <= capacity + rate * (at - start) + debt + 1e-6


@each_of(
    ("settings", "problem"),
    [
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"kind": "leaky"}, "kind"),
        ({"requests_per_minute": 30, "window_s": 1.0}, "make the window longer"),
    ],
)
def test_limits_that_cannot_be_enforced_are_refused(settings: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ServerLimits(**settings)
