"""Accelerated functions that share limits with other processes: a real keeper in virtual time, without Ray."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import accelerate
from qreward_plugins.acceleration import calls
from qreward_plugins.sharing import ray_keeper
from qreward_plugins.simulation import run


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


def most_within(starts, seconds):
    return max(sum(first <= at < first + seconds for at in starts) for first in starts)


@pytest.mark.parametrize("key", [None, str])
def test_processes_keep_to_one_rate_for_each_key(process, key):
    starts = {}

    async def body(name):
        starts.setdefault(name, []).append(asyncio.get_running_loop().time())

    async def main():
        options = {"rate": "12/s", "window": "sliding", "key": key}
        functions = [process(body, **options) for _ in range(2)]
        for _ in range(3):
            await asyncio.gather(*(function.map(9 * ["a"]) for function in functions))
            await asyncio.sleep(4)
            await asyncio.gather(*(function("b") for function in functions))
        await asyncio.gather(*(function.aclose() for function in functions))

    run(main())
    assert len(starts["a"]) == 54
    counted = starts["a"] if key else [*starts["a"], *starts["b"]]
    assert most_within(sorted(counted), 1) <= 12


def test_a_key_that_other_processes_cannot_recognise_fails_its_calls(process):
    async def body(key):
        return key

    async def main():
        grade = process(body, rate="9/s", key=lambda key: 1 if key == "1" else key)
        results = await grade.map(["0", "1", "2"], return_exceptions=True)
        await grade.aclose()
        return results

    zero, error, two = run(main())
    assert (zero, two) == ("0", "2")
    assert isinstance(error, TypeError)
    assert "with `shared`, key must return a text, not int" in str(error)
