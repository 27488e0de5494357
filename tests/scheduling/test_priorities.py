"""Priorities: at each source the sample of the highest priority goes first, whatever else the planner considers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest

from qreward_plugins.config import Batch, Limits
from qreward_plugins.samples import Scored
from qreward_plugins.scheduling import Call
from qreward_plugins.scheduling.hedging import LEAST_HEDGES
from qreward_plugins.scheduling.rules import Rules
from qreward_plugins.scheduling.timed_hedges import TimedHedges
from qreward_plugins.simulation import run

from .conftest import PlainJudge

LOW, HIGH = 10, 40
"""Bytes of samples, by which a test tells them apart."""


@dataclass
class Fixed(PlainJudge):
    """A judge whose calls have further fields."""

    fields: dict | None = None

    def call(self, sample) -> Call:
        return replace(super().call(sample), **(self.fields or {}))


def played(stage, *samples, settings=None, first=None):
    """Score samples, each (at, priority, size, judge); return the requests that came to the sources."""

    async def main():
        dispatcher = stage.dispatcher(**(settings or {}))
        if first is not None:
            first(dispatcher)

        async def score(at, priority, size, judge=stage.judge):
            await asyncio.sleep(at)
            batch = dispatcher.batches.of_singles(priority)
            return await dispatcher.score(stage.sample(size), judge, deadline_s=600, batch=batch)

        outcomes = await asyncio.gather(*(score(*each) for each in samples))
        assert all(isinstance(outcome, Scored) for outcome in outcomes)
        await dispatcher.aclose()

    run(main())
    return [(round(sent.at, 2), sent.source, sent.size) for sent in stage.sent]


def slow_and_fast(stage):
    """Source b is fast, and has used up its window for a minute; source a is slow and free."""
    stage.add(
        "a",
        behaviour=lambda number, request, now: 0.4 * request.size,
        limits={"concurrency": 1, "requests_per_minute": 10},
    )
    stage.add(
        "b",
        behaviour=lambda number, request, now: 0.1 * request.size,
        limits={"requests_per_minute": 1},
        requests_per_window=1,
    )
    stage.knows("a", 4.0)
    stage.knows("b", 1.0)
    # What comes first goes to the fast source.
    return (0.0, 0, LOW)


def test_a_slow_source_takes_the_higher_priority_although_it_is_larger_if_no_other_source_would_end_it_earlier(stage):
    before = slow_and_fast(stage)
    sent = played(stage, before, *[(2.0, 0, LOW)] * 30, (2.0, 5, HIGH))
    assert sent[0] == (0.0, "b", LOW)
    assert sent[1] == (2.0, "a", HIGH)


def test_a_hedge_does_not_take_the_place_that_a_higher_priority_waits_for(stage):
    def straggles(number, request, now):
        return 60.0 if request.size == LOW else 1.0

    stage.add("a", behaviour=straggles, limits={"concurrency": 1})
    stage.add("b", limits={"concurrency": 1})
    stage.knows("a", 0.9)
    stage.knows("b", 1.0)
    urgent = replace(stage.judge, sources=("b",))
    sent = played(
        stage,
        (0.0, 0, LOW, replace(stage.judge, sources=("a", "b"))),
        *[(0.5, 5, HIGH, urgent)] * 30,
        settings={"hedge": True, "hedge_budget": 1.0},
    )
    to_b = [size for _, source, size in sent if source == "b"]
    assert to_b[:30] == [HIGH] * 30
    assert LOW in to_b  # and as soon as none waits, there is the hedge


def test_a_hedge_after_a_fixed_delay_lets_a_higher_priority_go_first(stage):
    stage.add("a", behaviour=lambda number, *_: 10.0 if number == 0 else 1.0, limits={"concurrency": 2})
    # The place of the second one is free at the moment when the first one may be hedged.
    hedged = Fixed(("a",), fields={"rules": Rules(hedges=1, hedge_after_s=1.0, timeout_s=60)})
    sent = played(stage, (0.0, 0, LOW, hedged), (0.0, 0, LOW + 1), (0.5, 5, HIGH))
    assert [size for _, _, size in sent] == [LOW, LOW + 1, HIGH, LOW]


def test_a_hedge_that_waits_for_a_higher_priority_does_not_wake_the_scheduler(stage, monkeypatch):
    looks = []
    choose = TimedHedges.choose
    monkeypatch.setattr(TimedHedges, "choose", lambda hedges, now: looks.append(now) or choose(hedges, now))
    stage.add("a", behaviour=lambda number, *_: 200.0 if number == 0 else 10.0, limits={"concurrency": 2})
    hedged = Fixed(("a",), fields={"rules": Rules(hedges=1, hedge_after_s=1.0, timeout_s=600)})
    sent = played(stage, (0.0, 0, LOW, hedged), *[(0.5, 5, HIGH)] * 10)
    assert [size for _, _, size in sent] == [LOW, *[HIGH] * 10, LOW]
    assert sent[-1][0] == pytest.approx(100.5)
    assert len(looks) < 100


def test_a_hedge_without_room_goes_when_time_gives_it(stage, monkeypatch):
    looks = []
    choose = TimedHedges.choose
    monkeypatch.setattr(TimedHedges, "choose", lambda hedges, now: looks.append(now) or choose(hedges, now))
    stage.add("a", behaviour=lambda number, *_: 200.0, limits={"requests_per_minute": 1}, requests_per_window=1)
    hedged = Fixed(("a",), fields={"rules": Rules(hedges=1, hedge_after_s=1.0, timeout_s=600)})
    sent = played(stage, (0.0, 0, LOW, hedged))
    assert [round(at) for at, _, _ in sent] == [0, 60]
    assert len(looks) < 100


def test_a_hedge_over_the_budget_goes_when_the_batch_has_grown(stage):
    stage.add("a", behaviour=lambda number, *_: 100.0 if number < 6 else 1.0, limits={"concurrency": 100})
    rules = Rules(hedges=1, hedge_after_s=1.0, timeout_s=600, hedge_budget=0.1)
    hedged = Fixed(("a",), fields={"rules": rules})

    async def main():
        dispatcher = stage.dispatcher()
        batch = dispatcher.batches.of_singles(0)

        def score(number):
            return [dispatcher.score(stage.sample(LOW), hedged, deadline_s=600, batch=batch) for _ in range(number)]

        futures = score(6)
        await asyncio.sleep(10)
        before = len(stage.sent)
        futures += score(54)
        await asyncio.sleep(0.5)
        after = len(stage.sent)
        await asyncio.gather(*futures)
        await dispatcher.aclose()
        return before, after

    before, after = run(main())
    assert before == 6 + LEAST_HEDGES
    assert after == 6 + 54 + 6


def test_a_call_with_a_strategy_of_its_own_leaves_a_source_to_a_higher_priority(stage):
    stage.add("a", limits={"concurrency": 1})
    stage.add("b", limits={"concurrency": 1})
    stage.knows("a", 1.0)
    stage.knows("b", 1.0)
    last = Fixed(("a", "b"), fields={"choose": lambda upstreams: max(upstreams, key=lambda upstream: upstream.name)})
    only_b = replace(stage.judge, sources=("b",))
    sent = played(stage, (0.0, 0, LOW, last), (0.0, 5, HIGH, only_b))
    assert sorted(sent) == [(0.0, "a", LOW), (0.0, "b", HIGH)]


def test_a_sample_that_is_not_oversize_any_more_goes_by_its_priority(stage):
    """It was estimated to take more tokens than a whole window. The limit rises while others still wait."""
    stage.add("a", limits={"concurrency": 1, "tokens_per_minute": 1000})

    def raise_the_limit(dispatcher):
        def raised():
            limits = Limits(concurrency=1, tokens_per_minute=100_000)
            stage.upstreams["a"].quota.retune(limits, dispatcher.now())
            dispatcher.look_again()

        asyncio.get_running_loop().call_later(2.5, raised)

    large = 2000
    sent = played(stage, *[(0.0, 0, LOW)] * 6, (0.0, 5, large), first=raise_the_limit)
    assert [size for _, _, size in sent] == [LOW] * 3 + [large] + [LOW] * 3
    assert sent[3][0] == pytest.approx(3.0)


def test_a_call_does_not_join_a_request_with_tokens_that_a_higher_priority_waits_for(stage):
    carried = []

    def takes(number, requests, now):
        carried.append([request.size for request in requests])
        return 10.0 if number == 0 else 1.0

    stage.add(
        "a",
        behaviour=lambda number, request, now: takes(number, [request], now),
        batch_behaviour=takes,
        batch=Batch(max_size=8, max_wait_s=5.0, max_tokens=None),
        limits={"concurrency": 2, "tokens_per_minute": 1000},
    )
    large = 930

    def as_if_it_had_failed_with_others(dispatcher):
        submit = dispatcher.submit

        def submit_alone(*given, **more):
            job = submit(*given, **more)
            job.most_together = 1 if job.size == large else job.most_together
            return job

        dispatcher.submit = submit_alone

    # The second one opens a request, which waits for others because the first one is under way.
    played(
        stage,
        (0.0, 0, LOW),
        (1.0, 0, LOW + 1),
        (1.2, 5, large),
        (1.4, 0, LOW + 2),
        first=as_if_it_had_failed_with_others,
    )
    assert carried == [[LOW], [LOW + 1], [large], [LOW + 2]]


def busy_fast(stage, base_s=0.0):
    """Source b is fast, and free at 10 s; source a is slow, free, and takes few requests a minute."""
    for name, each_s in (("a", 0.4), ("b", 0.1)):
        stage.add(
            name,
            behaviour=lambda number, request, now, each_s=each_s: each_s * request.size,
            limits={"concurrency": 1, "requests_per_minute": 2 if name == "a" else 60},
        )
        stage.knows(name, each_s * 10)
    return (0.0, 0, 100, replace(stage.judge, sources=("b",)))


def test_a_slow_source_takes_the_least_of_the_higher_priority_if_no_other_would_end_that_one_earlier(stage):
    """It would end late for the batch, and the largest one would end earlier at the other source."""
    before = busy_fast(stage)
    sent = played(stage, before, (0.5, 0, LOW), (0.5, 5, 40), (0.5, 5, 32))
    assert next(size for _, source, size in sent if source == "a") == 32


def test_a_slow_source_takes_one_of_middle_size_of_the_higher_priority_if_no_other_would_end_that_one_earlier(stage):
    """Another source would end smaller ones earlier, and a third one larger ones."""
    takes = {"a": lambda size: 20 + 0.2 * size, "b": lambda size: 0.1 * size, "c": lambda size: 0.5 * size}
    for name, seconds in takes.items():
        stage.add(
            name,
            behaviour=lambda number, request, now, seconds=seconds: seconds(request.size),
            limits={"concurrency": 1 if name == "a" else 40, "requests_per_minute": {"a": 1, "b": 40, "c": 4}[name]},
        )
        for size in [1, 100] * 50:
            stage.upstreams[name].speed.learn(size, seconds(size))
    only = {name: replace(stage.judge, sources=(name,)) for name in takes}
    # When the others come, c is free in 14 s, and b in 23.5 s. Two long ones keep their batches open until then.
    used_up = [(0.0, 0, size, only["c"]) for size in (100, LOW, LOW, LOW)]
    used_up += [(9.5, 5, 400, only["b"])] + [(9.5, 0, LOW, only["b"])] * 39
    sent = played(stage, *used_up, (46.0, 0, 3), *[(46.0, 5, size) for size in (12, 25, 40)])
    assert sent[44] == (46.0, "a", 25)
