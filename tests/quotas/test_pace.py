"""Pacing, and when a server is taken to be a bucket."""

from __future__ import annotations

import heapq
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from qreward_plugins.config import Limits
from qreward_plugins.quotas.pace import BucketEvidence, Pace
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.sources import announced_limits
from qreward_plugins.testing import ServerLimits
from qreward_plugins.testing.protocols import PROTOCOLS

from ..kit import each_of


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(0, 3), st.one_of(st.just(0.0), st.floats(0, 9))), max_size=60),
    burst=st.integers(1, 5),
)
@example(steps=[(0.0, 2.0), (0.0, 0.0), (2.0, 0.0)], burst=2)
def test_requests_that_are_written_late_and_in_any_order_never_exceed_the_rate_plus_the_burst(steps, burst):
    rate, pace, now, written, held = 2.0, Pace(2.0, burst), 0.0, [], []

    def write(until):
        while held and held[0] <= until:
            at = heapq.heappop(held)
            pace.spend(at)
            written.append(at)

    for pause, late_s in steps:
        now += pause
        write(now)
        while (wait := pace.wait_s(now, len(held))) > 0:
            now += wait
            write(now)
        heapq.heappush(held, now + late_s)
        write(now)
    write(math.inf)
    for index, start in enumerate(written):
        for more, end in enumerate(written[index:], 1):
            assert more <= burst + rate * (end - start) + 1e-6


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


def test_three_throttles_within_a_window_are_evidence_and_pacing_is_on_trial():
    evidence = BucketEvidence()
    assert [evidence.throttled(at, at, 60.0) for at in (0.0, 61.0, 100.0)] == [False, False, False]
    assert evidence.throttled(120.0, 120.0, 60.0)
    assert evidence.paced_until == 240.0
    assert [evidence.throttled(at, at, 60.0) for at in (241.0, 242.0, 243.0)] == [False, False, True]
    assert evidence.paced_until == 243.0 + 240.0, "twice as long"
    assert [evidence.throttled(at, at, 60.0) for at in (9000.0, 9001.0, 9002.0)] == [False, False, True]
    assert evidence.paced_until == 9002.0 + 120.0, "the trial before was too long ago"


def test_the_429s_of_one_burst_or_of_an_outage_are_one_proof_of_a_bucket():
    evidence = BucketEvidence()
    assert not any(evidence.throttled(at, 0.0, 60.0) for at in (0.1, 0.11, 0.12, 0.13, 0.14))
    evidence = BucketEvidence()
    for at in (1.0, 2.0, 3.0, 4.0):
        assert not evidence.throttled(at, at - 0.1, 60.0)
        evidence.rejects_all = True  # none is in flight, and none was answered


def play_a_provider(per_minute, declared, *, burst, protocol="openai", seconds=120.0, service_s=0.5):
    """Send to a bucket that announces its limit in each reply, as fast as the quota allows. Return the times at which
    requests were admitted and rejected.
    """
    limits = ServerLimits(requests_per_minute=per_minute, kind="bucket", burst_s=burst * 60 / per_minute)
    ledger = limits.ledger(per_minute)
    quota = Quota(Limits(requests_per_minute=declared, window="bucket", burst=burst), source="a")
    now, admitted, rejected, replies = 0.0, [], [], []

    def answer(until):
        while replies and replies[0][0] <= until:
            at, _, reservation, headers, is_over = heapq.heappop(replies)
            reservation.release(at, rejected=is_over)
            if is_over:
                quota.throttled(at, sent_at=reservation.sent_at, retry_after_s=1.0)
            quota.announced(announced_limits(headers), at)

    while now < seconds:
        if (wait := quota.wait_s(0.0, now)) > 0:
            # A pace may change with a reply.
            now = min(now + wait, replies[0][0]) if replies else now + min(wait, 1.0)
            answer(now)
            continue
        reservation = quota.reserve(0.0, 0.0, now)
        reservation.sent(now)
        is_over = ledger.take(1, now) is not None
        (rejected if is_over else admitted).append(now)
        stated = ledger.announced(now)
        headers = PROTOCOLS[protocol].announce("requests", int(stated.limit), int(stated.remaining), stated.reset_s)
        heapq.heappush(replies, (now + service_s, len(admitted) + len(rejected), reservation, headers, is_over))
        answer(now)
    return admitted, rejected


@each_of("burst", [1, 2, 10, 30])
def test_a_bucket_is_used_at_the_speed_that_it_announces(burst):
    for protocol in ("openai", "anthropic"):
        admitted, rejected = play_a_provider(60, 60, burst=burst, protocol=protocol)
        assert not rejected
        assert len(admitted) >= 0.94 * 120
