"""The ledger against a brute-force oracle, and the quota beside a strict server: whatever happens in whatever order, no
window ever holds more than the limit, no wait is longer than needed, and what it says will fit is what fits.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qreward_plugins.config import Limits
from qreward_plugins.quotas.ledger import MARGIN_S, Ledger
from qreward_plugins.quotas.quota import Quota

WINDOW_S = 60 + MARGIN_S


def spend(ledger: Ledger, amount: float, now: float) -> int:
    ledger.hold(amount)
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
            self.ledger.hold(amount)
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
            self.ledger.stamp_all(self.now)
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


# The quota beside a strict server


limits = st.builds(
    Limits,
    requests_per_minute=st.sampled_from([None, 6, 20, 60]),
    tokens_per_minute=st.sampled_from([None, 600, 2000]),
    concurrency=st.sampled_from([None, 1, 4, 40]),
    window=st.sampled_from(["auto", "sliding", "bucket"]),
    window_s=st.sampled_from([10.0, 60.0, 120.0]),
    burst=st.sampled_from([1, 3]),
)


class Held:
    def __init__(self, reservation, prompt, completion, era):
        self.reservation, self.prompt, self.completion, self.era = reservation, prompt, completion, era
        self.arrived = False


class QuotaAgainstAStrictServer(RuleBasedStateMachine):
    @initialize(limits=limits)
    def start(self, limits):
        self.now, self.era, self.limits = 1000.0, 0, limits
        self.quota = Quota(limits, source="a")
        self.plain = True
        """Whether nothing happened that makes the quota stricter than the server."""
        self.held: list[Held] = []
        self.requests: list[float] = []
        self.tokens: list[tuple[float, float]] = []
        self.paced: list[float] = []

    def book(self, held: Held, *, prompt: float | None = None, completion: float = 0.0) -> None:
        """What the server counts, and whether that is too much."""
        limits, now = self.limits, self.now
        if prompt is not None:
            held.arrived = True
            self.requests.append(now)
        tokens = (prompt or 0.0) + completion
        self.tokens.append((now, tokens))
        if held.era != self.era:
            return  # it was let go under limits that are no longer in force
        if limits.requests_per_minute is not None and prompt is not None:
            per_window = limits.requests_per_minute * limits.window_s / 60
            assert sum(at > now - limits.window_s for at in self.requests) <= max(1, per_window)
        if limits.requests_per_minute is not None and limits.window == "bucket" and prompt is not None:
            self.paced.append(now)
            for number, start in enumerate(reversed(self.paced), 1):
                assert number <= limits.burst + limits.requests_per_minute / 60 * (now - start) + 1e-6
        # What was sent before a limit was declared may be more than it, and nothing that is added to it is nothing.
        if limits.tokens_per_minute is not None and tokens > 0:
            spent = sum(amount for at, amount in self.tokens if at > now - limits.window_s)
            assert spent <= limits.tokens_per_minute * limits.window_s / 60 + 1e-6

    @rule(seconds=st.one_of(st.floats(0, 2), st.floats(0, 130)))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(prompt=st.integers(0, 100), completion=st.integers(0, 100), late=st.booleans(), patient=st.booleans())
    def send(self, prompt, completion, late, patient):
        wait = self.quota.wait_s(prompt + completion, self.now)
        if patient and math.isfinite(wait):
            self.now += wait
            wait = self.quota.wait_s(prompt + completion, self.now)
        if wait > 0:
            return
        if self.limits.concurrency is not None:
            assert len(self.held) < self.limits.concurrency
        held = Held(self.quota.reserve(prompt, completion, self.now), prompt, completion, self.era)
        self.held.append(held)
        if not late:
            self.arrive(held)

    def arrive(self, held: Held) -> None:
        if not held.arrived:
            held.reservation.sent(self.now)
            self.book(held, prompt=held.prompt)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def write(self, data):
        self.arrive(data.draw(st.sampled_from(self.held)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), share=st.floats(0, 1), end=st.sampled_from(["answer", "unknown", "reject", "cancel"]))
    def end(self, data, share, end):
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.plain = self.plain and end != "reject" and (end != "cancel" or held.arrived)
        if end == "cancel":
            # The server may have it or not; if it has, it writes to the end of what was asked for.
            if held.arrived:
                self.book(held, completion=held.completion)
            held.reservation.release(self.now)
            return
        self.arrive(held)
        if end == "reject":
            held.reservation.release(self.now, rejected=True)
            wait = data.draw(st.sampled_from([None, 0.5, 5.0, 60.0]))
            self.quota.throttled(self.now, sent_at=held.reservation.sent_at, retry_after_s=wait)
        elif end == "unknown":
            self.book(held, completion=held.completion)
            held.reservation.release(self.now)
        else:
            completion = share * held.completion
            self.book(held, completion=completion)
            held.reservation.release(self.now, prompt_tokens=held.prompt, completion_tokens=completion)
            self.quota.answered(self.now, sent_at=held.reservation.sent_at)

    @rule(
        limit=st.sampled_from([0.0, 1.0, 10.0, 1000.0]),
        remaining=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        reset_s=st.sampled_from([0.0, 0.01, 1.0, 59.0, 3000.0, 1e6]),
        unit=st.sampled_from(["requests", "tokens"]),
    )
    def announce(self, limit, remaining, reset_s, unit):
        self.plain = False
        self.quota.announced(
            {f"{unit}_per_window": limit, f"{unit}_remaining": remaining * limit, f"{unit}_reset_s": reset_s}, self.now
        )

    @rule(limits=limits)
    def retune(self, limits):
        self.plain = False
        self.quota.retune(limits, self.now)
        self.limits, self.era, self.paced = limits, self.era + 1, []

    @rule()
    def lose_the_loop(self):
        self.plain = self.plain and all(held.arrived for held in self.held)
        for held in self.held:
            if held.arrived:
                self.book(held, completion=held.completion)
        self.quota.forget_in_flight(self.now)
        self.held.clear()

    @rule(tokens=st.integers(0, 200), seconds=st.floats(0, 150))
    def capacity_and_wait_agree(self, tokens, seconds):
        quota, now = self.quota, self.now
        if quota.in_flight < quota.concurrency and quota.use(now).learned_requests_per_minute is None:
            if quota.capacity(now, tokens, now) >= 1:
                assert quota.wait_s(tokens, now) == 0 or quota.use(now).learned_tokens_per_minute is not None
            assert quota.capacity(now + seconds, tokens, now) >= quota.capacity(now, tokens, now)

    @invariant()
    def it_makes_sense(self):
        if hasattr(self, "quota"):
            assert self.quota.in_flight == len(self.held)
            assert self.quota.concurrency >= 1
            assert self.quota.wait_s(0, self.now) >= 0

    @invariant()
    def it_is_no_stricter_than_it_must_be(self):
        if not hasattr(self, "quota") or not self.plain or self.held or self.limits.window == "bucket":
            return
        limits, since = self.limits, self.now - self.limits.window_s - MARGIN_S
        allowed = math.inf
        if limits.requests_per_minute is not None:
            allowed = int(limits.requests_per_minute * limits.window_s / 60)
        tokens = math.inf
        if limits.tokens_per_minute is not None:
            tokens = limits.tokens_per_minute * limits.window_s / 60
        if sum(at > since for at in self.requests) < allowed:
            spent = sum(amount for at, amount in self.tokens if at > since)
            assert spent + 1 > tokens or self.quota.wait_s(1, self.now) == 0

    def teardown(self):
        """Nothing that happened may stop it for ever."""
        if not hasattr(self, "quota"):
            return
        self.quota.forget_in_flight(self.now)
        self.now += 86_400 + MARGIN_S
        assert self.quota.wait_s(1, self.now) == 0


TestQuotaAgainstAStrictServer = QuotaAgainstAStrictServer.TestCase
TestQuotaAgainstAStrictServer.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
