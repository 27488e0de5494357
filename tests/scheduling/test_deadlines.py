"""Order and deadlines: whatever is served first, order alone costs no sample its deadline, least of all by its size."""

from __future__ import annotations

import asyncio
import random
from statistics import fmean
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.samples import Scored
from qreward_plugins.simulation import run

SHORT = 10


class Served(NamedTuple):
    size: int
    wait_s: float
    scored: bool


def callers(stage, sizes, *, seconds, number=10, deadline_s=8.0):
    """Score samples of these sizes by `number` callers, each of which hands in its next one when it has an outcome."""
    stage.sources["a"].behaviour = lambda number, request, now: seconds(request.size)
    left = iter(sizes)
    served = []

    async def caller(dispatcher):
        for size in left:
            sample = stage.sample(size)
            began_at = dispatcher.now()
            outcome = await dispatcher.score(sample, stage.judge, deadline_s=deadline_s)
            wait_s = dispatcher.now() - began_at - seconds(size)
            served.append(Served(size, wait_s, isinstance(outcome, Scored)))

    async def main():
        dispatcher = stage.dispatcher()
        await asyncio.gather(*[caller(dispatcher) for _ in range(number)])
        await dispatcher.aclose()

    run(main())
    assert stage.idle()
    return served


# One by one


def test_one_by_one_a_short_sample_among_long_ones_is_not_left_behind(stage):
    stage.add("a", limits={"concurrency": 2})
    sizes = [*range(1000, 1004), SHORT, *range(1004, 1150)]
    served = callers(stage, sizes, seconds=lambda size: 0.13)
    (short,) = [each for each in served if each.size == SHORT]
    assert short.scored
    assert short.wait_s < 2 * fmean(each.wait_s for each in served)


@pytest.mark.parametrize("seed", range(3))
def test_one_by_one_nobody_waits_or_fails_for_its_size(stage, seed):
    rng = random.Random(seed)
    stage.add("a", limits={"concurrency": 3})
    sizes = [round(1000 * rng.lognormvariate(-1.5, 0.8)) + 1 for _ in range(400)]
    served = sorted(callers(stage, sizes, seconds=lambda size: size / 1000, number=20, deadline_s=30.0))
    third = len(served) // 3
    short, long = (fmean(each.wait_s for each in part) for part in (served[:third], served[-third:]))
    assert all(each.scored for each in served)
    assert short == pytest.approx(long, rel=0.15)


def test_under_a_load_that_is_too_high_the_missing_are_of_all_sizes(stage):
    rng = random.Random(5)
    stage.add("a", limits={"concurrency": 2})
    sizes = [rng.randint(100, 2000) for _ in range(600)]
    served = sorted(callers(stage, sizes, seconds=lambda size: 0.5, number=60, deadline_s=5.0))
    third = len(served) // 3
    missing = [fmean(not each.scored for each in part) for part in (served[:third], served[-third:])]
    # Of 60 in 5 s 20 can be served. What is too late is not tried before what is not, or nothing would be in time.
    assert 0.5 < fmean(not each.scored for each in served) < 0.75
    assert missing[0] == pytest.approx(missing[1], abs=0.1)


def test_a_batch_is_not_starved_by_a_stream_of_single_samples(stage):
    stage.add("a", limits={"concurrency": 1}, behaviour=lambda number, request, now: 0.1)

    async def main():
        dispatcher = stage.dispatcher()
        stop = False

        async def single():
            while not stop:
                await dispatcher.score(stage.sample(500), stage.judge, deadline_s=300)

        singles = [asyncio.ensure_future(single()) for _ in range(5)]
        await asyncio.sleep(1)
        samples = [stage.sample(SHORT) for _ in range(20)]
        batch = dispatcher.batches.new([each.group_id for each in samples])
        began_at = dispatcher.now()
        await asyncio.gather(*[dispatcher.score(each, stage.judge, deadline_s=60, batch=batch) for each in samples])
        took_s = dispatcher.now() - began_at
        dispatcher.batches.seal(batch)
        stop = True
        await asyncio.gather(*singles)
        await dispatcher.aclose()
        return took_s

    # Those that came before it go first, and nothing that came later.
    assert run(main()) == pytest.approx(2.0, abs=0.61)


# Batches


def test_a_sample_that_is_in_a_hurry_does_not_wait_for_a_batch_that_is_not(stage):
    stage.add("a", limits={"concurrency": 1})

    async def main():
        dispatcher = stage.dispatcher()
        samples = [stage.sample(size) for size in range(100, 140)]
        batch = dispatcher.batches.new([each.group_id for each in samples])
        futures = [dispatcher.score(each, stage.judge, deadline_s=300, batch=batch) for each in samples]
        await asyncio.sleep(5.5)
        outcome = await dispatcher.score(stage.sample(SHORT), stage.judge, deadline_s=6)
        rest = await asyncio.gather(*futures)
        dispatcher.batches.seal(batch)
        await dispatcher.aclose()
        return outcome, rest

    outcome, rest = run(main())
    assert isinstance(outcome, Scored)
    assert all(isinstance(each, Scored) for each in rest)


def test_a_higher_priority_still_goes_first_however_little_time_the_others_have(stage):
    stage.add("a", limits={"concurrency": 1})

    async def main():
        dispatcher = stage.dispatcher()
        samples = [stage.sample(100) for _ in range(10)]
        batch = dispatcher.batches.new([each.group_id for each in samples], priority=1)
        futures = [dispatcher.score(each, stage.judge, deadline_s=300, batch=batch) for each in samples]
        hurried = dispatcher.score(stage.sample(SHORT), stage.judge, deadline_s=6)
        outcomes = await asyncio.gather(*futures, hurried)
        await dispatcher.aclose()
        return outcomes

    *urgent, hurried = run(main())
    assert all(isinstance(each, Scored) for each in urgent)
    assert hurried.reason == "deadline"


@pytest.mark.parametrize("ordered", ["mixed", "ascending", "descending"])
@pytest.mark.parametrize("limits", [{"concurrency": 4}, {"requests_per_minute": 60, "concurrency": 8}])
def test_of_a_batch_that_cannot_be_done_in_time_samples_of_all_sizes_are_missing(stage, ordered, limits):
    rng = random.Random(3)
    sizes = [rng.randint(100, 900) for _ in range(240)]
    sizes = sizes if ordered == "mixed" else sorted(sizes, reverse=ordered == "descending")
    stage.add("a", limits=limits, behaviour=lambda number, request, now: 1.0)
    stage.knows("a", 1.0, size=500)
    played = stage.play(sizes, deadline_s=30)
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    missing = [not isinstance(played.outcomes[index], Scored) for index in order]
    short, long = fmean(missing[:80]), fmean(missing[-80:])
    assert 0.2 < fmean(missing) < 0.8
    assert short == pytest.approx(long, abs=0.15)


def test_what_can_be_done_in_time_goes_longest_first_all_the_same(stage):
    stage.add("a", limits={"concurrency": 1})
    sizes = random.Random(1).sample(range(100, 900), 20)
    stage.play(sizes, deadline_s=100)
    assert [sent.size for sent in stage.sent] == sorted(sizes, reverse=True)


def test_among_several_sources_a_job_that_is_in_a_hurry_takes_the_slow_one(stage):
    stage.add("fast", limits={"concurrency": 1}, behaviour=lambda number, request, now: 1.0)
    stage.add("slow", limits={"concurrency": 1}, behaviour=lambda number, request, now: 4.0)
    stage.knows("fast", 1.0, size=100)
    stage.knows("slow", 4.0, size=100)
    # 12 s of work for the fast one alone, and 10 s to do it in.
    played = stage.play([100] * 11, deadline_s=10)
    assert played.all_scored
    assert played.shares["slow"] >= 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_where_the_earliest_deadline_first_ends_all_in_time_so_does_the_engine(new_stage, data):
    """One source, one at a time, one second each: any deadlines that can be met with a little to spare are met."""
    stage = new_stage()
    stage.add("a", limits={"concurrency": 1})
    stage.knows("a", 1.0, size=SHORT)
    calls = data.draw(
        st.lists(
            st.tuples(st.integers(0, 20), st.integers(0, 60), st.integers(1, 500), st.integers(0, 3)),
            min_size=1,
            max_size=30,
        )
    )
    # The time at which the earliest deadline first would end each of them, were all deadlines as they are drawn: those
    # that are too early are moved to where they can be met.
    deadlines = feasible([(arrives, due) for arrives, due, _, _ in calls])

    async def call(dispatcher, arrives, due, size, batch):
        await asyncio.sleep(arrives)
        return await dispatcher.score(stage.sample(size), stage.judge, deadline_s=due - arrives, batch=batch)

    async def main():
        dispatcher = stage.dispatcher()
        batches = [None, *(dispatcher.batches.new([]) for _ in range(3))]
        outcomes = await asyncio.gather(
            *[
                call(dispatcher, arrives, due, size, batches[batch])
                for (arrives, _, size, batch), due in zip(calls, deadlines, strict=True)
            ]
        )
        for batch in batches[1:]:
            dispatcher.batches.seal(batch)
        await dispatcher.aclose()
        return outcomes

    assert all(isinstance(outcome, Scored) for outcome in run(main()))


def feasible(calls):
    """Deadlines for jobs of one second, each (arrives, due): as drawn, or as much later as earliest-first needs."""
    waiting, deadlines, now = sorted(enumerate(calls), key=lambda item: item[1]), [0.0] * len(calls), 0.0
    while waiting:
        ready = [item for item in waiting if item[1][0] <= now]
        if not ready:
            now = min(item[1][0] for item in waiting)
            continue
        item = min(ready, key=lambda item: item[1][1])
        waiting.remove(item)
        now += 1.0
        # Whoever is served cannot be called back for one that comes meanwhile, and the forecast is a little careful.
        deadlines[item[0]] = max(item[1][1], now) * 1.25 + 3.0
    return deadlines


def test_how_long_short_and_long_ones_waited_is_in_the_report(stage):
    stage.add("a", limits={"concurrency": 1})
    played = stage.play([10, 20, 30, 40, 50, 60], deadline_s=100)
    waits = played.report.waits
    assert (waits.short_mean_s, waits.long_mean_s) == pytest.approx((4.5, 0.5))
    assert "the shortest third waited 4.5 s for a source (p95 5.0), the longest 0.5 s" in played.report.describe()
