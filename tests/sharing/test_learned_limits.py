"""Limits that nobody declared, learned by several workers with one keeper: engines in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from office import Office, an_engine, samples, until

from qreward_plugins.simulation import Fault, Luck, Server, SimulatedServer, run

PER_MINUTE = 240
WORKERS = 4


class Job:
    """Workers that have more to ask than the server allows."""

    def __init__(self, limits, fields):
        fields = {"requests_per_minute": PER_MINUTE, "seconds_per_unit": 2.0, "declared": False, **fields}
        self.server = SimulatedServer(Server("a", **fields), Luck(7))
        self.office = Office(delay_s=0.001)
        self.engines = [an_engine(self.office, self.server, limits, deadline_s=36_000.0) for _ in range(WORKERS)]
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


def played(scenario, limits=None, **fields):
    """Play a scenario with a job of a server with these fields."""

    async def main():
        job = Job(limits or {}, fields)
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


TOO_LOW = {"announces": "wrong", "wrong_by": 0.1}


@pytest.mark.parametrize(
    ("wrong", "at_least"),
    [
        ({"faults": (Fault(2.0, 22.0, "throttle", 5.0),)}, 0.9 * PER_MINUTE),
        (TOO_LOW, 0.9 * PER_MINUTE),
    ],
    ids=["a storm that looks like a limit", "announced too low"],
)
def test_a_wrong_limit_is_refuted(wrong, at_least):
    async def scenario(job):
        await until(300.0)
        assert job.rates(180.0, 300.0)[0] >= at_least

    played(scenario, **wrong)
