"""Budgets that processes share by the keeper, in virtual time: engines that spend from the same dollars."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from office import Office, samples

from qreward_plugins import RewardEngine
from qreward_plugins.sharing.keeper import HOLD_S, TTL_S
from qreward_plugins.simulation import SimulatedSource, run
from tests.kit import scored_text

COST = 0.01


@pytest.fixture(autouse=True)
def one_run(monkeypatch):
    """All engines of a test are of one run."""
    monkeypatch.setenv("QREWARD_RUN_ID", "a-run")


class Spending:
    """A source that says what it cost so far, and when."""

    def __init__(self, seconds=1.0):
        self.sent = []
        self.source = SimulatedSource("a", behaviour=self._note, answer=scored_text, model="m")
        self._seconds = seconds

    def _note(self, number, request, now):
        self.sent.append(now)
        return self._seconds(number) if callable(self._seconds) else self._seconds

    @property
    def usd(self):
        return COST * len(self.sent)


def an_engine(office, spending, budget, *, of_run=False, price=None):
    node = {"kind": "openai", "base_url": "http://localhost", "model": "m", "price": price or {"per_request": COST}}
    engine = {"seed": 7, "deadline_s": 600.0}
    (engine if of_run else node)["budget"] = budget
    tree = {"sources": {"a": node}, "judges": {"quality": {"kind": "llm"}}, "engine": engine}
    return RewardEngine(tree, sources={"a": spending.source}, channel=office.line())


def scored(outcomes):
    assert {outcome.failure and outcome.failure.label for outcome in outcomes} <= {None, "infra/budget"}
    return sum(outcome.reward is not None for outcome in outcomes)


@pytest.mark.parametrize("of_run", [False, True], ids=["source", "run"])
def test_eight_processes_spend_no_more_than_the_budget_and_all_of_it(of_run):
    """Their shares of the work are not those of the money: one has most of the samples, and some have none at first."""

    async def main():
        office, spending = Office(), Spending()
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(an_engine(office, spending, {"usd": 5}, of_run=of_run))
                for _ in range(8)
            ]
            counts = [600, 100, 50, 50, 0, 0, 0, 0]
            first = [
                engine.score_all(samples(count, 1000 * n))
                for n, (engine, count) in enumerate(zip(engines, counts, strict=True))
                if count
            ]
            outcomes = [outcome for batch in await asyncio.gather(*first) for outcome in batch]
            assert scored(outcomes) == 500
            began = asyncio.get_running_loop().time()
            late = await asyncio.gather(*(engine.score_all(samples(5, 9000)) for engine in engines[4:]))
            assert sum(map(scored, late)) == 0
            assert asyncio.get_running_loop().time() - began < 10.0
            await asyncio.sleep(HOLD_S)
            left = [engine.statistics().sources["a"].budget_left_usd for engine in engines]
            assert left == [pytest.approx(0.0, abs=1e-6)] * 8
        assert spending.usd == pytest.approx(5.0)

    run(main())


def test_what_processes_have_spent_stays_spent_when_they_leave_or_die_and_a_run_ends_with_the_last():
    async def main():
        office, spending = Office(), Spending()
        async with an_engine(office, spending, {"usd": 1}) as lasting:
            assert scored(await lasting.score_all(samples(1, 99))) == 1
            async with an_engine(office, spending, {"usd": 1}) as leaves:
                assert scored(await leaves.score_all(samples(40))) == 40
            dies = an_engine(office, spending, {"usd": 1})
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
        async with an_engine(office, spending, {"usd": 1}) as next_run:
            assert scored(await next_run.score_all(samples(120, 400))) == 100

    run(main())


def test_an_hour_is_any_hour_of_all_processes():
    async def main():
        office, spending = Office(), Spending()
        async with an_engine(office, spending, {"usd": 0.5, "per": "hour"}) as one:
            async with an_engine(office, spending, {"usd": 0.5, "per": "hour"}) as other:
                assert (
                    sum(map(scored, await asyncio.gather(one.score_all(samples(40)), other.score_all(samples(40, 50)))))
                    == 50
                )
            await asyncio.sleep(1800.0)
            assert scored(await one.score_all(samples(5, 100))) == 0
            await asyncio.sleep(1900.0)
            assert scored(await one.score_all(samples(60, 200))) == 50

    run(main())


def test_what_is_set_aside_elsewhere_is_not_spent():
    """Each attempt may cost more than half a dollar, and costs two cents."""

    async def main():
        office, spending = Office(), Spending()
        price = {"output_per_million": 1000.0}
        async with (
            an_engine(office, spending, {"usd": 1.2}, price=price) as one,
            an_engine(office, spending, {"usd": 1.2}, price=price) as other,
        ):
            both = await asyncio.gather(one.score_all(samples(10)), other.score_all(samples(10, 50)))
            assert sum(map(scored, both)) == 20

    run(main())
