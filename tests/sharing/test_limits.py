"""What processes share by the keeper, in virtual time: limits, also undeclared ones and those that a reload changes,
and budgets.
"""

from __future__ import annotations

import asyncio
import bisect
import random
from contextlib import AsyncExitStack

import pytest

from qreward_plugins import RewardEngine
from qreward_plugins.sharing.keeper import HOLD_S, TTL_S
from qreward_plugins.simulation import Fault, Luck, Server, SimulatedServer, run
from tests.kit import in_virtual_time, make_config

from .office import MARGIN, WINDOW_S, Office, a_source, all_scored, an_engine, limits, now, samples, until

# How soon a batch ends: nothing may lie idle here while somebody waits there


SERVICE_S = 0.2
SLOWLY_S = 0.01
"""How long a message takes in the mean."""


@pytest.mark.parametrize(
    ("workers", "per_window", "window_s", "windows"), [(2, 60, 1.5, 8), (8, 300, 10.0, 3), (32, 300, 30.0, 3)]
)
@in_virtual_time
async def test_a_batch_of_many_workers_ends_soon_after_the_limit_lets_it(workers, per_window, window_s, windows):
    """It is as many samples as so many windows let pass, each for a worker drawn by lot."""

    office, rng, delays = Office(), random.Random(0), random.Random(0)
    office.delay = lambda: delays.expovariate(1 / SLOWLY_S)
    source = a_source(behaviour=lambda *_: SERVICE_S, window_s=window_s)
    declared = limits(per_window, window_s, concurrency=1024)
    engines = [an_engine(office, source, declared) for _ in range(workers)]
    await asyncio.gather(*(engine.score_all([]) for engine in engines))
    await asyncio.sleep(2.0)
    began = now()
    drawn = ((engines[rng.randrange(workers)], sample) for sample in samples(per_window * windows))
    assert all_scored(await asyncio.gather(*(engine.score(sample) for engine, sample in drawn)))
    # A report every quarter of a second.
    assert now() - began - (windows - 1) * (window_s + MARGIN) - SERVICE_S < 1.0
    times = sorted(source.arrivals)
    most = max(bisect.bisect_left(times, at + window_s) - first for first, at in enumerate(times))
    assert most == per_window
    await asyncio.gather(*(engine.aclose() for engine in engines))


# Limits that nobody declared, learned by several workers


PER_MINUTE = 240
WORKERS = 4


class Job:
    """Workers that have more to ask than the server allows."""

    def __init__(self, fields):
        fields = {"requests_per_minute": PER_MINUTE, "seconds_per_unit": 2.0, "declared": False, **fields}
        self.server = SimulatedServer(Server("a", **fields), Luck(7))
        self.office = Office(delay_s=0.001)
        self.engines = [an_engine(self.office, self.server, {}, deadline_s=36_000.0) for _ in range(WORKERS)]
        self.scoring = [
            asyncio.ensure_future(engine.score_all(samples(700, 1000 * number)))
            for number, engine in enumerate(self.engines)
        ]

    def rates(self, start, end):
        """Requests a minute that the server accepted, and how many it rejected."""
        rejected = sum(start <= at < end for at, _ in self.server.violations)
        arrived = sum(start <= at < end for at in self.server.arrivals)
        return (arrived - rejected) * 60 / (end - start), rejected

    def learned(self):
        """What the workers know, each once."""
        return {engine.upstreams["a"].quota.use(0.0).learned_requests_per_minute for engine in self.engines}

    async def kill(self, number):
        """End a worker as SIGKILL does: it says nothing more to anybody."""
        self.engines.pop(number)._lifetime.membership._task.cancel()
        self.scoring[number].cancel()
        await asyncio.gather(self.scoring[number], return_exceptions=True)

    async def end(self):
        for task in self.scoring:
            task.cancel()
        await asyncio.gather(*self.scoring, return_exceptions=True)
        for engine in self.engines:
            await engine.aclose()


def played(scenario, **fields):
    """Play a scenario with a job of a server with these fields."""

    async def main():
        job = Job(fields)
        await scenario(job)
        await job.end()

    run(main())


def test_all_workers_know_what_one_of_them_has_learned():
    """Also after a worker and the keeper were lost."""

    async def scenario(job):
        await until(58.0)
        assert job.learned() == {PER_MINUTE}
        await until(90.0)
        await job.kill(0)
        await until(150.0)
        job.office.mode = "lost"
        await until(152.0)
        job.office.replace()
        job.office.mode = "well"
        await until(360.0)
        assert job.learned() == {PER_MINUTE}
        assert job.rates(240.0, 360.0)[0] >= 0.9 * PER_MINUTE
        assert job.rates(90.0, 360.0)[1] <= 10

    played(scenario)


@pytest.mark.parametrize(
    "wrong",
    [{"faults": (Fault(2.0, 22.0, "throttle", 5.0),)}, {"announces": "wrong", "wrong_by": 0.1}],
    ids=["a storm that looks like a limit", "announced too low"],
)
def test_a_wrong_limit_is_refuted(wrong):
    async def scenario(job):
        await until(300.0)
        assert job.rates(180.0, 300.0)[0] >= 0.9 * PER_MINUTE

    played(scenario, **wrong)


# Reloads: each process reads the file at a time of its own, and the limits hold meanwhile


def play(reloads, *, per_window, declared, count=60):
    """Two engines over one source that allows `per_window`; `reloads` are (time, engine, keys of the source)."""

    async def main():
        office, source = Office(), a_source(requests_per_window=per_window)
        async with (
            an_engine(office, source, limits(declared)) as one,
            an_engine(office, source, limits(declared)) as two,
        ):
            scoring = asyncio.gather(one.score_all(samples(count)), two.score_all(samples(count, 1_000)))
            for moment, number, node in reloads:
                await until(moment)
                engine = (one, two)[number]
                tree = engine.config.model_dump(mode="json", exclude_defaults=True)
                tree["sources"]["a"] |= {"kind": "openai", **node}
                tree["judges"]["quality"]["kind"] = "llm"
                await engine.reload(tree)
            assert all(map(all_scored, await scoring))
        assert source.violations == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return now()

    return run(main())


def test_a_limit_that_rises_in_one_process_after_the_other():
    reloads = [(4.0, 0, {"limits": limits(20)}), (9.0, 1, {"limits": limits(20)})]
    # The server allows the higher limit only from then on, which is when both have confirmed it.
    assert play(reloads, per_window=20, declared=10) < 120 / 10 * WINDOW_S


def test_while_one_process_has_the_old_limit_the_lower_one_holds():
    # One process raises the limit to what the server does not allow together with the other's.
    play([(4.0, 0, {"limits": limits(40)})], per_window=10, declared=10)


def test_frequent_reloads_do_not_silence_the_keeper(caplog):
    """Each change of the sources is reported, and a new report voids the answer that the keeper still holds."""
    prices = [(4.0 + 2 * n, 0, {"price": {"per_request": n}}) for n in range(12)]
    play(prices, per_window=20, declared=20, count=120)
    assert "has not answered" not in caplog.text


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_is_opened_anew_keeps_its_window(workers):
    reloads = [(4.0 + worker / 2, worker, {"timeouts": {"connect_s": 3}}) for worker in range(workers)]
    play(reloads, per_window=20, declared=20)


# Budgets: engines that spend from the same dollars


COST = 0.01


@pytest.fixture(autouse=True)
def one_run(monkeypatch):
    """All engines of a test are of one run."""
    monkeypatch.setenv("QREWARD_RUN_ID", "a-run")


def a_spender(office, source, usd, *, of_run=False, price=None):
    node, engine = {"price": price or {"per_request": COST}}, {"deadline_s": 600.0}
    (engine if of_run else node)["budget"] = {"usd": usd}
    return RewardEngine(make_config("a", source=node, engine=engine), sources={"a": source}, channel=office)


def scored(outcomes):
    assert {outcome.failure and outcome.failure.label for outcome in outcomes} <= {None, "infra/budget"}
    return sum(outcome.reward is not None for outcome in outcomes)


@pytest.mark.parametrize("of_run", [False, True], ids=["source", "run"])
@in_virtual_time
async def test_eight_processes_spend_no_more_than_the_budget_and_all_of_it(of_run):
    """Their shares of the work are not those of the money: one has most of the samples, and some have none at first."""

    office, source = Office(), a_source(behaviour=lambda *_: 1.0)
    async with AsyncExitStack() as stack:
        made = [a_spender(office, source, 5, of_run=of_run) for _ in range(8)]
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


@in_virtual_time
async def test_what_processes_have_spent_stays_spent_when_they_leave_or_die_and_a_run_ends_with_the_last():
    office, source = Office(), a_source(behaviour=lambda *_: 1.0)
    async with a_spender(office, source, 1) as lasting:
        assert scored(await lasting.score_all(samples(1, 99))) == 1
        async with a_spender(office, source, 1) as leaves:
            assert scored(await leaves.score_all(samples(40))) == 40
        dies = a_spender(office, source, 1)
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
    async with a_spender(office, source, 1) as next_run:
        assert scored(await next_run.score_all(samples(120, 400))) == 100


@in_virtual_time
async def test_what_is_set_aside_elsewhere_is_not_spent():
    """Each attempt may cost more than half a dollar, and costs two cents."""

    office, source = Office(), a_source(behaviour=lambda *_: 1.0)
    price = {"output_per_million": 1000.0}
    async with (
        a_spender(office, source, 1.2, price=price) as one,
        a_spender(office, source, 1.2, price=price) as other,
    ):
        both = await asyncio.gather(one.score_all(samples(10)), other.score_all(samples(10, 50)))
        assert sum(map(scored, both)) == 20
