"""Budgets that processes share by the keeper, in virtual time: engines that spend from the same dollars."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from office import Office, now, samples

from qreward_plugins import RewardEngine
from qreward_plugins.sharing.keeper import HOLD_S, TTL_S
from qreward_plugins.simulation import SimulatedSource, run
from tests.kit import make_config, scored_text

COST = 0.01


@pytest.fixture(autouse=True)
def one_run(monkeypatch):
    """All engines of a test are of one run."""
    monkeypatch.setenv("QREWARD_RUN_ID", "a-run")


def a_source():
    return SimulatedSource("a", behaviour=lambda *_: 1.0, answer=scored_text, model="m")


def an_engine(office, source, usd, *, of_run=False, price=None, **budget):
    node, engine = {"price": price or {"per_request": COST}}, {"deadline_s": 600.0}
    (engine if of_run else node)["budget"] = {"usd": usd, **budget}
    tree = make_config("a", source=node, engine=engine)
    return RewardEngine(tree, sources={"a": source}, channel=office)


def scored(outcomes):
    assert {outcome.failure and outcome.failure.label for outcome in outcomes} <= {None, "infra/budget"}
    return sum(outcome.reward is not None for outcome in outcomes)


@pytest.mark.parametrize("of_run", [False, True], ids=["source", "run"])
def test_eight_processes_spend_no_more_than_the_budget_and_all_of_it(of_run):
    """Their shares of the work are not those of the money: one has most of the samples, and some have none at first."""

    async def main():
        office, source = Office(), a_source()
        async with AsyncExitStack() as stack:
            made = [an_engine(office, source, 5, of_run=of_run) for _ in range(8)]
            engines = [await stack.enter_async_context(engine) for engine in made]
            counts = [600, 100, 50, 50, 0, 0, 0, 0]
            batches = [samples(count, 1000 * n) for n, count in enumerate(counts)]
            first = [engine.score_all(batch) for engine, batch in zip(engines, batches, strict=True) if batch]
            assert sum(map(scored, await asyncio.gather(*first))) == 500
            began = now()
            late = await asyncio.gather(*(engine.score_all(samples(5, 9000)) for engine in engines[4:]))
            assert sum(map(scored, late)) == 0
            assert now() - began < 10.0
            await asyncio.sleep(HOLD_S)
            left = [engine.statistics().sources["a"].budget_left_usd for engine in engines]
            assert left == [pytest.approx(0.0, abs=1e-6)] * 8
        assert len(source.arrivals) * COST == pytest.approx(5.0)

    run(main())


def test_what_processes_have_spent_stays_spent_when_they_leave_or_die_and_a_run_ends_with_the_last():
    async def main():
        office, source = Office(), a_source()
        async with an_engine(office, source, 1) as lasting:
            assert scored(await lasting.score_all(samples(1, 99))) == 1
            async with an_engine(office, source, 1) as leaves:
                assert scored(await leaves.score_all(samples(40))) == 40
            dies = an_engine(office, source, 1)
            assert scored(await dies.score_all(samples(20, 100))) == 20
            dies._lifetime.membership._task.cancel()  # as a process that was killed: it reports no more
            await asyncio.sleep(3 * TTL_S)
            own = 1 + scored(await lasting.score_all(samples(100, 200)))
            assert own <= 40
            office.replace()  # the keeper dies, too: who lives tells the next one what it has spent itself
            await asyncio.sleep(4 * TTL_S)
            assert scored(await lasting.score_all(samples(120, 300))) == 100 - own
        await dies._lifetime.dispatcher.aclose()
        await asyncio.sleep(TTL_S)
        async with an_engine(office, source, 1) as next_run:
            assert scored(await next_run.score_all(samples(120, 400))) == 100

    run(main())


def test_what_is_set_aside_elsewhere_is_not_spent():
    """Each attempt may cost more than half a dollar, and costs two cents."""

    async def main():
        office, source = Office(), a_source()
        price = {"output_per_million": 1000.0}
        async with (
            an_engine(office, source, 1.2, price=price) as one,
            an_engine(office, source, 1.2, price=price) as other,
        ):
            both = await asyncio.gather(one.score_all(samples(10)), other.score_all(samples(10, 50)))
            assert sum(map(scored, both)) == 20

    run(main())
