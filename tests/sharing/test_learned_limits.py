"""Limits that nobody declared, learned by several workers with one keeper: engines in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from office import Office, an_engine, samples

from qreward_plugins.simulation import Fault, Luck, Server, SimulatedServer, run

PER_MINUTE = 600
WORKERS = 8


def a_server(**fields):
    fields = {"requests_per_minute": PER_MINUTE, "seconds_per_unit": 2.0, "declared": False, **fields}
    return SimulatedServer(
        Server("a", **fields), Luck(7), answer=lambda request: f'{{"id": "{request.nonce}", "score": 0.5}}'
    )


class Job:
    """Workers that have more to ask than the server allows."""

    def __init__(self, office, server, limits):
        self.server = server
        self.engines = [an_engine(office, server, limits, deadline_s=36_000.0) for _ in range(WORKERS)]
        self.scoring = [
            asyncio.ensure_future(engine.score_all(samples(900, 1000 * number)))
            for number, engine in enumerate(self.engines)
        ]

    async def until(self, moment):
        await asyncio.sleep(moment - asyncio.get_running_loop().time())

    def accepted(self, start, end):
        """Requests a minute that the server accepted in this time."""
        arrived = sum(start <= at < end for at in self.server.arrivals)
        return (arrived - self.rejected(start, end)) * 60 / (end - start)

    def rejected(self, start, end):
        return sum(start <= at < end for at, _ in self.server.violations)

    def learned(self):
        """What the workers that are not killed know, each once."""
        return {
            engine.upstreams["a"].quota.use(0.0).learned_requests_per_minute
            for engine, task in zip(self.engines, self.scoring, strict=True)
            if not task.cancelled()
        }

    async def kill(self, number):
        """End a worker as SIGKILL does: it says nothing more to anybody."""
        engine = self.engines[number]
        engine._lifetime.membership._task.cancel()
        self.scoring[number].cancel()
        await asyncio.gather(self.scoring[number], return_exceptions=True)

    async def end(self):
        for task in self.scoring:
            task.cancel()
        await asyncio.gather(*self.scoring, return_exceptions=True)
        for engine in self.engines:
            await engine.aclose()


def played(scenario, limits=None, **fields):
    """Play a scenario with a job of a server with these fields."""

    async def main():
        office = Office(delay_s=0.001)
        job = Job(office, a_server(**fields), limits or {})
        await scenario(office, job)
        await job.end()

    run(main())


def test_all_workers_know_what_one_of_them_has_learned():
    async def scenario(office, job):
        await job.until(58.0)
        assert job.learned() == {PER_MINUTE}

    played(scenario)


@pytest.mark.parametrize(
    "wrong",
    [
        {"faults": (Fault(2.0, 22.0, "throttle", 5.0),)},
        {"announces": "wrong", "wrong_by": 0.1},
        {"announces": "wrong", "wrong_by": 10.0},
    ],
    ids=["a storm that looks like a limit", "announced too low", "announced too high"],
)
def test_a_wrong_limit_is_refuted(wrong):
    async def scenario(office, job):
        await job.until(300.0)
        assert job.accepted(180.0, 300.0) >= 0.9 * PER_MINUTE

    played(scenario, **wrong)


def test_a_wrong_limit_of_tokens_is_refuted():
    async def scenario(office, job):
        await job.until(300.0)
        assert job.accepted(180.0, 300.0) >= 150  # 20 at what is announced

    played(scenario, requests_per_minute=None, tokens_per_minute=60_000, announces="wrong", wrong_by=0.1)


def test_a_killed_worker_takes_nothing_from_the_others_for_good():
    async def scenario(office, job):
        await job.until(90.0)
        await job.kill(0)
        await job.until(300.0)
        assert job.accepted(180.0, 300.0) >= 0.9 * PER_MINUTE
        assert job.rejected(90.0, 300.0) <= 10

    played(scenario)


def test_a_new_keeper_goes_on_with_what_was_learned():
    async def scenario(office, job):
        await job.until(90.0)
        office.mode = "lost"
        await job.until(92.0)
        office.replace()
        office.mode = "well"
        await job.until(360.0)
        assert job.learned() == {PER_MINUTE}
        assert job.accepted(240.0, 360.0) >= 0.9 * PER_MINUTE
        assert job.rejected(90.0, 360.0) <= 10

    played(scenario)


def test_declared_limits_hold_while_another_is_learned():
    async def scenario(office, job):
        await job.until(240.0)
        assert {limit for _, limit in job.server.violations} == {"requests"}
        assert job.server.peak_in_flight == 48

    played(scenario, {"concurrency": 48}, concurrency=48, retry_after="none")
