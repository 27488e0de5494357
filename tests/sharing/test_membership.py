"""An engine's way with its keeper, in virtual time: the real keeper behind a line that does what a test tells it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from contextlib import AsyncExitStack

import pytest

from qreward_plugins.errors import Throttled, TransientError
from qreward_plugins.sharing.division import Division, WaitingLine
from qreward_plugins.sharing.keeper import HOLD_S, MARGIN_S, TTL_S, Keeper
from qreward_plugins.sharing.membership import (
    ANSWERED_WITHIN_S,
    LAST_REPORT_WITHIN_S,
    LONGEST_BACKOFF_S,
    REPORT_EVERY_S,
    SILENT_AFTER_S,
)
from qreward_plugins.sharing.messages import Part, Report, SourceReport
from qreward_plugins.simulation import SimulatedSource
from tests.kit import comes, in_virtual_time, scored_text

from .office import MARGIN, WINDOW_S, Office, a_source, all_scored, an_engine, limits, now, samples, until

SOON_S = 2 * REPORT_EVERY_S


async def stop(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@in_virtual_time
async def test_a_busy_worker_asks_at_most_four_times_a_second():
    office, source = Office(), a_source(requests_per_window=20)
    async with an_engine(office, source, limits(20)) as busy, an_engine(office, source, limits(20)) as other:
        batches = await asyncio.gather(busy.score_all(samples(60)), other.score_all(samples(40, 60)))
        assert all(map(all_scored, batches))
        for engine in (busy, other):
            times = office.sent_by(engine)
            assert all(later - at >= REPORT_EVERY_S - 1e-9 for at, later in itertools.pairwise(times))
    assert source.violations == []


@pytest.mark.parametrize("mode", ["silent", "broken", "lost"])
@in_virtual_time
async def test_shares_end_when_the_keeper_is_away_for_their_time_to_live(caplog, mode):
    caplog.set_level(logging.INFO)
    office, source = Office(), a_source()
    async with an_engine(office, source, limits(50)) as engine:
        scoring = asyncio.ensure_future(engine.score_all(samples(1000, 1)))
        await until(3 * WINDOW_S)
        office.mode = mode
        answered, silent_at = max(at for at, _ in office.reports), now()
        await until(silent_at + 2.5 * TTL_S)
        assert answered + TTL_S - WINDOW_S - MARGIN - 0.01 < max(source.arrivals) < answered + TTL_S
        assert "requests to sources with limits stop" in caplog.text
        assert office.ended == 0
        office.mode = "well"
        await asyncio.sleep(ANSWERED_WITHIN_S + LONGEST_BACKOFF_S + WINDOW_S)
        assert max(source.arrivals) > silent_at + 2.5 * TTL_S
        # A keeper that stays silent is ended.
        office.mode = mode
        await asyncio.sleep(SILENT_AFTER_S - LONGEST_BACKOFF_S - HOLD_S)
        assert office.ended == 0
        began = now()
        await comes(lambda: office.ended)
        assert now() - began < 2 * HOLD_S + ANSWERED_WITHIN_S + LONGEST_BACKOFF_S + 3.0
        await asyncio.sleep(SILENT_AFTER_S / 2)
        assert office.ended == 1
        await stop(scoring)


@in_virtual_time
async def test_a_process_that_was_stopped_writes_nothing_under_a_share_that_has_ended():
    """What it was about to write is sent again, under the next share."""

    class Connecting(SimulatedSource):
        """A source that connects first, and says that it writes before it does."""

        async def send(self, request, *, on_sent):
            await connected.wait()
            on_sent()
            return await super().send(request, on_sent=lambda: None)

    connected = asyncio.Event()

    loop = asyncio.get_running_loop()
    office, source = Office(), Connecting("a", requests_per_window=10, window_s=10.0, answer=scored_text)
    async with an_engine(office, source, limits(10)) as engine:
        scoring = asyncio.ensure_future(engine.score_all(samples(4)))
        await comes(lambda: len(engine.upstreams["a"].live) == 4)
        connected.set()  # the next step of each attempt is to write
        loop._now += 3 * TTL_S  # and the process is stopped before that step
        outcomes = await scoring
        assert all_scored(outcomes)
        assert [outcome.verdict.attempts for outcome in outcomes] == [2, 2, 2, 2]
    assert len(source.arrivals) == 4  # none of the first attempts was written
    assert source.violations == []
    assert engine.statistics().sources["a"].transient == 0  # and nothing is held against anybody


@pytest.mark.parametrize("who", ["the keeper is slow", "the worker was stopped"])
@in_virtual_time
async def test_a_keeper_that_lives_is_heard_and_not_ended(who):
    """An answer takes longer than the first report is given, and comes before it would be void; or the worker did not
    run for a minute, ten times.
    """

    office, source = Office(delay_s=0.01), a_source()
    async with an_engine(office, source, limits(50)) as engine:
        await engine.score_all(samples(1))
        if who == "the keeper is slow":
            office.delay_s = (ANSWERED_WITHIN_S + 1.0) / 2
            await asyncio.sleep(2 * SILENT_AFTER_S)
        else:
            for _ in range(10):
                await asyncio.sleep(1.7)
                asyncio.get_running_loop()._now += 60.0
                await asyncio.sleep(0.3)
            await asyncio.sleep(HOLD_S)
        assert all_scored(await engine.score_all(samples(120, 1)))
        assert office.ended == 0
    assert source.violations == []


@in_virtual_time
async def test_what_one_is_told_by_a_source_all_know():
    office, pause = Office(), [5.0, 5.1]

    def behave(number, request, at):
        if pause[0] <= at < pause[1]:
            pause[1] = at + 8.0
            return Throttled("slow down", status=429, retry_after_s=8.0)
        return 0.2

    source = a_source(behaviour=behave)
    async with an_engine(office, source, limits(100)) as one, an_engine(office, source, limits(100)) as other:
        await asyncio.gather(one.score_all(samples(1)), other.score_all(samples(1, 1)))
        await until(5.0)
        first = asyncio.ensure_future(one.score_all(samples(2, 2)))  # one 429 may be due to its own sample
        await asyncio.sleep(1.0)
        assert other.upstreams["a"].pauses.left_s(6.0) > 6.5
        began = now()
        assert all_scored([*await other.score_all(samples(1, 4)), *await first])
        assert pause[1] <= min(at for at in source.arrivals if at >= began) < pause[1] + 0.5


@in_virtual_time
async def test_an_open_circuit_and_its_end_are_everybody_s():
    office, broken = Office(), False
    source = a_source(behaviour=lambda *_: TransientError("no", status=500) if broken else 0.2)
    async with an_engine(office, source, limits(100)) as one, an_engine(office, source, limits(100)) as other:
        await asyncio.gather(one.score_all(samples(20)), other.score_all(samples(20, 20)))
        broken = True
        scoring = asyncio.ensure_future(one.score_all(samples(10, 50)))
        await comes(lambda: not one.upstreams["a"].breaker.closed)
        await asyncio.sleep(SOON_S)
        assert other.upstreams["a"].state(now()) == "down"
        # It is still open after probes have failed a few times; then one succeeds.
        await asyncio.sleep(20.0)
        broken = False
        assert all_scored(await scoring)
        await asyncio.sleep(SOON_S)
        (outcome,) = await other.score_all(samples(1, 99))
        assert outcome.verdict.attempts == 1


@in_virtual_time
async def test_answers_to_older_requests_end_no_outage_elsewhere():
    """They would make all processes probe at once, again and again."""
    rng, office = random.Random(1), Office(delay_s=0.002)

    def behave(number, request, at):
        fails = 6.0 <= at < 126.0 and rng.random() < 0.9
        return TransientError("no", status=503) if fails else 4.0 * rng.uniform(0.6, 1.4)

    source = a_source(behaviour=behave)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(an_engine(office, source, {"concurrency": 32}, deadline_s=900.0))
            for _ in range(8)
        ]
        every = [engine.score_all(samples(40, 1000 * number)) for number, engine in enumerate(engines)]
        assert all(all_scored(outcomes) for outcomes in await asyncio.gather(*every))
    assert sum(6.0 <= at < 126.0 for at in source.arrivals) < 350


@in_virtual_time
async def test_what_a_closed_engine_had_is_the_others_at_once():
    office, source = Office(), a_source(requests_per_window=10)
    async with an_engine(office, source, limits(10)) as staying:
        async with an_engine(office, source, limits(10)) as leaving:
            await asyncio.gather(leaving.score_all(samples(1)), staying.score_all(samples(1, 1)))
            await comes(lambda: leaving.upstreams["a"].quota.share["requests"] >= 4)
        began = now()
        assert len(office.actor._keeper._reported_at) == 1
        assert all_scored(await staying.score_all(samples(8, 2)))
        assert max(source.arrivals) - began < SOON_S
    assert source.violations == []
    assert not office.actor._keeper._reported_at


@pytest.mark.parametrize("mode", ["silent", "lost", "unavailable"])
@in_virtual_time
async def test_leaving_takes_a_second_at_most_and_leaves_no_task(mode):
    office, source = Office(), a_source()
    engine = an_engine(office, source, limits(10))
    await engine.score_all(samples(1))
    office.mode = mode
    began = now()
    await engine.aclose()
    assert now() - began <= LAST_REPORT_WITHIN_S
    assert office.reports[-1][1].leaves
    others = asyncio.all_tasks() - {asyncio.current_task()}
    # What is still in the office is none of its business.
    assert [task for task in others if "Office._deliver" not in repr(task.get_coro())] == []


assert MARGIN_S > MARGIN


# The keeper: until when it charges what workers had, and who is served first


LIMIT, MINUTE_S = 100.0, 60.0


@in_virtual_time
async def test_it_charges_something_until_all_that_was_spent_has_left_the_window():
    """Only then may a machine's keeper end, and a first one follow it."""

    def report(worker, number, *, spent=(), more=0.0, leaves=False):
        said = SourceReport({"requests": (LIMIT, MINUTE_S)}, {"requests": Part(0.0, tuple(spent), more)})
        return asyncio.ensure_future(keeper.exchange(Report(worker, number, {"s": said}, leaves, number)))

    keeper = Keeper(first=True)
    assert keeper.charges_nothing(now())
    await report("a", 0, more=1000.0)
    assert not keeper.charges_nothing(now())
    assert await report("a", 1, leaves=True, spent=[(20.0, 60.0)]) is None
    await asyncio.sleep(19.9)
    assert not keeper.charges_nothing(now())
    await asyncio.sleep(0.1)
    assert keeper.charges_nothing(now())
    await report("silent", 0, more=1000.0)
    await asyncio.sleep(TTL_S + MARGIN_S + HOLD_S)
    assert not keeper._reported_at
    removed_at = now()
    await asyncio.sleep(MINUTE_S - HOLD_S - 0.1)
    assert not keeper.charges_nothing(now())
    await asyncio.sleep(removed_at + MINUTE_S - now())
    assert keeper.charges_nothing(now())


def test_nobody_overtakes_a_large_request():
    def line(*waiting):
        return WaitingLine(dict.fromkeys(waiting), ("small", "large"), ())

    division = Division(LIMIT, MINUTE_S)
    for worker, part in {"holder": Part(60.0), "small": Part(0.0, (), 5.0), "large": Part(0.0, (), 80.0, 80.0)}.items():
        division.report(worker, part, 0.0, limit=LIMIT, window_s=MINUTE_S)
    assert division.raise_shares(0.0, line("large", "small")) == []
    assert division.raise_shares(0.0, line("small", "large")) == ["small"]
