"""A source with several servers, some of which are broken: it costs no sample, whatever the others do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from qreward_plugins.config.source_models import Routing
from qreward_plugins.errors import PermanentError, TransientError
from qreward_plugins.samples import Scored
from qreward_plugins.sources.base import Reply
from qreward_plugins.sources.replicas import Replicas, RoutingHints

QUICK_S = 0.005
"""A refusal takes no inference."""
POISONED = 77
"""Size of a request that every sound server refuses."""


def refuses(size, now):
    return QUICK_S, PermanentError("answered 400", status=400)


def errs(size, now):
    return QUICK_S, TransientError("answered 500", status=500)


def answers_nonsense(size, now):
    return QUICK_S, "bad"


def sound(seconds: float, *, down: Callable[[float], bool] = lambda now: False):
    """Answers after so many seconds, unless it is down."""

    def server(size, now):
        if down(now):
            return seconds, TransientError("answered 502", status=502)
        return refuses(size, now) if size == POISONED else (seconds, "1")

    return server


@pytest.fixture
def add(stage):
    """Add the source: its servers, which return the seconds and the text or the error. Counts requests by server.

    `marks` are the states of servers as their pool reports them, with the time from which they hold.
    """

    def add(marks=(), servers=None, **limits) -> Counter[str]:
        source = stage.add("own", limits=limits)
        replicas = Replicas(servers, Routing(strategies=("least_requests",)), name="own")
        source.replicas = replicas
        asked: Counter[str] = Counter()

        async def send(request, *, on_sent):
            loop = asyncio.get_running_loop()
            for at, url, mark in marks:
                if loop.time() >= at:
                    replicas.mark(url, mark)
            with replicas.acquire(loop.time(), RoutingHints(tried=request.refusal)) as lease:
                on_sent()
                asked[lease.base_url] += 1
                seconds, end = servers[lease.base_url](request.size, loop.time())
                try:
                    await asyncio.sleep(seconds)
                except asyncio.CancelledError:
                    lease.cancelled(loop.time())
                    raise

            def read() -> Reply:
                if isinstance(end, Exception):
                    raise end
                return Reply(text=end)

            return replace(lease.read(loop.time(), read), on_judged=lease.judged)

        source.send = send
        return asked

    return add


def test_one_that_refuses_does_not_get_what_waits_for_the_other_one(stage, add):
    """It always has fewest requests under way, and each refusal costs a retry, which the retry budget puts off."""
    asked = add(servers={"broken": refuses, "good": sound(2.0)}, concurrency=64)
    played = stage.play([10] * 512)
    assert played.all_scored
    assert asked["good"] == 512
    assert asked["broken"] < 64
    assert played.finished_at == pytest.approx(512 / 64 * 2.0, rel=0.1)


@pytest.mark.parametrize("broken", [refuses, errs, answers_nonsense])
@pytest.mark.parametrize("concurrency", [8, 512])
def test_a_third_may_be_broken(stage, add, broken, concurrency):
    add(servers={"broken": broken, "b": sound(2.0), "c": sound(2.0)}, concurrency=concurrency)
    played = stage.play([10] * 4 * concurrency, deadline_s=60.0)
    assert played.all_scored
    assert played.finished_at < 11.0


def test_a_first_burst_that_a_broken_one_refuses_goes_to_the_others_at_once(stage, add):
    asked = add(servers={"broken": refuses, "b": sound(3.0), "c": sound(3.0)}, concurrency=2000)
    played = stage.play([10] * 4000, deadline_s=60.0)
    assert played.all_scored
    assert sum(asked.values()) < 4000 + 800
    assert played.finished_at < 9.0


def test_one_that_answers_others_decides_while_the_other_one_is_away(stage, add):
    """A request that is at fault fails fast, and is not the only one of the replica."""
    marks = [(0.0, "away", "down")]
    asked = add(marks, servers={"here": sound(0.5), "away": sound(0.5)}, concurrency=4)
    played = stage.play([10] * 8 + [POISONED] + [10] * 32, deadline_s=60.0)
    assert [number for number, outcome in enumerate(played.outcomes) if not isinstance(outcome, Scored)] == [8]
    assert played.outcomes[8].reason == "no_source"
    assert played.finished_at < 12.0
    assert asked["here"] <= 42


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_request_that_all_refuse_costs_few_tries_and_no_replica(stage, add, count):
    servers = {f"good-{number}": sound(2.0) for number in range(count)}
    asked = add(servers=servers, concurrency=16)
    sizes = [POISONED if number in (3, 40) else 10 for number in range(64)]
    played = stage.play(sizes, deadline_s=60.0)
    failed = {number: outcome for number, outcome in enumerate(played.outcomes) if not isinstance(outcome, Scored)}
    assert {number: outcome.reason for number, outcome in failed.items()} == {3: "no_source", 40: "no_source"}
    assert all(outcome.attempts <= count for outcome in failed.values())
    assert sum(asked.values()) <= 62 + 2 * count
    assert played.finished_at == pytest.approx(62 / 16 * 2.0, abs=1.0)
    replicas = stage.sources["own"].replicas
    assert all(shown.failures == 0 and shown.health == "up" for shown in replicas.statistics(played.finished_at))


def test_many_requests_that_all_refuse_keep_the_load_even(stage, add):
    asked = add(servers={"a": sound(2.0), "b": sound(2.0)}, concurrency=32)
    played = stage.play([POISONED if number % 5 == 3 else 10 for number in range(640)], deadline_s=100.0)
    assert sum(isinstance(outcome, Scored) for outcome in played.outcomes) == 512
    assert played.finished_at == pytest.approx(512 / 32 * 2.0, rel=0.1)
    assert sum(asked.values()) <= 640 + 128


def test_a_source_that_refuses_everything_fails_at_once(stage, add):
    """A parameter that the servers do not know: each sample costs two tries at most, and none waits."""
    asked = add(servers={"a": refuses, "b": refuses, "c": refuses}, concurrency=512)
    played = stage.play([10] * 2000, deadline_s=60.0)
    assert {outcome.reason for outcome in played.outcomes} == {"no_source"}
    assert played.finished_at < 1.0
    assert sum(asked.values()) <= 2 * 2000


def test_a_request_that_is_cancelled_before_the_first_answer_is_no_failure(stage, add):
    add(servers={"a": sound(5.0), "b": sound(5.0)}, concurrency=4)
    replicas = stage.sources["own"].replicas
    played = stage.play([10] * 4, deadline_s=3.0)
    assert {outcome.reason for outcome in played.outcomes} == {"deadline"}
    assert [(shown.failures, shown.health) for shown in replicas.statistics(3.0)] == [(0, "up")] * 2
