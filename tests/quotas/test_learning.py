"""What a quota learns of a server that declares nothing, measured by how well the server is used afterwards.

The server enforces its truth; the client pauses on 429 as the scheduler does. Rates are answers per minute.
"""

from __future__ import annotations

import math

import pytest

from qreward_plugins.quotas.discovery import Discovery
from qreward_plugins.quotas.ledger import Ledger


@pytest.mark.parametrize("per_minute", [60, 600])
def test_a_window_is_learned_from_429s(client, server, per_minute):
    subject = client(server(per_minute, retry_after="true")).run(600)
    assert subject.quota.use(600).learned_requests_per_minute == per_minute
    assert subject.rate(60, 600) >= per_minute - max(1, per_minute / 120)
    assert subject.refused(120) <= 6
    assert any(words and "using this as the limit" in words for words in subject.words)


STORM, FIRST_STORM = ((100, 120),), ((2, 22),)


@pytest.mark.parametrize(
    ("truth", "since", "until", "least"),
    [
        ({"per_window": 600, "kind": "fixed"}, 0, 600, 590),
        # A concurrency that asks for pauses is not taken for a window for ever.
        ({"concurrency": 8, "retry_after": 2.0}, 60, 600, 0.7 * 160),
        # A storm does not collapse what was learned, and at the start is not taken for the limit.
        *(({"per_window": 600, "storms": STORM, "retry_after": told}, 180, 400, 590) for told in ("true", 5.0)),
        *(
            ({"per_window": 600, "storms": FIRST_STORM, "retry_after": told}, 120, 400, 570)
            for told in ("true", 5.0, None)
        ),
        *(
            ({"concurrency": 64, "storms": STORM, "retry_after": told}, 200, 400, 0.78 * 64 * 20)
            for told in ("true", None)
        ),
        # An announced limit of a second does not slow down to one of a minute; the first minute teaches the window.
        *(
            ({"per_window": 10, "window_s": 1, "announces": 10, "kind": kind}, 120, 600, 330)
            for kind in ("bucket", "sliding", "fixed")
        ),
        # It announces too little, and then nothing any more.
        ({"per_window": 600, "announces": 60, "silent_after_s": 30.0}, 240, 600, 590),
    ],
)
def test_a_server_is_used_well(client, server, truth, since, until, least):
    assert client(server(**truth)).run(until).rate(since, until) >= least


@pytest.mark.parametrize("concurrency", [1, 8, 64, 200])
def test_a_concurrency_is_learned(client, server, concurrency):
    subject = client(server(concurrency=concurrency, retry_after=None)).run(600)
    assert subject.rate(120, 600) >= 0.78 * concurrency * 20
    assert subject.refused(120) <= 12 * 8
    assert 0.6 * concurrency <= subject.quota.use(600).learned_concurrency <= concurrency + 2


def test_an_outage_without_retry_after_teaches_no_window(client, server):
    subject = client(server(concurrency=64, storms=((2, 22),), retry_after=None)).run(60)
    assert subject.quota.use(60).learned_requests_per_minute is None


def test_an_announced_limit_is_kept_without_a_429(client, server):
    subject = client(server(600, announces=600)).run(60)
    assert subject.refused(0) == 0
    assert subject.rate(0, 60) >= 595
    assert any(words and "announced limit: 600 requests in 60 s" in words for words in subject.words)


def test_an_announced_bucket_of_an_hour_is_used_as_it_refills(client, server):
    subject = client(server(12_000, window_s=3600, announces=12_000, kind="bucket")).run(600)
    assert subject.refused(0) == 0
    assert subject.rate(300, 600) >= 180  # of 200
    assert subject.quota.per_window() == (12_000, 3600)


def test_an_announced_window_of_an_hour_is_not_broken(client, server):
    subject = client(server(1200, window_s=3600, announces=1200)).run(600)
    assert len(subject.answers) == 1200
    assert subject.refused(0) <= 1


def test_an_announced_limit_that_is_too_low_does_not_throttle_for_ever(client, server):
    subject = client(server(600, announces=60)).run(600)
    assert subject.rate(0, 60) <= 62  # believed first
    assert subject.rate(120, 600) >= 590
    assert any(words and "accepted more than 60 requests" in words for words in subject.words)


def test_a_repeated_announcement_does_not_overrule_a_429():
    found = Discovery(Ledger(), "requests")
    announce = {"remaining": 50.0, "reset_s": 30.0, "in_flight": 0.0, "share": 1}
    assert found.announced(100, now=0.0, **announce)
    for _ in range(20):
        found.ledger.hold(1)
        found.ledger.stamp(1, 1.0)
    assert found.throttled(2.0, sent_at=1.5, pause_s=10.0, since=2.0)
    assert found.ledger.limit == 20
    assert found.announced(100, now=3.0, **announce) is None
    assert found.ledger.limit == 20
    found.announced(10, now=4.0, **announce)  # less than was measured: news
    assert found.ledger.limit == 10


def test_a_request_larger_than_a_learned_limit_is_not_impossible():
    found = Discovery(Ledger(), "tokens")
    found.announced(100, 100, 0.0, in_flight=0.0, share=1, now=0.0)
    assert found.wait_s(5000, 0.0) == 0
    found.ledger.hold(1)
    found.ledger.stamp(1, 0.0)
    assert 0 < found.wait_s(5000, 0.0) < math.inf


def send(found: Discovery, count: int, now: float) -> None:
    for _ in range(count):
        found.ledger.hold(1)
        found.ledger.stamp(1, now)


def test_a_storm_that_lowers_the_limit_again_and_again_gives_the_one_before_it_back():
    found = Discovery(Ledger(), "requests")
    send(found, 600, 0.0)
    found.throttled(1.0, sent_at=0.5, pause_s=5.0, since=1.0)
    assert found.ledger.limit == 600
    found.ended(70.0, sent_at=65.0, rejected=False, probe="")  # it accepts again
    send(found, 50, 100.0)
    for now in (101.0, 106.0, 165.0):  # a storm, long enough to forget even the fifty
        assert found.throttled(now, sent_at=now - 0.1, pause_s=5.0, since=101.0)
    assert found.ledger.limit < 60
    send(found, int(found.ledger.limit), 170.0)
    assert found.wait_s(1, 170.0) == 0  # the server said to come back at 170
    assert found.reserved(1, 170.0) == "probe"
    assert found.wait_s(1, 170.0) > 1  # one at a time
    assert found.ended(173.0, sent_at=170.0, rejected=False, probe="probe") is not None
    assert found.ledger.limit == 600


def test_a_probe_that_is_throttled_confirms_the_limit_and_doubles_the_patience():
    found = Discovery(Ledger(), "requests")
    send(found, 100, 0.0)
    found.throttled(1.0, sent_at=0.5, pause_s=59.0, since=1.0)
    gaps, now = [], 60.2
    found.ended(now, sent_at=now, rejected=False, probe="")
    for _ in range(3):
        while found.ledger.wait_s(1, now) == 0:
            send(found, 1, now)
        wait = found.wait_s(1, now)
        while wait > 0:
            now += wait
            while found.ledger.wait_s(1, now) == 0:
                send(found, 1, now)
            wait = found.wait_s(1, now)
        gaps.append(now)
        assert found.reserved(1, now) == "probe"
        found.ended(now, sent_at=now, rejected=True, probe="probe")
        words = found.throttled(now, sent_at=now, pause_s=math.inf, since=now)
        assert (words == "measured limit confirmed: 100 requests in 60 s") is (len(gaps) == 1)
    assert found.ledger.limit == 100
    assert gaps[1] - gaps[0] >= 60
    assert gaps[2] - gaps[1] >= 120


def test_a_bucket_that_is_empty_has_room_long_before_it_is_full():
    found = Discovery(Ledger(), "requests")
    for used in (1, 2, 4, 8, 16):
        found.announced(36_000, 36_000 - used, used * 0.1, in_flight=0.0, share=1, now=float(used))
    assert found.window_s == 3600
    send(found, 36_000, 10.0)
    found.announced(36_000, 0, 3600.0, in_flight=0.0, share=1, now=10.0)
    assert found.wait_s(1, 10.0) == pytest.approx(0.1)


def test_a_429_that_was_in_flight_does_not_put_off_the_moment_to_come_back():
    found = Discovery(Ledger(), "requests")
    send(found, 3, 0.0)
    found.throttled(1.0, sent_at=0.0, pause_s=5.0, since=1.0)
    found.throttled(3.0, sent_at=0.0, pause_s=5.0, since=1.0)
    assert found.wait_s(1, 3.0) == pytest.approx(3.0)  # six seconds after the beginning
