"""Whatever functions and callers do: limits hold, every call ends, and nothing is left. Seeded, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from qreward_plugins import Throttled, accelerate
from qreward_plugins.simulation import run

PER_S = 5


def drawn(rng):
    """Options of a function. All of them have limits."""
    return {
        "rate": f"{PER_S}/s",
        "window": "sliding",
        "concurrency": rng.choice([1, 3, 20]),
        "retries": rng.choice([0, 1, 5]),
        "interval_s": rng.choice([0, 0.1, 1]),
        "timeout_s": rng.choice([None, 2, 5]),
        "deadline_s": rng.choice([None, 10, 60]),
        "hedge": rng.choice([False, True, 0.5]),
        "breaker": rng.choice([None, 3]),
        "recovery_s": rng.choice([1, 5]),
        "adaptive": rng.choice([None, 0.3]),
        "key": rng.choice([None, lambda x: x % 3]),
        "seed": 1,
    }


async def behave(rng):
    """Return, raise, ask for a pause, hang, or end late after a cancellation."""
    draw = rng.random()
    if draw < 0.1:
        raise ValueError
    if draw < 0.13:
        raise Throttled("later", retry_after_s=rng.choice([None, 0.5, 2]))
    if draw < 0.15:
        raise asyncio.CancelledError
    try:
        await asyncio.sleep(rng.choice([0, 0.1, 1, 1, 30]))
    except asyncio.CancelledError:
        if draw > 0.9:
            await asyncio.sleep(rng.choice([0.1, 3]))
        raise


@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, 100, 50)], ids=str)
def test_limits_hold_every_call_ends_and_nothing_is_left(seeds):
    for seed in seeds:
        played(random.Random(seed))


def played(rng):
    options = drawn(rng)
    starts, running, most = {}, {}, {}

    async def grade(x):
        key = x % 3 if options["key"] else 0
        starts.setdefault(key, []).append(asyncio.get_running_loop().time())
        running[key] = running.get(key, 0) + 1
        most[key] = max(most.get(key, 0), running[key])
        try:
            await behave(rng)
            return x
        finally:
            running[key] -= 1

    async def one(function, x):
        await asyncio.sleep(rng.random() * 20)
        call = asyncio.ensure_future(function.with_options(priority=rng.choice(["low", "high"]))(x))
        if rng.random() < 0.2:
            asyncio.get_running_loop().call_later(rng.random() * 3, call.cancel)
        with contextlib.suppress(Exception, asyncio.CancelledError):
            assert await call == x

    async def several(function, count):
        await asyncio.sleep(rng.random() * 10)
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await function.map(range(count), return_exceptions=rng.random() < 0.7)

    async def main():
        function = accelerate(**options)(grade)
        batches = [several(function, rng.randint(0, 40)) for _ in range(3)]
        await asyncio.gather(*batches, *(one(function, x) for x in range(40)))
        await asyncio.sleep(60)  # attempts that end late
        counted = function.statistics()
        assert (counted.under_way, counted.in_flight) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await function.aclose()

    run(main())
    assert max(most.values()) <= options["concurrency"]
    for times in starts.values():
        assert all(sum(at <= other < at + 1 - 1e-6 for other in times) <= PER_S for at in times)
