"""Changes of a pool whose servers are stand-ins in this process: cancelled at every await, and one after the other."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from qreward_plugins.replicas import Pool, PoolSpec, Topology
from qreward_plugins.replicas.changes import Changes
from qreward_plugins.replicas.pool import ChangeFailed, Update
from qreward_plugins.sources.replicas import Replicas

from .pools import Server

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("qreward_plugins.replicas.pool._BACKOFF_S", (0.0, 0.0))


async def started(**settings):
    async def idle(state):
        await asyncio.sleep(0)

    spec = PoolSpec("own", "vllm", "first", Topology(2), restarts=99, **settings)
    pool = Pool(spec, partial(Server, spec), idle=idle)
    await pool.start()
    return pool, Changes(pool)


async def settled(pool):
    for _ in range(200):
        if {state.state for state in pool.states} <= {"up", "stale", "asleep"}:
            return
        await asyncio.sleep(0)
    raise AssertionError(pool.states)


async def test_a_user_that_hangs_keeps_no_pool_from_sleeping(monkeypatch):
    """First it may end its calls, then it is told to cancel them, and then it is not waited for."""
    monkeypatch.setattr("qreward_plugins.replicas.pool._ABORTED_S", 0.0)
    seen = []

    async def never(state):
        await asyncio.sleep(3600)

    spec = PoolSpec("own", "vllm", "first", Topology(1))
    pool = Pool(spec, partial(Server, spec), lambda: seen.append(pool.states[0]), idle=never)
    await pool.start()
    await Changes(pool).sleep(within_s=0.01)
    shown = [(state.state, state.abort) for state in seen]
    assert shown[1:] == [("draining", False), ("draining", True), ("asleep", True)]
    await pool.stop()


def loaded(path, **more):
    return Update(path, path, **more)


async def asleep_and_awake(changes):
    await changes.sleep()
    await changes.wake()


CHANGES = {
    "rolling": lambda changes: changes.update(loaded("a")),
    "together": lambda changes: changes.update(loaded("a", mode="together")),
    "sleep": lambda changes: changes.sleep(),
    "wake": asleep_and_awake,
}
FROM_MEMORY = {
    "memory": lambda changes: changes.update(Update("a", receive=({},))),
    "memory together": lambda changes: changes.update(Update("a", mode="together", receive=({},))),
}


@pytest.mark.parametrize(
    ("change", "in_place"),
    [
        *(pytest.param(change, True, id=name) for name, change in {**CHANGES, **FROM_MEMORY}.items()),
        *(pytest.param(change, False, id=f"{name} by restarts") for name, change in CHANGES.items()),
    ],
)
async def test_a_change_that_is_cancelled_anywhere_leaves_a_pool_that_works(change, in_place):
    at = 0
    while True:
        before = asyncio.all_tasks()
        pool, changes = await started(in_place=in_place, sleep_mode=in_place)
        task = asyncio.ensure_future(change(changes))
        for _ in range(at):
            await asyncio.sleep(0)
        is_over = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await changes.wake()
        await settled(pool)
        # No replica that takes calls has other weights than it says, is half new, paused, or without supervision.
        for state in pool.states:
            server = pool.servers[state.number]
            if state.state == "up":
                had = pool.has[state.number]
                assert (server.has, server.paused) == (had.path or had.version, False), at
            server.stopped.set()
        for _ in range(20):
            await asyncio.sleep(0)
        await settled(pool)
        assert all(not pool.servers[state.number].stopped.is_set() for state in pool.states), at
        await changes.update(loaded("last"))
        assert [(state.state, state.version) for state in pool.states] == [("up", "last")] * 2, at
        assert {server.has for server in pool.servers.values()} == {"last"}
        await pool.stop()
        assert asyncio.all_tasks() == before
        if is_over:
            break
        at += 1
    assert at > 5


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks do not count who cancels them")
@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_call_that_is_aborted_and_cancelled_at_once_is_cancelled(cancelled):
    asked = Replicas(["http://a"])
    asked.gate = SimpleNamespace(look=lambda: None, enter=lambda url: True, leave=lambda url: None)

    async def call():
        with asked.acquire(0.0) as lease:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return lease.end_abort()

    task = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    asked.abort(asked.all[0])
    if cancelled:
        task.cancel()
    assert await task is not cancelled


@pytest.mark.parametrize("mode", ["rolling", "together"])
async def test_a_replica_that_is_started_again_during_an_update_gets_the_new_weights(mode):
    for steps in range(25):
        pool, changes = await started(in_place=True)
        pool.servers[1].stopped.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        with suppress(ChangeFailed):  # it may have been up still
            await changes.update(loaded("a", mode=mode))
        await settled(pool)
        assert [(state.state, state.version) for state in pool.states] == [("up", "a")] * 2, steps
        await pool.stop()
