"""An engine's way with its keeper, in virtual time: the real keeper behind a line that does what a test tells it."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest
from office import MARGIN, WINDOW_S, Office, a_source, an_engine, limits, samples

from qreward_plugins import Scored
from qreward_plugins.errors import Throttled, TransientError
from qreward_plugins.sharing.keeper import HOLD_S, MARGIN_S, TTL_S
from qreward_plugins.sharing.membership import (
    ANSWERED_WITHIN_S,
    LAST_REPORT_WITHIN_S,
    LONGEST_BACKOFF_S,
    REPORT_EVERY_S,
    SILENT_AFTER_S,
)
from qreward_plugins.simulation import VirtualTimeLoop, run

SOON_S = 2 * REPORT_EVERY_S


async def until(moment):
    await asyncio.sleep(moment - asyncio.get_running_loop().time())


async def comes(something):
    for _ in range(10_000):
        if something():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come")


async def stop(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def in_any_window(arrivals, window_s=WINDOW_S):
    return max(sum(at <= other < at + window_s for other in arrivals) for at in arrivals)


# Reports


def test_a_busy_worker_asks_at_most_four_times_a_second():
    async def main():
        office, source = Office(), a_source(requests_per_window=20)
        async with (
            an_engine(office, source, limits(20)) as busy,
            an_engine(office, source, limits(20)) as other,
        ):
            scoring = asyncio.gather(busy.score_all(samples(60)), other.score_all(samples(40, 60)))
            outcomes = [outcome for batch in await scoring for outcome in batch]
            assert all(isinstance(outcome, Scored) for outcome in outcomes)
            for engine in (busy, other):
                times = [at for at, _ in office.sent_by(engine)]
                assert all(later - at >= REPORT_EVERY_S - 1e-9 for at, later in itertools.pairwise(times))
                assert len(times) < 4 * times[-1]
        assert source.violations == []

    run(main())


def test_a_report_is_replaced_at_once_when_work_waits_that_the_keeper_does_not_know_of():
    async def main():
        office, source = Office(), a_source(requests_per_window=10)
        async with an_engine(office, source, limits(10)) as busy, an_engine(office, source, limits(10)) as idle:
            await asyncio.gather(busy.score_all(samples(1)), idle.score_all(samples(1, 1)))
            share = busy.upstreams["a"].quota.share["requests"]
            await until(20.0 + HOLD_S / 2)  # in the middle of a report that is held
            began, asked = 20.0 + HOLD_S / 2, len(office.sent_by(busy))
            assert share < 10
            outcomes = await busy.score_all(samples(9, 10))
            assert all(isinstance(outcome, Scored) for outcome in outcomes)
            times = [at for at, _ in office.sent_by(busy)][asked:]
            assert times[0] - began <= REPORT_EVERY_S + 1e-9
            # The idle one was asked for what it does not need, and gave it at once.
            sent = [at for at in source.arrivals if at >= began]
            assert len(sent) == 9
            assert max(sent) - began < SOON_S
        assert source.violations == []

    run(main())


# A keeper that is gone


def test_while_the_keeper_is_certainly_gone_its_shares_are_kept_and_nothing_more():
    async def main():
        office, source = Office(), a_source()
        async with an_engine(office, source, limits(20)) as one, an_engine(office, source, limits(20)) as other:
            await asyncio.gather(one.score_all(samples(1)), other.score_all(samples(1, 1)))
            await until(15.0)
            share = one.upstreams["a"].quota.share["requests"]
            assert 0 < share < 20
            office.mode = "lost"
            scoring = asyncio.ensure_future(one.score_all(samples(200, 10)))
            await until(15.0 + 10 * WINDOW_S)
            assert one.upstreams["a"].quota.share["requests"] == share
            sent = [at for at in source.arrivals if at >= 15.0]
            assert in_any_window(sent) == share
            assert len(sent) >= 9 * share
            await stop(scoring)

    run(main())


# A keeper that does not answer


@pytest.mark.parametrize("mode", ["silent", "unavailable", "broken"])
def test_shares_end_when_the_keeper_is_silent_for_their_time_to_live(caplog, mode):
    async def main():
        office, source = Office(), a_source()
        async with an_engine(office, source, limits(50)) as engine:
            await engine.score_all(samples(1))
            scoring = asyncio.ensure_future(engine.score_all(samples(1000, 1)))
            await until(10 * WINDOW_S)
            office.mode = mode
            answered = max(at for at, _ in office.reports)
            silent_at = asyncio.get_running_loop().time()
            await until(silent_at + 2.5 * TTL_S)
            assert silent_at < max(source.arrivals) + WINDOW_S
            assert max(source.arrivals) < answered + TTL_S
            assert max(source.arrivals) > answered + TTL_S - WINDOW_S - MARGIN - 0.01
            assert "requests to sources with limits stop" in caplog.text
            office.mode = "well"
            await asyncio.sleep(ANSWERED_WITHIN_S + LONGEST_BACKOFF_S + WINDOW_S)
            assert max(source.arrivals) > silent_at + 2.5 * TTL_S
            await stop(scoring)

    caplog.set_level(logging.INFO)
    run(main())


def test_what_was_not_sent_is_called_back_when_the_shares_end():
    async def main():
        office, source = Office(), a_source(behaviour=lambda number, request, now: 40.0)
        async with an_engine(office, source, limits(10)) as engine:
            scoring = [asyncio.ensure_future(engine.score(sample)) for sample in samples(3)]
            await until(HOLD_S)
            source.gate = asyncio.Event()
            scoring += [asyncio.ensure_future(engine.score(sample)) for sample in samples(2, 3)]
            await asyncio.sleep(SOON_S)
            assert engine.upstreams["a"].quota.in_flight == 5
            office.mode = "silent"
            await asyncio.sleep(TTL_S + 0.1)
            # Three are under way, which counts for nobody any more; two waited for a connection, and wait in the queue.
            assert (len(source.arrivals), source.in_flight, engine.upstreams["a"].quota.in_flight) == (3, 3, 3)
            assert engine.statistics().waiting == 2
            source.gate.set()
            await asyncio.sleep(10.0)
            assert len(source.arrivals) == 3
            office.mode = "well"
            assert all(isinstance(outcome, Scored) for outcome in await asyncio.gather(*scoring))
            assert len(source.arrivals) == 5

    run(main())


# Ending a keeper


@pytest.mark.parametrize("mode", ["silent", "unavailable"])
def test_a_keeper_that_stays_silent_is_ended(mode):
    async def main():
        office, source = Office(), a_source()
        async with an_engine(office, source, limits(50)) as engine:
            await engine.score_all(samples(1))
            office.mode = mode
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(SILENT_AFTER_S - LONGEST_BACKOFF_S)
            assert office.ended == 0
            await comes(lambda: office.ended)
            assert asyncio.get_running_loop().time() - began < SILENT_AFTER_S + HOLD_S + ANSWERED_WITHIN_S + 3.0
            await asyncio.sleep(SILENT_AFTER_S / 2)
            assert office.ended == 1

    run(main())


def test_a_keeper_that_is_only_slow_is_heard_and_not_ended():
    async def main():
        # An answer takes longer than the first report is given, and comes before it would be void.
        office, source = Office(), a_source()
        async with an_engine(office, source, limits(50)) as engine:
            await engine.score_all(samples(1))
            office.delay_s = (ANSWERED_WITHIN_S + 1.0) / 2
            await asyncio.sleep(2 * SILENT_AFTER_S)
            outcomes = await engine.score_all(samples(120, 1))
            assert all(isinstance(outcome, Scored) for outcome in outcomes)
            assert office.ended == 0
        assert source.violations == []

    run(main())


def test_whoever_did_not_run_for_a_minute_does_not_end_the_keeper():
    async def main():
        office, source = Office(delay_s=0.01), a_source()
        async with an_engine(office, source, limits(50)) as engine:
            await engine.score_all(samples(1))
            loop = asyncio.get_running_loop()
            for _ in range(10):
                await asyncio.sleep(1.7)
                loop._now += 60.0
                await asyncio.sleep(0.3)
            await asyncio.sleep(HOLD_S)
            assert office.ended == 0
            assert engine.upstreams["a"].quota.share["requests"] == 50

    run(main())


# News


def test_what_one_is_told_by_a_source_all_know():
    async def main():
        office = Office()
        paused = {"until": None}

        def behave(number, request, now):
            if now >= 5.0 and now < (paused["until"] or 5.1):
                paused["until"] = now + 8.0
                return Throttled("slow down", status=429, retry_after_s=8.0)
            return 0.2

        source = a_source(behaviour=behave)
        async with an_engine(office, source, limits(100)) as one, an_engine(office, source, limits(100)) as other:
            await asyncio.gather(one.score_all(samples(1)), other.score_all(samples(1, 1)))
            await until(5.0)
            first = asyncio.ensure_future(one.score_all(samples(2, 2)))  # one 429 may be due to its own sample
            await asyncio.sleep(1.0)
            assert other.upstreams["a"].pauses.left_s(6.0) > 6.5
            began = asyncio.get_running_loop().time()
            assert isinstance(await other.score(samples(1, 4)[0]), Scored)
            assert all(isinstance(outcome, Scored) for outcome in await first)
            assert all(not began <= at < paused["until"] for at in source.arrivals)
            assert min(at for at in source.arrivals if at > began) < paused["until"] + 0.5

    run(main())


def test_a_rest_and_its_end_are_everybody_s():
    async def main():
        office = Office()
        broken = {"is": False}

        def behave(number, request, now):
            return TransientError("no", status=500) if broken["is"] else 0.2

        source = a_source(behaviour=behave)
        async with an_engine(office, source, limits(100)) as one, an_engine(office, source, limits(100)) as other:
            await asyncio.gather(one.score_all(samples(20)), other.score_all(samples(20, 20)))
            broken["is"] = True
            scoring = asyncio.ensure_future(one.score_all(samples(10, 50)))
            await comes(lambda: not one.upstreams["a"].breaker.closed)
            await asyncio.sleep(SOON_S)
            now = asyncio.get_running_loop().time()
            assert other.upstreams["a"].state(now) == "down"
            # Its circuit is still open after the other's probes have failed a few times; then the other's succeeds.
            await asyncio.sleep(20.0)
            broken["is"] = False
            assert all(isinstance(outcome, Scored) for outcome in await scoring)
            await asyncio.sleep(SOON_S)
            outcome = await other.score(samples(1, 99)[0])
            assert isinstance(outcome, Scored)
            assert outcome.verdict.attempts == 1

    run(main())


# Ends, and beginnings


def test_what_a_closed_engine_had_is_the_others_at_once():
    async def main():
        office, source = Office(), a_source(requests_per_window=10)
        staying = an_engine(office, source, limits(10))
        async with staying:
            async with an_engine(office, source, limits(10)) as leaving:
                await asyncio.gather(leaving.score_all(samples(1)), staying.score_all(samples(1, 1)))
                await comes(lambda: leaving.upstreams["a"].quota.share["requests"] >= 4)
            began = asyncio.get_running_loop().time()
            assert (await office.actor.statistics())["workers"] == 1
            outcomes = await staying.score_all(samples(8, 2))
            assert all(isinstance(outcome, Scored) for outcome in outcomes)
            assert max(source.arrivals) - began < SOON_S
        assert source.violations == []
        assert (await office.actor.statistics())["workers"] == 0

    run(main())


@pytest.mark.parametrize("mode", ["silent", "lost", "unavailable"])
def test_leaving_takes_a_second_at_most_and_leaves_no_task(mode):
    async def main():
        office, source = Office(), a_source()
        engine = an_engine(office, source, limits(10))
        await engine.score_all(samples(1))
        office.mode = mode
        began = asyncio.get_running_loop().time()
        await engine.aclose()
        assert asyncio.get_running_loop().time() - began <= LAST_REPORT_WITHIN_S
        assert office.reports[-1][1].leaves
        others = asyncio.all_tasks() - {asyncio.current_task()}
        # What is still in the office is none of its business.
        assert [task for task in others if "Line._deliver" not in repr(task.get_coro())] == []

    run(main())


def test_an_engine_goes_on_with_its_shares_in_the_next_loop():
    office, source = Office(), a_source(requests_per_window=10)
    engine = an_engine(office, source, limits(10))
    first = VirtualTimeLoop()

    async def before():
        outcomes = await engine.score_all(samples(6))
        assert all(isinstance(outcome, Scored) for outcome in outcomes)

    async def after():
        assert [at for at in source.arrivals if at > 1.0] == []
        outcomes = await engine.score_all(samples(10, 6))
        assert all(isinstance(outcome, Scored) for outcome in outcomes)
        await engine.aclose()

    run(before(), loop=first)
    member = engine._lifetime.membership.member
    # The keeper outlives the loop; here it is told that one was before it, which is as strict.
    office.replace()
    second = VirtualTimeLoop()
    second._now = first.time() + 1.0
    run(after(), loop=second)
    assert engine._lifetime.membership.member is member
    assert source.violations == []
    assert len(source.arrivals) == 16


assert MARGIN_S > MARGIN
