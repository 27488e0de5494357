"""Strategies by name: the shares that each of them gives, and that none lets a job wait while a source is free."""

from __future__ import annotations

import itertools

import pytest

from qreward_plugins.scheduling.strategies import strategy
from qreward_plugins.simulation import run


def trio(stage, *, limits=None, **options):
    """Sources a, b and c of the weights 3, 2 and 1."""
    for name, weight in (("a", 3.0), ("b", 2.0), ("c", 1.0)):
        stage.add(name, weight=weight, limits=limits, **options)


def counts(stage):
    return {name: len(source.arrivals) for name, source in stage.sources.items()}


@pytest.mark.parametrize("weighted", [False, True])
def test_turns_are_spread_evenly_and_not_in_lumps(stage, weighted):
    trio(stage)
    choose, upstreams = strategy("weighted" if weighted else "round_robin"), list(stage.upstreams.values())
    names = [choose(upstreams).name for _ in range(60)]
    shares = {"a": 3, "b": 2, "c": 1} if weighted else {"a": 2, "b": 2, "c": 2}
    for start in range(0, 60, 6):
        six = names[start : start + 6]
        assert {name: six.count(name) for name in "abc"} == shares
    assert max(len(list(group)) for _, group in itertools.groupby(names)) <= 2


def test_turns_of_unequal_weights_are_exact_in_the_long_run(stage):
    stage.add("a", weight=3.0)
    stage.add("b", weight=2.0)
    choose, upstreams = strategy("weighted"), list(stage.upstreams.values())
    names = [choose(upstreams).name for _ in range(50)]
    assert (names.count("a"), names.count("b")) == (30, 20)


def test_a_caller_may_state_other_weights(stage):
    trio(stage)
    choose = strategy("weighted", lambda upstream: {"a": 1.0, "b": 1.0, "c": 4.0}[upstream.name])
    upstreams = list(stage.upstreams.values())
    names = [choose(upstreams).name for _ in range(60)]
    assert [names.count(name) for name in "abc"] == [10, 10, 40]


def test_turns_of_those_who_cannot_are_taken_by_the_others(stage):
    trio(stage)
    choose = strategy("round_robin")
    a, b, c = stage.upstreams.values()
    names = [choose([a, c]).name for _ in range(10)] + [choose([a, b, c]).name for _ in range(9)]
    assert [names[:10].count(name) for name in "abc"] == [5, 0, 5]
    assert names[10:].count("b") == 3


@pytest.mark.parametrize(
    ("name", "shares"), [("round_robin", [40, 40, 40]), ("weighted", [60, 40, 20])], ids=["round_robin", "weighted"]
)
def test_shares_of_a_batch(stage, name, shares):
    trio(stage, limits={"concurrency": 200})
    assert stage.play([10] * 120, strategy=name).all_scored
    assert list(counts(stage).values()) == shares


def test_least_requests_fills_up_by_weight(stage):
    trio(stage, limits={"concurrency": 200}, behaviour=lambda *_: 5.0)
    stage.play([10] * 60, strategy="least_requests")
    assert list(counts(stage).values()) == [30, 20, 10]


def test_least_requests_gives_a_slow_source_less(stage):
    stage.add("quick", limits={"concurrency": 4}, behaviour=lambda *_: 1.0)
    stage.add("slow", limits={"concurrency": 4}, behaviour=lambda *_: 7.0)
    played = stage.play([10] * 64, strategy="least_requests")
    assert played.shares["quick"] > 4 * played.shares["slow"] > 0


def test_least_tokens_balances_tokens_and_not_requests(stage):
    for name in "ab":
        stage.add(name, limits={"concurrency": 200}, behaviour=lambda *_: 5.0)
    stage.play([6000] + [300] * 10, strategy="least_tokens")
    by_source = {name: [sent.size for sent in stage.sent if sent.source == name] for name in "ab"}
    assert sorted(len(sizes) for sizes in by_source.values()) == [1, 10]


def test_least_tokens_heeds_weight(stage):
    trio(stage, limits={"concurrency": 200}, behaviour=lambda *_: 5.0)
    stage.play([300] * 60, strategy="least_tokens")
    assert list(counts(stage).values()) == [30, 20, 10]


def test_least_of_what_is_in_flight_now(stage):
    trio(stage)

    async def main():
        a, b, c = upstreams = list(stage.upstreams.values())
        for name, size in (("a", 30), ("a", 30), ("b", 60), ("b", 60), ("c", 6000)):
            stage.attempt(stage.job(size), name, started_at=0.0, expected_s=1.0)
        # Requests for the weight: 2/3, 2/2, 1/1; tokens: 20/3, 40/2, 2000/1.
        assert strategy("least_requests")(upstreams) is a
        assert strategy("least_tokens")([b, c]) is b
        stage.attempt(stage.job(30), "a", started_at=0.0, expected_s=1.0)
        stage.attempt(stage.job(30), "a", started_at=0.0, expected_s=1.0)
        assert strategy("least_requests")([a, c]) is c
        assert strategy("least_tokens")(upstreams) is a

    run(main())


@pytest.mark.parametrize("name", ["round_robin", "weighted", "least_requests", "least_tokens"])
def test_no_job_waits_while_another_source_is_free(stage, name):
    stage.add("small", limits={"concurrency": 1}, behaviour=lambda *_: 100.0, timeout_s=200, weight=9.0)
    stage.add("spent", limits={"requests_per_minute": 2}, requests_per_window=2)
    stage.add("large", limits={"concurrency": 5})
    played = stage.play([10] * 40, strategy=name)
    assert played.all_scored
    assert played.shares["large"] >= 36
    assert sum(sent.at == 0.0 for sent in stage.sent) == 8
    assert all(not source.violations for source in stage.sources.values())


def test_the_longest_goes_first_and_large_jobs_are_not_overtaken(stage):
    stage.add("a", limits={"tokens_per_minute": 1000, "concurrency": 1})
    stage.play([90, 900, 300], strategy="round_robin", deadline_s=900)
    assert [sent.size for sent in stage.sent] == [900, 300, 90]


@pytest.mark.parametrize("name", ["round_robin", "least_requests"])
def test_a_job_too_large_for_one_source_goes_to_the_other(stage, name):
    stage.add("small", limits={"tokens_per_minute": 50})
    stage.add("large", limits={"tokens_per_minute": 5000})
    played = stage.play([3000, 30, 30], strategy=name)
    assert played.all_scored
    assert next(sent.source for sent in stage.sent if sent.size == 3000) == "large"


def test_earliest_finish_is_no_strategy_of_its_own():
    assert strategy("earliest_finish") is None
