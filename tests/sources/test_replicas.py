"""The replicas of a source: which one gets a request, what is under way at each, and how each is."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from qreward_plugins.config.source_models import Routing, RoutingStrategy
from qreward_plugins.errors import TransientError
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources.base import ServedWeights
from qreward_plugins.sources.replica import DRAINING_BACKOFF_S, FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Prefix
from qreward_plugins.sources.replicas import Lease, Replicas, RoutingHints

LEAST_REQUESTS = Routing(strategies=("least_requests",))


def of(*urls: str) -> Replicas:
    return Replicas(urls, LEAST_REQUESTS, name="s")


def used(replicas: Replicas, now: float = 0.0) -> str:
    with replicas.acquire(now) as lease:
        return lease.base_url


def fail(replicas: Replicas, now: float = 0.0, *, draining: bool = False) -> str:
    with replicas.acquire(now) as lease:
        lease.failed(now, draining=draining)
        return lease.base_url


def test_ties_go_round() -> None:
    replicas = of("a", "b", "c")
    assert [used(replicas) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_a_reply_of_a_replica_whose_weights_were_changed_meanwhile_is_known() -> None:
    replicas = of("a")
    replicas.serves("a", ServedWeights())
    lease = replicas.acquire(0.0)
    replicas.serves("a", ServedWeights("step-1", "1f"))
    lease.release()
    assert lease.mixed


def test_the_fewest_in_flight_is_next() -> None:
    replicas = of("a", "b")
    with ExitStack() as stack:
        first = stack.enter_context(replicas.acquire(0.0))
        assert [used(replicas) for _ in range(3)] == ["b", "b", "b"]
        assert first.base_url == "a"
    assert first.replica.in_flight == 0


def test_a_replica_that_failed_is_avoided_for_a_while() -> None:
    replicas = of("a", "b")
    assert fail(replicas) == "a"
    assert {used(replicas, 0.9 * FIRST_BACKOFF_S) for _ in range(4)} == {"b"}
    assert {used(replicas, FIRST_BACKOFF_S) for _ in range(2)} == {"a", "b"}


def test_when_all_failed_all_are_used() -> None:
    replicas = of("a", "b")
    assert {fail(replicas), fail(replicas)} == {"a", "b"}
    assert {used(replicas, 0.5) for _ in range(2)} == {"a", "b"}


def test_a_replica_that_answers_again_is_used_again() -> None:
    replicas = of("a", "b")
    with replicas.acquire(0.0) as lease, replicas.acquire(0.0), replicas.acquire(0.0) as other:
        assert lease.replica is other.replica
        lease.failed(0.0)
        other.answered(0.1)
        lease.answered(0.1)  # the first of both counts
    assert other.replica.statistics(0.2, 5.0).failures == 1
    assert {used(replicas, 0.2) for _ in range(2)} == {"a", "b"}


def test_a_failure_in_an_earlier_event_loop_does_not_count() -> None:
    replicas = of("a", "b")
    fail(replicas, 1000.0)
    assert {used(replicas, 1.0) for _ in range(2)} == {"a", "b"}


def test_the_backoff_doubles_with_every_failure_in_a_row() -> None:
    replicas = of("a", "b")
    now, waits = 0.0, []
    for _ in range(9):
        failed_at = now
        while replicas.all[0].health(now) != "half_open" and replicas.all[0].health(now) != "up":
            now += 0.5
        waits.append(now - failed_at)
        lease = replicas.acquire(now)
        while lease.base_url != "a":
            lease.release()
            lease = replicas.acquire(now)
        lease.failed(now)
        lease.release()
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert waits[-1] == LONGEST_BACKOFF_S


def test_a_half_open_replica_gets_one_call_at_a_time() -> None:
    replicas = of("a", "b")
    fail(replicas)
    now = FIRST_BACKOFF_S
    with ExitStack() as stack:
        leases = [stack.enter_context(replicas.acquire(now)) for _ in range(6)]
        assert [lease.base_url for lease in leases].count("a") == 1
        assert replicas.all[0].health(now) == "half_open"
        next(lease for lease in leases if lease.base_url == "a").answered(now)
        assert replicas.all[0].health(now) == "up"


def test_a_trial_that_is_cancelled_makes_room_for_the_next() -> None:
    replicas = of("a", "b")
    fail(replicas)
    for now in (1.0, 1.1):
        leases = [replicas.acquire(now) for _ in range(3)]
        assert "a" in [lease.base_url for lease in leases]
        for lease in leases:
            lease.release()


def test_calls_that_fail_together_count_as_one_failure() -> None:
    replicas = of("a", "b")
    leases = [replicas.acquire(0.0) for _ in range(40)]
    for lease in leases:
        if lease.base_url == "a":
            lease.failed(2.0)
        lease.release()
    assert replicas.all[0].health(2.0 + 0.9 * FIRST_BACKOFF_S) == "backing_off"
    assert replicas.all[0].health(2.0 + FIRST_BACKOFF_S) == "half_open"
    assert replicas.statistics(2.0)[0].failures == 20


def test_a_draining_replica_is_avoided_at_once_and_tried_again_later() -> None:
    replicas = of("a", "b")
    assert fail(replicas, draining=True) == "a"
    assert replicas.all[0].health(1.0) == "draining"
    assert {used(replicas, DRAINING_BACKOFF_S - 0.1) for _ in range(4)} == {"b"}
    assert {used(replicas, DRAINING_BACKOFF_S) for _ in range(2)} == {"a", "b"}


def test_draining_is_noticed_during_the_backoff_of_another_failure() -> None:
    replicas = of("a")
    first, second = replicas.acquire(0.0), replicas.acquire(0.0)
    first.failed(1.0)
    second.failed(1.1, draining=True)
    assert replicas.all[0].health(1.2) == "draining"


def test_a_cancelled_call_counts_as_a_failure_if_nothing_was_answered_meanwhile() -> None:
    replicas = of("a", "b")
    hung, other = replicas.acquire(0.0), replicas.acquire(0.0)
    other.answered(1.0)
    hung.cancelled(30.0)
    other.cancelled(30.0)
    assert replicas.all[0].health(30.0) == "backing_off"
    assert replicas.all[1].health(30.0) == "up"


def test_a_call_that_is_given_up_early_says_nothing() -> None:
    """A hedge was faster."""
    replicas = of("a", "b")
    for _ in range(2):
        lease = replicas.acquire(0.0)
        lease.answered(10.0)
        lease.release()
    for given_up_at, health in ((45.0, "up"), (51.0, "backing_off")):
        with replicas.acquire(20.0) as hedged:
            hedged.cancelled(given_up_at)
        assert hedged.replica.health(given_up_at) == health


def test_a_call_that_is_cancelled_at_once_says_nothing() -> None:
    replicas = of("a", "b")
    replicas.acquire(5.0).cancelled(5.0)
    assert replicas.all[0].health(5.0) == "up"


def test_in_flight_is_counted_down_after_an_error() -> None:
    replicas = of("a")
    with pytest.raises(ValueError, match="x"), replicas.acquire(0.0) as lease:
        raise ValueError("x")
    assert lease.replica.in_flight == 0


@pytest.mark.parametrize("mark", ["down", "draining"])
def test_a_replica_that_is_marked_gets_no_calls(mark: str) -> None:
    replicas = of("a", "b")
    replicas.mark("a", mark)  # type: ignore[arg-type]
    assert {used(replicas) for _ in range(4)} == {"b"}
    assert replicas.all[0].health(0.0) == mark
    replicas.mark("b", "down")
    with pytest.raises(TransientError, match=r"source 's': no replica is up"):
        replicas.acquire(0.0)
    replicas.mark("a", "up")
    assert used(replicas) == "a"


def test_a_replica_that_comes_up_again_begins_anew() -> None:
    replicas = of("a", "b")
    fail(replicas)
    replicas.mark("a", "down")
    replicas.mark("a", "up")
    assert replicas.all[0].health(0.0) == "up"


def test_replicas_come_and_go_while_calls_are_under_way() -> None:
    replicas = of("a")
    lease = replicas.acquire(0.0)
    replicas.add("b")
    replicas.remove("a")
    assert used(replicas) == "b"
    lease.release()
    assert lease.replica.in_flight == 0
    replicas.add("b")
    assert len(replicas.all) == 1
    with pytest.raises(LookupError, match="'s' has no replica 'a'"):
        replicas.remove("a")
    replicas.remove("b")
    with pytest.raises(TransientError):
        replicas.acquire(0.0)


def test_tokens_are_the_prompt_and_the_completion_that_is_to_be_expected() -> None:
    replicas = of("a", "b")
    hints = RoutingHints(prompt_tokens=100, completion_tokens=8192)
    with replicas.acquire(0.0, hints) as lease:
        assert lease.replica.pending_tokens == 8292
        replicas.used(lease.replica, Usage(90, 50))
    with replicas.acquire(0.0, hints) as lease:
        assert lease.replica.pending_tokens == 150
    with replicas.acquire(0.0, RoutingHints(100, 20)) as lease:
        assert lease.replica.pending_tokens == 120


def test_the_hit_rate_is_stated_or_estimated() -> None:
    replicas = Replicas(["a"], Routing())
    hints = RoutingHints(1000, 10, Prefix(7, 600))
    for _ in range(4):
        replicas.acquire(0.0, hints).release()
    (shown,) = replicas.statistics(0.0)
    assert (shown.prefix_hit_rate, shown.prefix_hits_estimated) == (0.45, True)
    replicas.used(replicas.all[0], Usage(1000, 10, cached_tokens=512))
    (shown,) = replicas.statistics(0.0)
    assert (shown.prefix_hit_rate, shown.prefix_hits_estimated) == (0.512, False)
    assert (shown.requests, shown.prompt_tokens, shown.cached_tokens) == (4, 1000, 512)


class Courses(RuleBasedStateMachine):
    """Any course of events: whatever happens, what is under way is counted once and given back once."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.open: list[Lease] = []
        self.known: list[object] = []
        self.replicas = Replicas(["r0", "r1"], name="s")

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        target=leases,
        prompt=st.integers(0, 10_000),
        completion=st.integers(0, 9000),
        prefix=st.none() | st.builds(Prefix, st.integers(0, 3), st.integers(1, 5000)),
    )
    def acquire(self, prompt: int, completion: int, prefix: Prefix | None) -> Lease | None:
        up = [replica for replica in self.replicas.all if replica.mark == "up"]
        try:
            lease = self.replicas.acquire(self.now, RoutingHints(prompt, completion, prefix))
        except TransientError:
            assert not up
            return None
        assert lease.replica in up
        self.open.append(lease)
        self.known.append(lease.replica)
        return lease

    @rule(lease=leases, draining=st.booleans())
    def fail(self, lease: Lease | None, draining: bool) -> None:
        if lease is not None:
            lease.failed(self.now, draining=draining)

    @rule(lease=leases)
    def answer(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.answered(self.now)
            self.replicas.used(lease.replica, Usage(100, 20, 50))

    @rule(lease=leases)
    def cancel(self, lease: Lease | None) -> None:
        if lease is not None:
            lease.cancelled(self.now)

    @rule(lease=consumes(leases), times=st.integers(1, 3))
    def release(self, lease: Lease | None, times: int) -> None:
        if lease is not None:
            for _ in range(times):
                lease.release()
            if lease in self.open:
                self.open.remove(lease)

    @rule(number=st.integers(0, 4))
    def add(self, number: int) -> None:
        self.replicas.add(f"r{number}")

    @rule(number=st.integers(0, 4), mark=st.sampled_from(["up", "down", "draining", "gone"]))
    def change(self, number: int, mark: str) -> None:
        if not any(replica.base_url == f"r{number}" for replica in self.replicas.all):
            return
        if mark == "gone":
            self.replicas.remove(f"r{number}")
        else:
            self.replicas.mark(f"r{number}", mark)  # type: ignore[arg-type]

    @invariant()
    def what_is_under_way_is_counted(self) -> None:
        for replica in self.replicas.all:
            assert replica.in_flight == sum(lease.replica is replica for lease in self.open)
            assert (replica.pending_tokens > 0) == (replica.in_flight > 0)

    def teardown(self) -> None:
        for lease in self.open:
            lease.release()
        for replica in self.known:
            assert (replica.in_flight, replica.pending_tokens) == (0, 0)  # type: ignore[attr-defined]
        assert not self.replicas.same_prefix


Courses.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestCourses = Courses.TestCase


@pytest.mark.parametrize("strategy", RoutingStrategy.__args__)  # type: ignore[attr-defined]
def test_every_strategy_alone_decides(strategy: RoutingStrategy) -> None:
    replicas = Replicas(["a", "b", "c"], Routing(strategies=(strategy,)))
    leases = [replicas.acquire(0.0, RoutingHints(10, 10, Prefix(number, 5))) for number in range(9)]
    assert {lease.base_url for lease in leases} == {"a", "b", "c"}
