"""How soon a batch ends under a shared limit, in virtual time: nothing may lie idle here while somebody waits there."""

from __future__ import annotations

import asyncio
import bisect
import random

import pytest
from office import MARGIN, Office, a_source, an_engine, samples

from qreward_plugins.simulation import run

CONCURRENCY = 1024
SERVICE_S = 0.2
SLOWLY_S = 0.01
"""How long a message takes in the mean."""


class Slow(Office):
    """Messages take their time, each its own."""

    def __init__(self, seed):
        super().__init__()
        self.rng = random.Random(seed)

    def delay(self):
        return self.rng.expovariate(1 / SLOWLY_S)


def score_batch(workers, per_window, window_s, windows, seed):
    """Seconds that a batch took beyond what the limit and the answers take, and the most in any window.

    It is as many samples as so many windows let pass, each for a worker drawn by lot.
    """

    async def main():
        office, rng, loop = Slow(seed), random.Random(seed), asyncio.get_running_loop()
        source = a_source(behaviour=lambda number, request, now: SERVICE_S, window_s=window_s)
        limits = {"requests_per_minute": per_window * 60 / window_s, "window_s": window_s, "window": "sliding"}
        engines = [an_engine(office, source, {**limits, "concurrency": CONCURRENCY}) for _ in range(workers)]
        await asyncio.gather(*(engine.score_all([]) for engine in engines))
        await asyncio.sleep(2.0)
        began = loop.time()
        outcomes = await asyncio.gather(
            *(engines[rng.randrange(workers)].score(sample) for sample in samples(per_window * windows))
        )
        took_s = loop.time() - began
        assert all(outcome.reward is not None for outcome in outcomes)
        await asyncio.gather(*(engine.aclose() for engine in engines))
        return took_s - (windows - 1) * (window_s + MARGIN) - SERVICE_S, most_in_a_window(source.arrivals, window_s)

    return run(main())


def most_in_a_window(arrivals, window_s):
    times = sorted(arrivals)
    return max(bisect.bisect_left(times, at + window_s) - first for first, at in enumerate(times))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("workers", "per_window", "window_s", "windows"),
    [(2, 60, 1.5, 8), (8, 300, 10.0, 3), (8, 1000, 10.0, 4), (32, 300, 30.0, 3)],
)
def test_a_batch_of_many_workers_ends_soon_after_the_limit_lets_it(workers, per_window, window_s, windows, seed):
    lost_s, most = score_batch(workers, per_window, window_s, windows, seed)
    assert most == per_window
    # A report every quarter of a second, and what is too little to be told of twice a second.
    assert lost_s < 1.5


def test_who_begins_late_does_not_wait_until_the_others_have_done():
    async def main():
        office, loop = Slow(0), asyncio.get_running_loop()
        source = a_source(behaviour=lambda number, request, now: SERVICE_S)
        limits = {"requests_per_minute": 360, "window_s": 10.0, "window": "sliding"}
        async with an_engine(office, source, limits) as long, an_engine(office, source, limits) as short:
            long_one = asyncio.ensure_future(long.score_all(samples(240)))
            await asyncio.sleep(0.3)
            began = loop.time()
            await short.score_all(samples(30, 1000))
            # The first window is spent; half of the second is its.
            assert loop.time() - began < 11.0
            await long_one
        assert most_in_a_window(source.arrivals, 10.0) == 60

    run(main())
