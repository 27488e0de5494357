"""The forecast: when everything will be done, what a source is expected to take, and who has to wait how long."""

from __future__ import annotations

import math

import pytest

from qreward_plugins.quotas.ledger import MARGIN_S
from qreward_plugins.scheduling import ReadyQueue
from qreward_plugins.scheduling.breaker import FAILURES_TO_OPEN
from qreward_plugins.scheduling.forecast import DEAD_WAIT_S, FIRST_GUESS_S, OPEN_WAIT_S, Forecast
from qreward_plugins.simulation import run


def forecast_of(stage, check, **options):
    """Run `check(forecast, queue)` in a virtual-time loop, at time 0."""

    async def main():
        queue = ReadyQueue()
        return check(Forecast(stage.upstreams, queue, **options), queue)

    return run(main())


def end_of(stage, sizes, *, source="a", now=0.0):
    """When `source` and who shares its work are expected to have done jobs of these sizes."""

    def check(forecast, queue):
        for size in sizes:
            stage.queued(queue, size)
        return forecast.end(stage.upstreams[source], now)

    return forecast_of(stage, check)


def test_an_unknown_source_is_expected_to_be_like_the_known_ones(stage):
    for name in "abc":
        stage.add(name)

    def check(forecast, queue):
        guess = forecast.expected_s(stage.upstreams["a"], 10)
        assert (guess, forecast.guesses) == (FIRST_GUESS_S, True)
        stage.knows("b", 2.0)
        stage.knows("c", 6.0)
        assert forecast.expected_s(stage.upstreams["a"], 10) == pytest.approx(4.0)
        assert forecast.expected_s(stage.upstreams["a"], 20) == pytest.approx(8.0)
        assert forecast.expected_s(stage.upstreams["b"], 10) == pytest.approx(2.0)
        assert not forecast.guesses

    forecast_of(stage, check)


def test_what_is_expected_of_a_young_attempt_is_corrected_as_more_is_learned(stage):
    stage.add("a")
    stage.add("b")

    def check(forecast, queue):
        young = stage.attempt(stage.job(), "a", started_at=0.0, expected_s=FIRST_GUESS_S, uncalibrated=True)
        settled = stage.attempt(stage.job(), "a", started_at=0.0, expected_s=FIRST_GUESS_S)
        stage.knows("b", 0.5)
        for attempt in (young, settled):
            forecast.update(attempt)
        assert (young.expected_s, settled.expected_s) == (pytest.approx(0.5), FIRST_GUESS_S)

    forecast_of(stage, check)


def test_concurrency_and_speed_bound_the_end(stage):
    stage.add("a", limits={"concurrency": 10})
    stage.knows("a", 2.0)
    assert end_of(stage, [10] * 200) == pytest.approx(40, rel=0.1)
    assert end_of(stage, [10] * 200, now=100.0) == pytest.approx(140, rel=0.1)


def test_windows_bound_the_end(stage):
    stage.add("a", limits={"requests_per_minute": 60, "concurrency": 500})
    stage.knows("a", 2.0)
    assert end_of(stage, [10] * 60) < 10
    # The last one begins with the second window, or the third one, and takes 2 s.
    assert end_of(stage, [10] * 61) == pytest.approx(62 + MARGIN_S, abs=0.3)
    assert end_of(stage, [10] * 150) == pytest.approx(2 * (60 + MARGIN_S) + 2, abs=0.3)


def test_tokens_bound_the_end(stage):
    stage.add("a", limits={"tokens_per_minute": 1000, "concurrency": 500})
    stage.knows("a", 2.0, size=300)
    # 300 bytes are about 100 tokens.
    assert end_of(stage, [300] * 8) < 10
    assert end_of(stage, [300] * 25) > 120


def test_sources_share_the_work(stage):
    stage.add("a", limits={"concurrency": 10})
    stage.knows("a", 2.0)
    stage.add("b", limits={"concurrency": 30})
    stage.knows("b", 2.0)
    assert end_of(stage, [10] * 200) == pytest.approx(10, rel=0.25)


def test_it_is_not_earlier_than_the_longest_job_can_be(stage):
    for name in "ab":
        stage.add(name, limits={"concurrency": 50})
        stage.knows(name, 1.0 if name == "a" else 3.0)
    assert end_of(stage, [10] * 5 + [400]) == pytest.approx(40, rel=0.05)


def test_what_is_under_way_counts(stage):
    stage.add("a", limits={"concurrency": 4})
    stage.knows("a", 1.0)

    def check(forecast, queue):
        stage.attempt(stage.job(), "a", started_at=0.0, expected_s=33.0)
        stage.queued(queue, 10)
        assert forecast.end(stage.upstreams["a"], 1.0) == pytest.approx(33.0, rel=0.05)

    forecast_of(stage, check)


def test_sources_that_are_out_or_rest_take_no_part(stage):
    for name in "ab":
        stage.add(name, limits={"concurrency": 10})
        stage.knows(name, 2.0)
    together = end_of(stage, [10] * 200)
    stage.upstreams["b"].breaker.trip(0.0)
    open_for_a_while = end_of(stage, [10] * 200)
    assert open_for_a_while == pytest.approx(2 * together, rel=0.15)
    stage.upstreams["b"].breaker.succeeded()
    stage.upstreams["b"].health.mark_unusable("its key was refused", 0.0)
    assert end_of(stage, [10] * 200) == pytest.approx(open_for_a_while, rel=0.05)


def test_work_that_is_not_shared_ends_on_its_own(stage):
    for name in "abc":
        stage.add(name, limits={"concurrency": 1})
        stage.knows(name, 1.0)

    def check(forecast, queue):
        for sources, jobs in (("a", 50), ("bc", 20), ("c", 10)):
            for _ in range(jobs):
                stage.queued(queue, 10, sources=sources)
        ends = [forecast.end(stage.upstreams[name], 0.0) for name in "abc"]
        assert ends[0] == pytest.approx(50, rel=0.1)
        assert ends[1] == ends[2] == pytest.approx(15, rel=0.2)

    forecast_of(stage, check)


def test_it_notices_when_the_queue_grew(stage):
    stage.add("a", limits={"concurrency": 1})
    stage.knows("a", 1.0)

    def check(forecast, queue):
        for _ in range(10):
            stage.queued(queue, 10)
        before = forecast.end(stage.upstreams["a"], 0.0)
        for _ in range(90):
            stage.queued(queue, 10)
        assert forecast.end(stage.upstreams["a"], 0.0) > 5 * before
        assert forecast.end(stage.upstreams["a"], 1.0) == pytest.approx(101, rel=0.1)

    forecast_of(stage, check)


@pytest.mark.parametrize("known", [True, False])
def test_who_is_full_is_not_free_now(stage, known):
    stage.add("a", limits={"concurrency": 1})
    stage.add("b")

    def check(forecast, queue):
        job = stage.job()
        if known:
            stage.knows("a", 4.0)
        assert forecast.wait_s(stage.upstreams["a"], job, 0.0) == 0.0
        stage.attempt(stage.job(), "a", started_at=0.0, expected_s=4.0)
        assert forecast.wait_s(stage.upstreams["a"], job, 0.0) > 0.5

    forecast_of(stage, check)


def test_waits_of_sources_that_will_not_answer_soon(stage):
    for name in "abcd":
        stage.add(name, limits={"requests_per_minute": 1})
    upstreams = stage.upstreams
    upstreams["a"].health.mark_unusable("its key was refused", 0.0)
    upstreams["b"].breaker.trip(0.0)
    upstreams["b"].breaker.started()
    for _ in range(FAILURES_TO_OPEN - 1):
        upstreams["c"].health.failed(0.0, probe=False)

    def check(forecast, queue):
        job = stage.job()
        waits = [forecast.wait_s(upstreams[name], job, 0.0) for name in "abc"]
        assert waits == [math.inf, OPEN_WAIT_S, DEAD_WAIT_S]
        upstreams["d"].reserve(job.request, 0.0).sent(0.0)
        assert forecast.wait_s(upstreams["d"], job, 10.0) == pytest.approx(50.0, abs=1.0)

    forecast_of(stage, check)


def test_only_the_cheapest_that_end_in_half_of_the_time_are_used(stage):
    for name, price in (("dear", 3.0), ("cheap", 1.0), ("middling", 2.0)):
        stage.add(name, price=price, limits={"concurrency": 1})
        stage.knows(name, 1.0)

    def unneeded(jobs, deadline_s, prefer_cost=True):
        def check(forecast, queue):
            for _ in range(jobs):
                stage.queued(queue, 10, deadline_s=deadline_s)
            return {name for name, upstream in stage.upstreams.items() if forecast.unneeded(upstream, 0.0)}

        return forecast_of(stage, check, prefer_cost=prefer_cost)

    assert unneeded(40, 100.0) == {"middling", "dear"}
    assert unneeded(80, 100.0) == {"dear"}
    assert unneeded(130, 100.0) == set()
    assert unneeded(40, 100.0, prefer_cost=False) == set()
