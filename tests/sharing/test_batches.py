"""How soon a batch ends under a shared limit, in virtual time: nothing may lie idle here while somebody waits there."""

from __future__ import annotations

import asyncio
import bisect
import random

import pytest
from office import MARGIN, Office, a_source, all_scored, an_engine, limits, now, samples

from qreward_plugins.simulation import run

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


def most_in_a_window(arrivals, window_s):
    times = sorted(arrivals)
    return max(bisect.bisect_left(times, at + window_s) - first for first, at in enumerate(times))


@pytest.mark.parametrize(
    ("workers", "per_window", "window_s", "windows", "seed"),
    [(2, 60, 1.5, 8, 0), (8, 300, 10.0, 3, 0), (32, 300, 30.0, 3, 0)],
)
def test_a_batch_of_many_workers_ends_soon_after_the_limit_lets_it(workers, per_window, window_s, windows, seed):
    """It is as many samples as so many windows let pass, each for a worker drawn by lot."""

    async def main():
        office, rng = Slow(seed), random.Random(seed)
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
        assert most_in_a_window(source.arrivals, window_s) == per_window
        await asyncio.gather(*(engine.aclose() for engine in engines))

    run(main())
