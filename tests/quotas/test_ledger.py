"""The ledger against a brute-force oracle: whatever happens in whatever order, no window ever holds more than the
limit, no wait is longer than needed, and what it says will fit is what fits.

What a quota learns of a server that declares nothing, measured by how well the server is used afterwards; and pacing.
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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qreward_plugins.config import Limits
from qreward_plugins.quotas.concurrency import UNDECLARED_CONCURRENCY, ConcurrencyWindow
from qreward_plugins.quotas.pace import Pace
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.quotas.shared import SharedQuota
from qreward_plugins.quotas.window_limit import MARGIN_S, Ledger
from qreward_plugins.simulation.strict_limits import SlidingWindow, TokenBucket

from ..kit import each_of

WINDOW_S = 60 + MARGIN_S


def spend(ledger: Ledger, amount: float, now: float) -> int:
    ledger.held += amount
    return ledger.stamp(amount, now)


class LedgerAgainstAList(RuleBasedStateMachine):
    """Every operation, in any order, beside a list of all that ever happened."""

    @initialize(limit=st.integers(1, 60), window_s=st.sampled_from([1.0, 10.0, 60.0, 90.0]))
    def start(self, limit, window_s):
        self.now = 0.0
        self.ledger = Ledger(limit, window_s)
        self.held: list[int] = []
        self.stamped: list[list[float]] = []  # time, amount
        self.numbers: list[int] = []

    def inside(self) -> list[list[float]]:
        return [entry for entry in self.stamped if entry[0] > self.now - self.ledger.window_s]

    def would_fit(self, amount: float, at: float, extra: float = 0.0) -> bool:
        spent = sum(what for when, what in self.stamped if when > at - self.ledger.window_s)
        return spent + sum(self.held) + extra + amount <= self.ledger.limit + 1e-6

    @rule(seconds=st.floats(0, 100))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(amount=st.integers(1, 30))
    def hold(self, amount):
        if self.ledger.wait_s(amount, self.now) == 0:
            assert self.would_fit(amount, self.now)
            self.ledger.held += amount
            self.held.append(amount)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def stamp(self, data):
        amount = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.numbers.append(self.ledger.stamp(amount, self.now))
        self.stamped.append([self.now, amount])

    @precondition(lambda self: self.stamped)
    @rule(data=st.data(), amount=st.integers(0, 30))
    def amend(self, data, amount):
        index = data.draw(st.integers(0, len(self.stamped) - 1))
        if self.stamped[index][0] > self.now - 60:  # one long gone may be dropped, and is left alone then
            self.ledger.amend(self.numbers[index], amount - self.stamped[index][1])
            self.stamped[index][1] = amount

    @rule(limit=st.integers(1, 60))
    def change_limit(self, limit):
        self.ledger.limit = limit

    @rule(window_s=st.sampled_from([1.0, 10.0, 60.0]))
    def change_window(self, window_s):
        self.ledger.change_window(window_s, self.now)

    @rule()
    def nobody_is_left(self):
        if self.held:
            self.numbers.append(self.ledger._dropped + len(self.ledger._at))
            self.stamped.append([self.now, sum(self.held)])
            self.ledger.stamp(self.ledger.held, self.now)
            self.held.clear()

    @rule(amount=st.integers(1, 60))
    def ask_how_long(self, amount):
        wait = self.ledger.wait_s(amount, self.now)
        if amount > self.ledger.limit:
            assert wait == math.inf
        elif self.would_fit(amount, self.now):
            assert wait == 0
        elif amount + sum(self.held) > self.ledger.limit:
            assert wait == self.ledger.window_s
        else:
            assert self.would_fit(amount, self.now + wait + 1e-6)
            assert wait < 2e-4 or not self.would_fit(amount, self.now + wait - 1e-4)

    @rule(amount=st.integers(1, 20), windows=st.floats(0, 2.5))
    def ask_how_many(self, amount, windows):
        seconds = windows * self.ledger.window_s + 1e-4  # not right at an edge, where rounding decides
        assert self.ledger.capacity(self.now + seconds, amount, self.now) == self.greedy(amount, self.now + seconds)

    def greedy(self, amount: int, until: float) -> int:
        """Send whenever it fits; the held amounts age from now."""
        entries = [[when, what] for when, what in self.inside()] + [[self.now, what] for what in self.held]
        window_s, sent, at = self.ledger.window_s, 0, self.now
        while True:
            alive = [entry for entry in entries if entry[0] > at - window_s + 1e-9]
            if sum(what for _, what in alive) + amount <= self.ledger.limit + 1e-9:
                entries.append([at, amount])
                sent += 1
                continue
            at = min((when + window_s for when, what in alive if what), default=math.inf)
            if at > until + 1e-9:
                return sent

    @invariant()
    def the_books_agree(self):
        if hasattr(self, "ledger"):
            spent = sum(what for _, what in self.inside()) + sum(self.held)
            assert self.ledger.spent(self.now) == pytest.approx(spent, abs=1e-6)


TestLedgerAgainstAList = LedgerAgainstAList.TestCase
TestLedgerAgainstAList.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_a_window_longer_than_what_is_remembered_is_taken_to_be_spent():
    ledger = Ledger(math.inf, 60)
    for number in range(5000):
        spend(ledger, 1, number * 0.1)
    ledger.limit = 1000
    ledger.change_window(300, 500.0)
    for at in (500.0, 600.0, 700.0):
        really = sum(number * 0.1 > at - 300 for number in range(5000))
        assert ledger.spent(at) >= really
    assert ledger.spent(801.0) == 0


def test_memory_is_bounded_at_any_rate_and_the_books_stay_on_the_safe_side():
    ledger, sent = Ledger(math.inf, 60), []
    for number in range(60_000):
        now = number * 0.004
        spend(ledger, 1, now)
        sent.append(now)
    assert len(ledger._at) < 20_000
    for at in (240.0, 270.0, 299.0):
        really = sum(when > at - WINDOW_S for when in sent)
        assert really <= ledger.spent(at) <= really + 10


def test_the_oldest_are_removed_down_to_an_amount():
    ledger = Ledger(10, 60)
    for second in range(10):
        spend(ledger, 1, float(second))
    assert ledger.remove_oldest(3, 10.0)
    assert ledger.spent(10.0) == 3
    assert ledger.wait_s(8, 10.0) == pytest.approx(7 + WINDOW_S - 10)
    assert ledger.remove_oldest(1.5, 10.0)
    assert ledger.spent(10.0) == 1.5
    assert not ledger.remove_oldest(5, 10.0)


@given(gaps=st.lists(st.floats(0, 3), max_size=400))
def test_the_outlook_tells_of_all_and_nothing_too_early(gaps):
    ledger, now, spent = Ledger(1000, 60), 0.0, []
    for gap in gaps:
        now += gap
        spend(ledger, 1, now)
        spent.append(now + WINDOW_S)
    parts = ledger.outlook(now)
    assert len(parts) <= 66
    for left_s, _ in parts:
        gone = sum(amount for other_s, amount in parts if other_s <= left_s)
        assert gone <= sum(leaves <= now + left_s + 1e-6 for leaves in spent if leaves > now)
        # ... and a sixtieth of the window too late at most.
        assert gone >= sum(leaves <= now + left_s - WINDOW_S / 60 for leaves in spent if leaves > now)
    assert sum(amount for _, amount in parts) == sum(leaves > now for leaves in spent)


# What is learned


@dataclass
class Client:
    """Sends as soon as the quota allows; pauses on 429 as an upstream does. The server accepts at most `per_window`
    requests in `window_s`, or has a bucket of that size, and `concurrency` at once; a storm refuses all.
    """

    per_window: float = math.inf
    window_s: float = 60.0
    bucket: bool = False
    concurrency: float = math.inf
    storm: tuple[float, float] = (0.0, 0.0)
    silent: bool = False
    """Whether a 429 has no Retry-After."""
    announces: float | None = None
    """What it says its limit is."""
    declared: dict[str, object] = field(default_factory=dict)
    service_s: float = 3.0
    in_flight: int = 0
    answers: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    words: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.quota = Quota(Limits.model_validate(self.declared), source="a")
        rate_per_s = self.per_window / self.window_s
        bucket = TokenBucket(rate_per_s, self.per_window) if self.bucket else None
        self.ledger = bucket or SlidingWindow(self.per_window, self.window_s)

    def run(self, until: float) -> Client:
        quota, events, number, rng = self.quota, [(0.0, 0, "look", None, 0.0, None)], 0, random.Random(7)
        paused_until = paused_at = -math.inf
        row, look_at = 0, 0.0
        while events:
            now, _, what, reservation, sent_at, told = heapq.heappop(events)
            if what == "look" and now != look_at:
                continue
            if now > until:
                break
            if what == "answer":
                self.in_flight -= 1
                reservation.release(now)
                self.words.append(quota.answered(now, sent_at=sent_at))
                self.words.append(quota.announced(self.announced(now), now))
                self.answers.append(now)
                row = 0
            elif what == "refusal":
                reservation.release(now, rejected=True)
                self.words.append(quota.throttled(now, sent_at=sent_at, retry_after_s=told))
                self.refusals.append(now)
                if sent_at >= paused_at and now >= paused_until:
                    row += 1
                    paused_at = now
                    paused_until = now + (min(2.0 ** (row - 1), 60.0) if told is None else max(told, 0.1))
            while (wait := max(quota.wait_s(0, now), paused_until - now)) <= 0:
                reservation = quota.reserve(0, 0, now)
                reservation.sent(now)
                number += 1
                if room_in_s := self.refused_for(now):
                    told = None if self.silent else float(math.ceil(room_in_s))
                    heapq.heappush(events, (now + 0.05, number, "refusal", reservation, now, told))
                else:
                    self.ledger.enter(1, now)
                    self.in_flight += 1
                    takes_s = self.service_s * rng.uniform(0.5, 1.5)
                    heapq.heappush(events, (now + takes_s, number, "answer", reservation, now, None))
            if wait < math.inf:
                number += 1
                look_at = now + max(wait, 0.001)
                heapq.heappush(events, (look_at, number, "look", None, 0.0, None))
        return self

    def refused_for(self, now: float) -> float:
        """Seconds until there is room; 0 if there is."""
        if self.storm[0] <= now < self.storm[1]:
            return self.storm[1] - now
        if self.in_flight >= self.concurrency:
            return 2.0
        excess = self.ledger.excess(1, now)
        return excess.retry_after_s if excess else 0.0

    def announced(self, now: float) -> dict[str, float]:
        if self.announces is None:
            return {}
        used = self.ledger.excess(self.per_window, now)
        return {
            "requests_per_window": self.announces,
            "requests_remaining": max(0.0, self.announces - (used.over if used else 0.0)),
            "requests_reset_s": self.ledger.announced(now).reset_s,
        }

    def rate(self, start: float, end: float) -> float:
        """Answers per minute in [start, end)."""
        return sum(start <= at < end for at in self.answers) * 60 / (end - start)

    def refused(self, start: float, end: float = math.inf) -> int:
        return sum(start <= at < end for at in self.refusals)


STORM, FIRST_STORM = {"storm": (100.0, 120.0)}, {"storm": (2.0, 22.0)}
HOUR = {"window_s": 3600.0}
SERVERS = [
    # Its window is learned from 429s, and hardly exceeded again.
    ({"per_window": 60}, 60, 600, 59, 6, "using this as the limit"),
    ({"per_window": 600}, 60, 400, 595, 6, "using this as the limit"),
    # A source with a shorter window says when there is room, and is asked then.
    ({"per_window": 100, "window_s": 10.0}, 60, 240, 480, math.inf, ""),
    # A concurrency that asks for pauses is not taken for a window for ever.
    ({"concurrency": 8}, 60, 600, 0.7 * 160, math.inf, ""),
    # A storm does not collapse what was learned, and at the start is not taken for the limit.
    ({"per_window": 600, **STORM}, 180, 400, 590, math.inf, ""),
    *(({"per_window": 600, **FIRST_STORM, "silent": silent}, 120, 300, 570, math.inf, "") for silent in (False, True)),
    ({"concurrency": 64, **STORM, "silent": True}, 200, 400, 0.78 * 1280, math.inf, ""),
    # What it announces is kept without a 429: of a second, if a bucket says so, a minute or an hour.
    ({"per_window": 10, "window_s": 1.0, "announces": 10, "bucket": True}, 120, 400, 330, math.inf, ""),
    ({"per_window": 600, "announces": 600}, 0, 60, 595, 0, "announced limit: 600 requests in 60 s"),
    ({"per_window": 12_000, **HOUR, "announces": 12_000, "bucket": True}, 300, 600, 180, 0, "in 3600 s"),
    ({"per_window": 1200, **HOUR, "announces": 1200}, 0, 600, 120, 1, "announced limit: 1200 requests"),
    # A declared bucket is used at the speed that it announces.
    *(
        (
            {"per_window": burst, "window_s": burst, "announces": burst, "bucket": True, "service_s": 0.5}
            | {"declared": {"requests_per_minute": 60, "window": "bucket", "burst": burst}},
            *(0, 120, 0.94 * 60, 0, ""),
        )
        for burst in (1, 2, 10, 30)
    ),
    # It announces too little, for ever or until it is silent, or too much.
    ({"per_window": 600, "announces": 60}, 120, 400, 590, math.inf, "accepted more than 60 requests"),
    ({"per_window": 300, "announces": 600}, 120, 400, 290, 12, "using this as the limit"),
]


@each_of(("truth", "since", "until", "least", "refused", "said"), SERVERS)
def test_a_server_is_used_well(truth, since, until, least, refused, said):
    subject = Client(**truth).run(until)
    assert subject.rate(since, until) >= least
    assert subject.refused(0 if refused < 6 else 120) <= refused
    assert any(said in (words or "") for words in subject.words)


@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_a_concurrency_is_learned(concurrency):
    subject = Client(concurrency=concurrency, silent=True).run(600)
    assert subject.rate(120, 600) >= 0.78 * concurrency * 20
    assert subject.refused(120) <= 12 * 8
    assert 0.6 * concurrency <= subject.quota.use(600).learned_concurrency <= concurrency + 2


def test_an_outage_without_retry_after_teaches_no_window():
    subject = Client(concurrency=64, **FIRST_STORM, silent=True).run(60)
    assert subject.quota.use(60).learned_requests_per_minute is None


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
    seconds=st.floats(0, 30).filter(lambda seconds: abs(seconds * 2 - round(seconds * 2)) > 1e-3),
)
@example(steps=[(0.0, 2.0), (0.0, 0.0), (2.0, 0.0)], burst=2, seconds=0.1)
def test_requests_that_are_written_late_and_in_any_order_never_exceed_the_rate_plus_the_burst(steps, burst, seconds):
    """And as many can be sent afterwards as `capacity` says."""
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
    until = (now := max([now, *written])) + seconds
    promised, before = pace.capacity(until, now), len(written)
    while (now := now + pace.wait_s(now)) <= until + 1e-7:
        pace.spend(now)
        written.append(now)
    assert len(written) - before == promised
    for index, start in enumerate(written):
        for more, end in enumerate(written[index:], 1):
            assert more <= burst + rate * (end - start) + 1e-6


def test_a_part_of_a_bucket_has_as_much_of_its_rate():
    quota = SharedQuota(Limits(requests_per_minute=60, window="bucket", burst=10), source="s")
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
