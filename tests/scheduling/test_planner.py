"""The planner: the earliest expected finish, what unlike sources are given, and that nothing idles for long."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics

import pytest

from qreward_plugins.config import Scheduling
from qreward_plugins.errors import TransientError
from qreward_plugins.samples import Scored
from qreward_plugins.scheduling.planner import LONGEST_IDLE_S, NEARLY_FASTEST, Planner
from qreward_plugins.simulation import run


def in_proportion(seconds, size=10):
    """Takes `seconds` for `size`, and in proportion for others."""
    return lambda number, request, now: seconds * request.size / size


def two_speeds(stage, *, fast_s=1.0, slow_s=9.0, concurrency=(1, 1), fast_limits=None, slow_limits=None):
    """A fast source and a slow one, both known."""
    for name, seconds, places, more in (
        ("slow", slow_s, concurrency[1], slow_limits),
        ("fast", fast_s, concurrency[0], fast_limits),
    ):
        stage.add(name, behaviour=in_proportion(seconds), limits={"concurrency": places, **(more or {})})
        stage.knows(name, seconds)


def sizes_at(stage, source):
    return [size for _, name, size in stage.sent if name == source]


# Earliest finish


def test_the_faster_of_two_free_sources_gets_the_only_job(stage):
    two_speeds(stage)
    played = stage.play([10])
    assert (played.shares, played.finished_at) == ({"fast": 1}, pytest.approx(1.0))


def test_a_job_waits_for_a_fast_source_rather_than_for_a_slow_answer(stage):
    two_speeds(stage)
    played = stage.play([10, 10, 10])
    assert (played.shares, played.finished_at) == ({"fast": 3}, pytest.approx(3.0))


def test_a_slow_source_takes_what_the_fast_one_would_end_later(stage):
    two_speeds(stage)
    played = stage.play([10] * 30)
    assert played.all_scored
    assert played.shares["slow"] >= 2
    # Together they do 10 jobs in 9 s.
    assert played.finished_at == pytest.approx(27, abs=2)


@pytest.mark.parametrize("seed", range(3))
def test_three_speeds_end_together(stage, seed):
    rng = random.Random(seed)
    sizes = [round(1000 * rng.lognormvariate(0, 0.6)) for _ in range(150)]
    speeds = {"slow": 9.0, "middling": 3.0, "fast": 1.0}
    for name, seconds in speeds.items():
        stage.add(name, behaviour=in_proportion(seconds, 1000), limits={"concurrency": 8})
        stage.knows(name, seconds, size=1000)
    played = stage.play(sizes)
    fluid = sum(sizes) / 1000 / sum(8 / seconds for seconds in speeds.values())
    assert played.all_scored
    assert set(played.shares) == set(speeds)
    assert played.finished_at < 1.35 * fluid


def test_sources_of_about_the_same_speed_all_take_the_head(stage):
    for name, seconds in (("a", 1.0), ("b", 0.9 * NEARLY_FASTEST)):
        stage.add(name, behaviour=in_proportion(seconds, 100), limits={"concurrency": 1})
        stage.knows(name, seconds, size=100)
    stage.play([500, 400, 300, 200, 100, 50])
    assert [size for _, _, size in stage.sent] == [500, 400, 300, 200, 100, 50]
    assert len(sizes_at(stage, "b")) >= 2


def test_who_failed_a_job_last_is_not_the_first_to_get_it_again(stage):
    # b is a little faster; a takes about as long. After b's failure a is asked, although b is free again soon.
    failures = iter([TransientError("reset")])
    stage.add("a", behaviour=lambda *_: 1.2)
    stage.add("b", behaviour=lambda *_: next(failures, 1.0))
    stage.knows("a", 1.2)
    stage.knows("b", 1.0)
    played = stage.play([10])
    assert [source for _, source, _ in stage.sent] == ["b", "a"]
    assert played.shares == {"a": 1}


def test_a_job_goes_back_to_the_fast_source_that_failed_it_when_the_other_is_far_slower(stage):
    failures = iter([TransientError("reset")])
    stage.add("slow", behaviour=lambda *_: 200.0, timeout_s=300)
    stage.add("fast", behaviour=lambda *_: next(failures, 1.0))
    stage.knows("slow", 200.0)
    stage.knows("fast", 1.0)
    # Others are under way, so that nobody has to take it for want of anything else to do.
    played = stage.play([10, 10, 10, 10])
    assert played.shares == {"fast": 4}
    assert played.finished_at < 2.0


def placed(stage, job_fields, *, in_flight=1):
    """What the planner does with one job of such a history, while something else is under way."""

    async def main():
        planner = Planner(stage.upstreams, Scheduling(), on_too_large=lambda job: None, on_aged=lambda *_: None)
        job = stage.job()
        for name, value in job_fields.items():
            setattr(job, name, value)
        planner.queue.push(job, job.eligible(0.0))
        return [placement.upstream.name for placement in planner.placements(0.0, in_flight=lambda: in_flight)]

    return run(main())


@pytest.mark.parametrize(("failed_at", "goes_to"), [("slow", []), ("fast", ["slow"]), ("", ["slow"])])
def test_a_failure_counts_against_the_source_where_it_happened(stage, failed_at, goes_to):
    # Slow would be done at 3 s, fast at 4.2 s.
    two_speeds(stage, slow_s=3.0)
    stage.upstreams["fast"].throttled(3.2, 0.0, 0.0)
    assert placed(stage, {"failures": bool(failed_at), "attempts": 1, "last_source": failed_at}) == goes_to


@pytest.mark.parametrize(("rests_s", "goes_to"), [(0.4, []), (2.5, ["slow"])])
def test_a_source_that_the_job_rests_from_may_still_be_the_first_to_answer(stage, rests_s, goes_to):
    two_speeds(stage, slow_s=3.0)
    assert placed(stage, {"backoff_until": {"fast": rests_s}}) == goes_to
    assert placed(stage, {"backoff_until": {"fast": rests_s}}, in_flight=0) == ["slow"]


# What is not known


def test_unknown_sources_are_tried_with_the_smallest_jobs(stage):
    for name in "ab":
        stage.add(name, behaviour=in_proportion(1.0), limits={"concurrency": 2})
    played = stage.play([60, 50, 40, 30, 20, 10])
    assert sorted(size for at, _, size in stage.sent if at == 0.0) == [10, 20, 30, 40]
    assert played.all_scored


def test_a_new_source_beside_a_known_one_begins_with_the_smallest(stage):
    stage.add("known", behaviour=in_proportion(1.0), limits={"concurrency": 2})
    stage.knows("known", 1.0)
    stage.add("new", behaviour=in_proportion(1.0), limits={"concurrency": 1})
    stage.play([10 * number for number in range(1, 21)])
    assert sizes_at(stage, "new")[0] == 10
    assert sizes_at(stage, "known")[:2] == [200, 190]


def test_the_only_source_is_given_the_longest_first_even_if_unknown(stage):
    stage.add("a", behaviour=in_proportion(1.0), limits={"concurrency": 2})
    stage.play([20, 40, 10, 30])
    assert sizes_at(stage, "a") == [40, 30, 20, 10]


# What a slow source is given


def test_what_a_slow_source_takes_ends_before_the_rest(stage):
    two_speeds(stage, slow_s=6.0, concurrency=(4, 2))
    played = stage.play([10 + number % 50 for number in range(100)])
    ends = {
        name: max(at + seconds * size / 10 for at, source, size in stage.sent if source == name)
        for name, seconds in (("fast", 1.0), ("slow", 6.0))
    }
    assert ends["slow"] <= ends["fast"]
    assert played.shares["slow"] > 3
    fluid = sum(10 + number % 50 for number in range(100)) / 10 / (4 + 2 / 6)
    assert played.finished_at < 1.15 * fluid


def test_a_slow_source_with_few_requests_is_given_nothing_that_it_cannot_end_in_time(stage):
    two_speeds(stage, slow_s=6.0, concurrency=(2, 8), slow_limits={"requests_per_minute": 2})
    assert stage.play([10 + number for number in range(30)]).all_scored
    ends = {
        name: max(at + seconds * size / 10 for at, source, size in stage.sent if source == name)
        for name, seconds in (("fast", 1.0), ("slow", 6.0))
    }
    assert ends["slow"] <= ends["fast"]


def test_a_slow_source_with_many_requests_to_spend_is_given_short_jobs(stage):
    sizes = [10 * number for number in range(1, 241)]
    for name, seconds, limits in (
        ("fast", 0.1, {"requests_per_minute": 60, "concurrency": 40}),
        ("slow", 0.4, {"requests_per_minute": 600, "concurrency": 4}),
    ):
        stage.add(name, behaviour=in_proportion(seconds), limits=limits, timeout_s=1000)
        stage.knows(name, seconds)
    played = stage.play(sizes)
    # Each short job saves the fast source one of its few requests.
    assert played.all_scored
    assert statistics.median(sizes_at(stage, "slow")) < statistics.median(sizes_at(stage, "fast"))
    assert played.shares["slow"] > 40
    assert max(sizes_at(stage, "slow")[:4]) < statistics.median(sizes)


def test_a_slow_source_with_few_requests_to_spend_is_given_long_jobs(stage):
    sizes = [10 * number for number in range(1, 241)]
    for name, seconds, limits in (
        ("fast", 0.1, {"concurrency": 6}),
        ("slow", 0.4, {"requests_per_minute": 4, "concurrency": 30}),
    ):
        stage.add(name, behaviour=in_proportion(seconds), limits=limits, timeout_s=1000)
        stage.knows(name, seconds)
    stage.play(sizes, deadline_s=1000)
    assert min(sizes_at(stage, "slow")[:3]) > statistics.median(sizes)


# Nothing idles for long


def trickled(stage, submissions, *, then=300.0):
    """Submit (at, size) one by one; return when each was sent first."""

    async def main():
        dispatcher = stage.dispatcher()
        futures = []
        for at, size in submissions:
            await asyncio.sleep(at - dispatcher.now())
            futures.append(dispatcher.score(stage.sample(size), stage.judge, deadline_s=then))
        outcomes = await asyncio.gather(*futures)
        await dispatcher.aclose()
        assert all(isinstance(outcome, Scored) for outcome in outcomes)

    run(main())
    return stage.sent


def test_a_slow_source_takes_a_job_when_nothing_at_all_is_under_way(stage):
    two_speeds(stage, slow_s=20.0)
    stage.upstreams["fast"].throttled(5.0, 0.0, 0.0)  # it asks for a pause of 5 s, and would be done at 6 s
    played = stage.play([10])
    assert [(at, source) for at, source, _ in stage.sent] == [(0.0, "slow")]
    assert played.finished_at == pytest.approx(20.0)


def test_a_source_that_idles_by_choice_thinks_again_soon(stage):
    # Slow is left alone while fast is expected to do everything sooner; then fast turns out to be slower than thought.
    two_speeds(stage, slow_s=4.0, concurrency=(1, 1))
    stage.sources["fast"].behaviour = lambda number, request, now: (
        stage.sent.append((now, "fast", request.size)) or (0.5 if number == 0 else 30.0)
    )
    sent = trickled(stage, [(0.0, 10), (0.0, 10), (0.0, 10)])
    at_slow = [at for at, source, _ in sent if source == "slow"]
    assert at_slow
    assert min(at_slow) < 30.0


def test_a_source_that_came_free_is_used_again_at_once(stage):
    stage.add("a", limits={"concurrency": 1})
    assert stage.play([10] * 20).finished_at == pytest.approx(20.0)
    assert [at for at, _, _ in stage.sent] == pytest.approx(range(20))


def test_whoever_idles_by_choice_does_so_no_longer_than_said(stage, monkeypatch):
    two_speeds(stage, fast_s=10.0, slow_s=50.0, concurrency=(2, 2))
    asked, placements = [], Planner.placements

    def noted(planner, now, *, in_flight):
        yield from placements(planner, now, in_flight=in_flight)
        idle = stage.upstreams["slow"].quota.in_flight < 2
        asked.append((now, bool(planner.queue) and idle))

    monkeypatch.setattr(Planner, "placements", noted)
    stage.play([10] * 6)
    gaps = [after - at for (at, idle), (after, _) in itertools.pairwise(asked) if idle]
    assert gaps
    assert max(gaps) <= LONGEST_IDLE_S + 1e-6


# The order


@pytest.fixture
def rated(stage):
    """A source of 20 requests a minute that is quick."""
    stage.add("a", behaviour=in_proportion(1.0, 100), limits={"requests_per_minute": 20, "concurrency": 4})
    stage.knows("a", 1.0, size=100)
    return stage


def test_several_windows_begin_with_short_jobs(rated):
    sizes = [100 + number for number in range(45)]
    played = rated.play(sizes)
    order = sizes_at(rated, "a")
    assert played.all_scored
    # Five jobs overflow two windows of 20: (at least) so many short ones go first, and so many of the shortest last.
    assert max(order[:5]) < 130 < min(order[6:14])
    assert max(order[-5:]) < 110


def test_one_window_begins_with_the_longest(rated):
    sizes = [100 + number for number in range(20)]
    rated.play(sizes)
    assert sizes_at(rated, "a") == sizes[::-1]


def test_sources_of_unlike_speed_begin_with_the_longest(rated):
    rated.add("slow", behaviour=in_proportion(9.0, 100), limits={"requests_per_minute": 20, "concurrency": 4})
    rated.knows("slow", 9.0, size=100)
    rated.play([100 + number for number in range(90)], deadline_s=900)
    assert sizes_at(rated, "a")[0] == 189


def test_jobs_of_unlike_judges_begin_with_the_longest(rated):
    from dataclasses import replace

    rated.add("b", behaviour=in_proportion(1.0, 100), limits={"requests_per_minute": 20, "concurrency": 4})
    rated.knows("b", 1.0, size=100)
    only = replace(rated.judge, sources=("a",))

    async def main():
        dispatcher = rated.dispatcher()
        judges = [only if number % 2 else rated.judge for number in range(110)]
        batch = dispatcher.batches.new([])
        futures = [
            dispatcher.score(rated.sample(100 + number), judge, deadline_s=900, batch=batch)
            for number, judge in enumerate(judges)
        ]
        await asyncio.gather(*futures)
        await dispatcher.aclose()

    run(main())
    assert {sent.size for sent in rated.sent[:2]} == {208, 209}
