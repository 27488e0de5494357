"""The quota beside a strict server: whatever happens in whatever order, declared limits are kept."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qreward_plugins.config import Limits
from qreward_plugins.quotas.ledger import MARGIN_S
from qreward_plugins.quotas.quota import Quota

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
