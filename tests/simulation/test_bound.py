"""The clairvoyant bound: nobody beats it, it is near what can be reached, and more is never worse."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from dataclasses import replace

import pytest

from qreward_plugins.errors import SourceError, Throttled
from qreward_plugins.simulation import Fault, Job, Luck, Server, SimulatedServer, makespan_bound_s, run

from ..kit import each_of

EXACT = {"overhead_s": 0.0, "noise": 0.0, "network_s": (0.0, 0.0)}
LONGEST_S = 5000.0
STEP_S = 0.25


def makespan_of(servers, jobs, order, rng):
    """A run of somebody who knows all sizes and all books, and sends whatever some server admits now."""
    luck = Luck(0)
    sources = [SimulatedServer(server, luck) for server in servers]

    async def main():
        waiting, under_way, finished_s = sorted(range(len(jobs)), key=order), {}, 0.0
        while waiting or under_way:
            now = asyncio.get_running_loop().time()
            assert now < LONGEST_S
            moved = True
            while moved:
                moved = False
                for source in rng.sample(sources, len(sources)):
                    number = next((number for number in waiting if jobs[number].arrives_s <= now), None)
                    if number is not None and admits(source, jobs[number], now):
                        waiting.remove(number)
                        serving = source.serve(str(number), jobs[number].work, int(jobs[number].tokens), 0)
                        under_way[asyncio.ensure_future(asyncio.wait_for(serving, 60.0))] = number
                        # As many steps as a request without a network needs to arrive; time does not move.
                        for _ in range(5):
                            await asyncio.sleep(0)
                        moved = True
            # A coarse step makes this run slower, and the bound no less valid.
            timer = asyncio.ensure_future(asyncio.sleep(STEP_S))
            done, _ = await asyncio.wait({timer, *under_way}, return_when=asyncio.FIRST_COMPLETED)
            timer.cancel()
            for task in done - {timer}:
                number, error = under_way.pop(task), task.exception()
                if error is None:
                    finished_s = asyncio.get_running_loop().time()
                else:
                    assert isinstance(error, (SourceError, asyncio.TimeoutError))
                    assert not isinstance(error, Throttled)
                    waiting = sorted([*waiting, number], key=order)
        return finished_s

    return run(main())


def admits(source, job, now):
    server = source.server
    if any(fault.kind != "slow" and fault.start_s <= now < fault.end_s for fault in server.faults):
        return False
    return source._limits.broken(int(job.tokens), source.in_flight, now) is None


def small_case(rng, *, faults):
    servers = []
    for number in range(rng.randint(1, 3)):
        sliding = rng.random() < 0.75
        servers.append(
            Server(
                f"s{number}",
                requests_per_minute=rng.choice((None, 6 * rng.randint(3, 12))) if sliding else 60,
                tokens_per_minute=rng.choice((None, None, 6 * rng.randint(2000, 6000))),
                concurrency=rng.choice((None, rng.randint(1, 8))),
                window="sliding" if sliding else "bucket",
                burst=1 if sliding else rng.randint(1, 5),
                window_s=10.0,
                seconds_per_unit=rng.choice((0.5, 1.0, 4.0)),
                faults=faults(rng),
                **EXACT,
            )
        )
    spread_s = 15 if rng.random() < 0.3 else 0
    count = rng.randint(5, 50)
    work = [(math.exp(rng.gauss(0, 0.6)), float(rng.randint(100, 1800))) for _ in range(count)]
    return servers, [Job(*one, rng.uniform(0, spread_s)) for one in work]


def no_faults(rng):
    return ()


def some_faults(rng):
    found = []
    for _ in range(rng.randint(0, 2)):
        start_s = rng.uniform(0, 20)
        kind = rng.choice(("refuse", "slow", "throttle", "hang"))
        found.append(Fault(start_s, start_s + rng.uniform(1, 20), kind, rng.uniform(1, 6)))
    return tuple(found)


@each_of(("seed", "faults"), itertools.product(range(14), (no_faults, some_faults)))
def test_nobody_beats_the_bound(seed, faults):
    rng = random.Random(f"{faults.__name__} {seed}")
    servers, jobs = small_case(rng, faults=faults)
    bound_s = makespan_bound_s(servers, jobs)
    for order in (lambda number: -jobs[number].work, lambda number: jobs[number].work):
        assert makespan_of(servers, jobs, order, rng) >= bound_s * (1 - 1e-4)


ONES = [Job(1.0)] * 30
OUT = Fault(10.0, 20.0, "refuse")


@each_of(
    ("server", "jobs", "bound_s"),
    [
        # Three windows of ten; with places, the last request of the last window takes its second.
        ({"requests_per_minute": 10}, ONES, 120),
        ({"requests_per_minute": 10, "concurrency": 10}, ONES, 121),
        ({"concurrency": 2}, ONES, 15),
        # Tokens: half of the work now, half of it in the next window.
        ({"tokens_per_minute": 1000}, [Job(1.0, 100.0)] * 20, 60),
        # A bucket: five at once, then one a second.
        ({"requests_per_minute": 60, "window": "bucket", "burst": 5}, ONES, 25),
        # An outage costs what is lost.
        ({"concurrency": 2, "faults": (OUT,)}, ONES * 2, 40),
        ({"concurrency": 2, "faults": (replace(OUT, kind="slow", factor=2.0),)}, ONES * 2, 35),
        # Work goes on while nothing new is let in: 9 s of work each, and then 20 s of it from 9 to 29.
        (
            {"concurrency": 2, "window_s": 10.0, "faults": (Fault(10.0, 30.0, "throttle"),)},
            [Job(9.0), Job(9.0), Job(20.0), Job(20.0)],
            29,
        ),
        # Each success costs one failure, which holds its place for 0.3 of the time.
        ({"concurrency": 2, "error_share": 0.5}, ONES, 1.3 * 15),
        ({"requests_per_minute": 60, "error_share": 0.5}, [Job(1.0)] * 100, 180),
        ({}, [], 0),
        ({"faults": (Fault(0.0, math.inf, "hang"),)}, [Job(1.0)], math.inf),
        ({"requests_per_minute": 5, "faults": (Fault(30.0, math.inf, "refuse"),)}, [Job(1.0)] * 6, math.inf),
    ],
)
def test_the_bound_is_what_can_be_reached(exact, server, jobs, bound_s):
    assert makespan_bound_s([exact(**server)], jobs) == pytest.approx(bound_s, rel=0.01)


def test_what_could_be_sooner_is_not_held_back(exact):
    # Long requests of the first moment need not end in it: four short ones when their places are free, at 10.
    server = exact(requests_per_minute=24, window_s=10.0, concurrency=8)
    assert makespan_bound_s([server], [Job(9.0)] * 4 + [Job(0.5)] * 4) <= 10.5


def test_the_longest_request_bounds_by_itself(exact):
    servers = [exact("slow", seconds_per_unit=9.0), exact("fast", seconds_per_unit=2.0)]
    assert makespan_bound_s(servers, [Job(0.1), Job(5.0), Job(0.2)]) == pytest.approx(10.0)
    dies = replace(servers[1], faults=(Fault(4.0, math.inf, "refuse"),))
    assert makespan_bound_s([servers[0], dies], [Job(0.1), Job(5.0)]) == pytest.approx(45.0)
