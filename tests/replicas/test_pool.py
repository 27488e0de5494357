"""Pools of stand-in servers: real processes, which start late, hang, die, lie, refuse to stop and leave children."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import time

import aiohttp
import anyio
import pytest

from qreward_plugins.replicas import Pool, PoolSpec, Topology
from qreward_plugins.replicas.changes import Changes
from qreward_plugins.replicas.control import ServerFailed
from qreward_plugins.replicas.pool import PoolFailed
from qreward_plugins.replicas.server import LocalServer
from tests.kit import Program, comes, lives

from .pools import guard_of

pytestmark = pytest.mark.anyio


def pool_of(stand_ins, spec, **options):
    return Pool(spec, lambda number: LocalServer(spec, number), **options)


async def models(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as reply:
        return [model["id"] for model in (await reply.json())["data"]]


async def test_replicas_start_at_the_same_time_each_with_a_port_and_a_name_of_its_own(stand_ins):
    started = []
    spec = stand_ins.spec("ready_after=0.2", replicas=3)
    pool = pool_of(stand_ins, spec, on_change=lambda: started.append(len(stand_ins.living())))
    await pool.start()
    assert started[0] == 3  # all run before the first one is ready
    assert [state.state for state in pool.states] == ["up"] * 3
    listed = [await models(state.url) for state in pool.states]
    assert [names[0] for names in listed] == ["judge"] * 3
    assert len({names[1] for names in listed}) == 3
    await pool.stop()
    await pool.stop()
    assert stand_ins.living() == []
    assert {state.state for state in pool.states} == {"stopped"}


@pytest.mark.parametrize(("code", "shown"), [(3, "exit code 3"), (132, "by SIGILL")])
async def test_a_start_fails_as_a_whole_and_shows_the_log_of_the_guilty_one(stand_ins, code, shown):
    pool = pool_of(stand_ins, stand_ins.spec("only=1", f"exit={code}", "children=1", replicas=3))
    with pytest.raises(PoolFailed, match=rf"replica 1: it ended before it was ready \({shown}\)") as caught:
        await pool.start()
    assert caught.value.log.splitlines()[-1].startswith("RuntimeError: no memory for the weights")
    assert stand_ins.living() == []


@pytest.mark.parametrize("fault", ["never", "wrong"])
async def test_a_replica_that_does_not_get_ready_in_time_fails_the_start(stand_ins, fault):
    """A server that lists another model is not ours, whatever it answers to other questions."""
    pool = pool_of(stand_ins, stand_ins.spec("only=0", fault, replicas=2, start_within_s=1.5))
    with pytest.raises(PoolFailed, match=r"after 1\.5 s \(start_within_s\): /v1/models does not list") as caught:
        await pool.start()
    assert "stand-in own-0-" in caught.value.log
    assert stand_ins.living() == []


async def test_what_cannot_be_started_is_named(stand_ins):
    pool = pool_of(stand_ins, stand_ins.spec(command=("no-such-server", "{port}", "{name}")))
    with pytest.raises(PoolFailed, match="exit code 127") as caught:
        await pool.start()
    assert caught.value.log == "no-such-server: No such file or directory"
    (stand_ins.folder / "own-1.log").mkdir()
    server = LocalServer(stand_ins.spec(replicas=2), 1)
    with pytest.raises(ServerFailed) as failed:
        await server.start()
    assert failed.value.problem.startswith(f"its log {stand_ins.folder}/own-1.log cannot be written (Is a directory)")
    await server.stop()


async def test_a_server_that_refuses_to_stop_ends_with_all_that_it_has_started(stand_ins):
    pool = pool_of(stand_ins, stand_ins.spec("stubborn", "children=2", stop_within_s=0.3))
    await pool.start()
    assert len(stand_ins.living()) == 3
    began = time.monotonic()
    await pool.stop()
    assert time.monotonic() - began >= 0.3
    assert stand_ins.living() == []


async def test_cancelling_a_start_leaves_nothing(stand_ins):
    pool = pool_of(stand_ins, stand_ins.spec("never", "children=1"))
    starting = asyncio.ensure_future(pool.start())
    await comes(lambda: len(stand_ins.living()) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert stand_ins.living() == []


OWNER = """
    import asyncio, os, sys, time
    from qreward_plugins.replicas import PoolSpec, Topology
    from qreward_plugins.replicas.pool_use import PoolUse

    async def main():
        spec = PoolSpec("own", "command", "judge", Topology(), command=tuple(sys.argv[1:]), stop_within_s=0.2)
        use = PoolUse(spec)
        await use.start()
        if os.fork() == 0:  # a child that has all descriptors, as a data loader has
            time.sleep(20)
            os._exit(0)
        print("started", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


async def test_no_server_outlives_its_owner(stand_ins):
    owner = Program("-W", "ignore", "-c", textwrap.dedent(OWNER), *stand_ins.command("stubborn", "children=1"))
    with owner:
        owner.line("started")
        assert len(stand_ins.living()) == 2
        guards = {guard_of(pid) for pid in stand_ins.living()}
        owner.kill()
        await comes(lambda: not stand_ins.living() and not any(map(lives, guards)))
        os.killpg(owner.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_no_server_outlives_its_guard(stand_ins, monkeypatch, number):
    """The owner ends a server whose guard was killed, and starts it again. A guard that hangs is killed at the stop."""
    monkeypatch.setattr("qreward_plugins.replicas.pool._BACKOFF_S", (0.0, 0.0))
    monkeypatch.setattr("qreward_plugins.replicas.server._GUARD_S", 0.2)
    pool = pool_of(stand_ins, stand_ins.spec("stubborn", "children=1", "child_mb=300", stop_within_s=0.1))
    await pool.start()
    before = stand_ins.living()
    guard = guard_of(before[0])
    os.kill(guard, number)
    if number == signal.SIGKILL:
        await comes(lambda: pool.states[0].restarts and pool.states[0].state == "up")
        assert not any(map(lives, [guard, *before]))
        assert len(stand_ins.living()) == 2
    await pool.stop()
    assert stand_ins.living() == []
    assert not lives(guard)


async def test_a_server_that_hangs_in_its_sleep_is_stopped_long_before_a_start_would_fail(stand_ins, monkeypatch):
    """A trainer waits for its devices."""
    monkeypatch.setattr("qreward_plugins.replicas.control.SLEEP_WITHIN_S", 0.2)
    model = str(stand_ins.weights("first"))
    how = {"program": tuple(stand_ins.program()), "sleep_mode": True, "start_within_s": 600.0, "stop_within_s": 0.2}
    pool = pool_of(stand_ins, PoolSpec("own", "vllm", model, Topology(2), **how))
    await pool.start()
    stand_ins.fault("no-sleep")
    with anyio.fail_after(60):
        await Changes(pool).sleep()
    assert sorted(bool(state.url) for state in pool.states) == [False, True]
    assert {state.state for state in pool.states} == {"asleep"}
    assert len(stand_ins.living()) == 1
    await pool.stop()
