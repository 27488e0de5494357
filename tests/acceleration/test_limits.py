"""Whatever functions and callers do: limits hold, also over processes, every call ends, nothing is left, and a call
costs little. In virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from qreward_plugins import Throttled, accelerate
from qreward_plugins.acceleration import calls
from qreward_plugins.sharing import ray_keeper
from qreward_plugins.simulation import run

from ..kit import in_virtual_time, now


class Line:
    kept_by = "a test"

    def __init__(self, keeper):
        self._keeper = keeper

    async def exchange(self, report):
        await asyncio.sleep(0.001)
        return await self._keeper.exchange(report)

    async def end_keeper(self):
        pass

    async def aclose(self):
        pass


@pytest.fixture
def process(monkeypatch):
    """Make the function of one more process: the same name, and a connection of its own to the same keeper."""
    monkeypatch.setattr(ray_keeper, "first_start", lambda name: True)
    monkeypatch.setattr(calls, "ray_is_up", lambda: True)
    keeper = ray_keeper.KeeperActor()
    monkeypatch.setattr(calls, "open_channel", lambda shared, **how: Line(keeper))

    def made(body, **options):
        async def grade(*args):
            return await body(*args)

        return accelerate(shared="ray", **options)(grade)

    return made


@pytest.mark.parametrize("key", [None, str])
@in_virtual_time
async def test_processes_keep_to_one_rate_for_each_key(process, key):
    starts = {}

    async def body(name):
        starts.setdefault(name, []).append(now())

    options = {"rate": "12/s", "window": "sliding", "key": key}
    functions = [process(body, **options) for _ in range(2)]
    for _ in range(3):
        await asyncio.gather(*(function.map(9 * ["a"]) for function in functions))
        await asyncio.sleep(4)
        await asyncio.gather(*(function("b") for function in functions))
    await asyncio.gather(*(function.aclose() for function in functions))
    assert len(starts["a"]) == 54
    counted = starts["a"] if key else [*starts["a"], *starts["b"]]
    assert all(sum(first <= at < first + 1 for at in counted) <= 12 for first in counted)


@in_virtual_time
async def test_a_key_that_other_processes_cannot_recognise_fails_its_calls(process):
    async def body(key):
        return key

    grade = process(body, rate="9/s", key=lambda key: 1 if key == "1" else key)
    zero, error, two = await grade.map(["0", "1", "2"], return_exceptions=True)
    await grade.aclose()
    assert (zero, two) == ("0", "2")
    assert isinstance(error, TypeError)
    assert "with `shared`, key must return a text, not int" in str(error)


# Seeded options, functions and callers


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
        starts.setdefault(key, []).append(now())
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


# What a call costs, counted in function calls, which do not depend on the machine's load


CALLS = 200
MOST_SINGLE = 135
"""Most Python functions that a single call may enter, those of asyncio included. 126 on Python 3.11."""
MOST_IN_BATCH = 106
"""The same of a call in a batch: 96."""


async def _returned(x: int) -> int:
    return x


def _functions_entered(work: Callable[[Any], Awaitable[None]]) -> float:
    """Python functions that are entered for each of `CALLS` calls."""
    entered = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal entered
        entered += event == "call"

    async def main() -> None:
        function = accelerate(_returned, rate=100_000, retries=3, concurrency=32, seed=1)
        await work(function)  # imports and caches
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            await work(function)
        finally:
            sys.setprofile(before)

    asyncio.run(main())
    return entered / CALLS


async def _one_by_one(function: Any) -> None:
    for number in range(CALLS):
        await function(number)


def test_a_call_does_little_work() -> None:
    assert _functions_entered(_one_by_one) < MOST_SINGLE
    assert _functions_entered(lambda function: function.map(range(CALLS))) < MOST_IN_BATCH
