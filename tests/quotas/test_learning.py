"""What a quota learns of a server that declares nothing, measured by how well the server is used afterwards; pacing,
and when a server is taken to be a bucket.

The server enforces its truth; the client does with the quota what the scheduler does. Rates are answers per minute.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qreward_plugins.config import Limits
from qreward_plugins.quotas.concurrency import UNDECLARED_CONCURRENCY, ConcurrencyWindow
from qreward_plugins.quotas.pace import BucketEvidence, Pace
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.simulation.strict_limits import SlidingWindow, TokenBucket
from qreward_plugins.sources import announced_limits
from qreward_plugins.testing import ServerLimits
from qreward_plugins.testing.protocols import PROTOCOLS

from ..kit import each_of


class FixedWindow(SlidingWindow):
    """Free again whenever the clock begins another window."""

    def enter(self, amount: float, now_s: float) -> None:
        super().enter(amount, now_s // self._window_s * self._window_s)


@dataclass
class Server:
    """The truth: at most `per_window` accepted requests in `window_s`, `concurrency` at once; a storm refuses all."""

    per_window: float = math.inf
    window_s: float = 60.0
    kind: str = "sliding"  # or "fixed" or "bucket"
    concurrency: float = math.inf
    storms: tuple[tuple[float, float], ...] = ()
    retry_after: float | str | None = "true"  # the true wait in whole seconds, None, or a constant
    announces: float | None = None  # what it says its limit is
    in_flight: int = 0

    def __post_init__(self) -> None:
        if self.kind == "bucket":
            self.ledger = TokenBucket(self.per_window / self.window_s, self.per_window)
        else:
            window = FixedWindow if self.kind == "fixed" else SlidingWindow
            self.ledger = window(self.per_window, self.window_s)

    def arrive(self, now: float) -> float | None:
        """None: accepted. Else the seconds until there is room."""
        for start, end in self.storms:
            if start <= now < end:
                return end - now
        if self.in_flight >= self.concurrency:
            return 0.0
        if excess := self.ledger.take(1, now):
            return excess.retry_after_s
        self.in_flight += 1
        return None

    def headers(self, now: float) -> dict[str, float]:
        if self.announces is None:
            return {}
        used = self.ledger.excess(self.per_window, now)
        return {
            "requests_per_window": self.announces,
            "requests_remaining": max(0.0, self.announces - (used.over if used else 0.0)),
            "requests_reset_s": self.ledger.announced(now).reset_s,
        }


@dataclass
class Client:
    """Sends as soon as the quota allows, whenever there is work; pauses on 429 as an upstream does."""

    server: Server
    limits: dict[str, object] = field(default_factory=dict)
    service_s: float = 3.0
    work_until: float = math.inf
    answers: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    quota: Quota = field(init=False)

    def __post_init__(self) -> None:
        self.quota = Quota(Limits.model_validate(self.limits), source="a")

    def run(self, until: float) -> Client:
        quota, server, events, number = self.quota, self.server, [(0.0, 0, "look", None, 0.0)], 0
        paused_until = paused_at = -math.inf
        row, look_at = 0, 0.0
        while events:
            now, _, what, reservation, sent_at = heapq.heappop(events)
            if what == "look" and now != look_at:
                continue
            if now > until:
                break
            if what == "answer":
                server.in_flight -= 1
                reservation.release(now)
                self.words.append(quota.answered(now, sent_at=sent_at))
                self.words.append(quota.announced(server.headers(now), now))
                self.answers.append(now)
                row = 0
            elif what == "refusal":
                reservation.release(now, rejected=True)
                told = self._told(sent_at)
                self.words.append(quota.throttled(now, sent_at=sent_at, retry_after_s=told))
                self.refusals.append(now)
                if sent_at >= paused_at and now >= paused_until:
                    row += 1
                    paused_at = now
                    paused_until = now + (min(2.0 ** (row - 1), 60.0) if told is None else max(told, 0.1))
            wait = 0.0
            while now < self.work_until:
                wait = max(quota.wait_s(0, now), paused_until - now)
                if wait > 0:
                    break
                reservation = quota.reserve(0, 0, now)
                reservation.sent(now)
                room_in_s = server.arrive(now)
                number += 1
                if room_in_s is None:
                    takes_s = self.service_s * self._rng.uniform(0.5, 1.5)
                    heapq.heappush(events, (now + takes_s, number, "answer", reservation, now))
                else:
                    self._due[now] = room_in_s
                    heapq.heappush(events, (now + 0.05, number, "refusal", reservation, now))
            if 0 < wait < math.inf:
                number += 1
                look_at = now + max(wait, 0.001)
                heapq.heappush(events, (look_at, number, "look", None, 0.0))
        return self

    _rng: random.Random = field(default_factory=lambda: random.Random(7))
    _due: dict[float, float] = field(default_factory=dict)

    def _told(self, sent_at: float) -> float | None:
        if self.server.retry_after == "true":
            return float(math.ceil(self._due[sent_at]))
        return self.server.retry_after

    def rate(self, start: float, end: float) -> float:
        """Answers per minute in [start, end)."""
        return sum(start <= at < end for at in self.answers) * 60 / (end - start)

    def refused(self, start: float, end: float = math.inf) -> int:
        return sum(start <= at < end for at in self.refusals)


STORM = {"storms": ((100, 120),)}
FIRST_STORM = {"storms": ((2, 22),)}
HOUR = {"window_s": 3600}
SERVERS = [
    # Its window is learned from 429s, and hardly exceeded again.
    ({"per_window": 60}, 60, 600, 59, 6, "using this as the limit"),
    ({"per_window": 600}, 60, 400, 595, 6, "using this as the limit"),
    # A source with a shorter window says when there is room, and is asked then.
    ({"per_window": 100, "window_s": 10}, 60, 240, 480, math.inf, ""),
    # A concurrency that asks for pauses is not taken for a window for ever.
    ({"concurrency": 8, "retry_after": 2.0}, 60, 600, 0.7 * 160, math.inf, ""),
    # A storm does not collapse what was learned, and at the start is not taken for the limit.
    ({"per_window": 600, **STORM, "retry_after": 5.0}, 180, 400, 590, math.inf, ""),
    *(
        ({"per_window": 600, **FIRST_STORM, "retry_after": told}, 120, 300, 570, math.inf, "")
        for told in ("true", None)
    ),
    ({"concurrency": 64, **STORM, "retry_after": None}, 200, 400, 0.78 * 1280, math.inf, ""),
    # What it announces is kept without a 429: of a second, if a bucket says so, a minute or an hour.
    ({"per_window": 10, "window_s": 1, "announces": 10, "kind": "bucket"}, 120, 400, 330, math.inf, ""),
    ({"per_window": 600, "announces": 600}, 0, 60, 595, 0, "announced limit: 600 requests in 60 s"),
    ({"per_window": 12_000, **HOUR, "announces": 12_000, "kind": "bucket"}, 300, 600, 180, 0, "in 3600 s"),
    ({"per_window": 1200, **HOUR, "announces": 1200}, 0, 600, 120, 1, "announced limit: 1200 requests"),
    # It announces too little, for ever or until it is silent, or too much.
    ({"per_window": 600, "announces": 60}, 120, 400, 590, math.inf, "accepted more than 60 requests"),
    ({"per_window": 300, "announces": 600}, 120, 400, 290, 12, "using this as the limit"),
]


@each_of(("truth", "since", "until", "least", "refused", "said"), SERVERS)
def test_a_server_is_used_well(truth, since, until, least, refused, said):
    subject = Client(Server(**truth)).run(until)
    assert subject.rate(since, until) >= least
    assert subject.refused(0 if refused < 6 else 120) <= refused
    assert any(said in (words or "") for words in subject.words)


@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_a_concurrency_is_learned(concurrency):
    subject = Client(Server(concurrency=concurrency, retry_after=None)).run(600)
    assert subject.rate(120, 600) >= 0.78 * concurrency * 20
    assert subject.refused(120) <= 12 * 8
    assert 0.6 * concurrency <= subject.quota.use(600).learned_concurrency <= concurrency + 2


def test_an_outage_without_retry_after_teaches_no_window():
    subject = Client(Server(concurrency=64, storms=((2, 22),), retry_after=None)).run(60)
    assert subject.quota.use(60).learned_requests_per_minute is None


# The learned concurrency


def test_it_grows_only_while_it_is_really_used():
    window = ConcurrencyWindow()
    for size in (1, 2):
        for _ in range(100):
            window.answered(0.0)
        assert window.size == size * UNDECLARED_CONCURRENCY
        window.filled()


def test_what_says_nothing_of_concurrency_does_not_cut():
    window = ConcurrencyWindow()
    assert not window.throttled(10.0, 9.9, 0)  # none was in flight
    assert window.throttled(10.0, 9.9, 31)
    assert not window.throttled(10.5, 9.95, 20)  # it was sent before the cut
    assert window.throttled(10.5, 10.1, 9)
    assert window.size == pytest.approx(7.0), "of what was really in flight"


def test_a_storm_of_429s_leaves_the_threshold_of_the_slow_start():
    window = ConcurrencyWindow()
    for second in range(5):
        window.throttled(100.0 + second, 99.99 + second, 31 - 6 * second)
        window.answered(95.0)  # sent before the storm: no evidence in it
    for trip in range(6):
        window.filled()
        for _ in range(int(window.size)):
            window.answered(130.0 + trip)
    assert window.size > 0.65 * UNDECLARED_CONCURRENCY


# Pacing


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
