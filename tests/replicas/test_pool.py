"""Pools of stand-in servers, real processes which start late, hang, die, lie, refuse to stop and leave children; and
what engines share: one pool of a process, which ends with its last user.
"""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
import threading
import time
from concurrent.futures import Future

import aiohttp
import anyio
import pytest

from qreward_plugins.replicas import Pool, PoolSpec, Topology, pool_actor, pool_use
from qreward_plugins.replicas.changes import Changes
from qreward_plugins.replicas.control import ServerFailed
from qreward_plugins.replicas.pool import PoolFailed, Update, Weights
from qreward_plugins.replicas.pool_actor import PoolActor
from qreward_plugins.replicas.pool_use import PoolUse
from qreward_plugins.replicas.server import LocalServer
from tests.kit import Program, comes, lives

from .conftest import Server, guard_of

pytestmark = pytest.mark.anyio


def pool_of(stand_ins, spec, **options):
    return Pool(spec, lambda number: LocalServer(spec, number), **options)


async def models(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as reply:
        return [model["id"] for model in (await reply.json())["data"]]


async def test_replicas_start_at_the_same_time_each_with_a_port_and_a_name_of_its_own(stand_ins):
    started = []
    spec = stand_ins.spec("ready_after=1", replicas=3)
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
async def test_no_server_outlives_its_guard(stand_ins, early_restarts, monkeypatch, number):
    """The owner ends a server whose guard was killed, and starts it again. A guard that hangs is killed at the stop."""
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


# What engines share


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("qreward-pool")]


async def test_engines_share_one_pool_which_ends_with_the_last_of_them(stand_ins):
    uses = [PoolUse(stand_ins.spec("children=1")) for _ in range(4)]
    await asyncio.gather(*(use.start() for use in uses))
    assert len(stand_ins.living()) == 2
    assert len({use.states[0].url for use in uses}) == 1
    for use in uses[:3]:
        await use.aclose()
        await use.aclose()
    assert len(stand_ins.living()) == 2
    await uses[3].aclose()
    assert stand_ins.living() == []
    await comes(lambda: threads() == [])
    with pytest.raises(PoolFailed, match="it is closed"):
        await uses[3].start()
    again = PoolUse(stand_ins.spec("children=1"))
    await again.start()
    await again.aclose()
    assert stand_ins.living() == []


async def test_an_owner_that_hangs_ends_the_wait(stand_ins, monkeypatch, caplog):
    """An actor that was stopped (SIGSTOP)."""

    class Hanging:
        where, lost = "the actor x of its pool", ()

        def call(self, method, *arguments):
            return Future()

        def release(self):
            pass

    monkeypatch.setattr(pool_use, "owner_of", lambda spec: Hanging())
    monkeypatch.setattr(pool_use, "_SILENT_S", 0.0)
    monkeypatch.setattr(pool_use, "_LOOK_EVERY_S", 0.01)
    use = PoolUse(stand_ins.spec(start_within_s=0.05, stop_within_s=0.05))
    with pytest.raises(PoolFailed, match=r"the actor x of its pool has not ended its start within 0\.1 s"):
        await use.start()
    await use.aclose()
    assert "the actor x of its pool has not ended its servers" in caplog.text
    await comes(lambda: use.ended and threads() == [])


class Owner:
    """A `PoolActor` whose servers are started at once, in the loop of the test. It is lost when `dies` is set."""

    where, lost = "its pool", (ConnectionError,)

    def __init__(self):
        self.loop, self.actor, self.joined, self.futures = asyncio.get_running_loop(), PoolActor(), [], []

    def call(self, method, *arguments):
        if method == "join":
            self.joined.append(arguments[2:])
        answer = Future()
        self.futures.append(answer)
        inner = asyncio.run_coroutine_threadsafe(getattr(self.actor, method)(*arguments), self.loop)
        inner.add_done_callback(lambda _: self.answer(answer, inner))
        return answer

    def answer(self, answer, inner):
        if answer.done() or inner.cancelled():
            return
        if inner.exception() is None:
            answer.set_result(inner.result())
        else:
            answer.set_exception(inner.exception())

    def die(self):
        """Fail all calls, and begin anew."""
        self.ending = asyncio.ensure_future(self.actor._stop(self.actor._pool))
        self.actor = PoolActor()
        for future in self.futures:
            if not future.done():
                future.set_exception(ConnectionError())

    def release(self):
        pass


@pytest.fixture
def owner(monkeypatch):
    """Makes the owner. Updates from memory last for ever."""
    monkeypatch.setattr(Server, "endless", True)
    monkeypatch.setattr(pool_actor, "LocalServer", Server)

    def make():
        made = Owner()
        monkeypatch.setattr(pool_use, "owner_of", lambda spec: made)
        return made

    return make


SPEC = PoolSpec("own", "vllm", "first", Topology(), in_place=True)


async def test_a_pool_that_is_lost_is_started_again_with_what_it_had(owner):
    lost, use = owner(), PoolUse(SPEC)
    await use.start()
    await use.update_weights(Update("v", "/w"))
    await use.sleep()
    assert (use.weights.version, use.asleep) == ("v", True)
    await use.sleep()
    lost.die()
    await comes(lambda: len(lost.joined) == 2 and use.states)
    assert lost.joined == [(Weights(), False), (use.weights, True)]
    assert (use.weights.version, [state.state for state in use.states]) == ("v", ["asleep"])
    await use.wake_up()
    assert [(state.state, state.version) for state in use.states] == [("up", "v")]
    await use.aclose()


@pytest.mark.parametrize("path", ["", "/w"])
async def test_cancelling_ends_an_update_from_memory_only(owner, path):
    owner()
    use, receiving = PoolUse(SPEC), []
    await use.start()
    url = use.states[0].url
    await comes(lambda: use.enter(url))
    update = Update("v", path, receive=() if path else ({},))
    updating = asyncio.ensure_future(use.update_weights(update, receiving.append))
    await comes(lambda: use.states[0].state == "draining")
    assert not use.enter(url)
    updating.cancel()
    await asyncio.wait([updating])
    use.leave(url)
    await comes(lambda: use.states[0].state == "up")
    assert (use.weights.version, use.states[0].version) == (("v", "v") if path else ("", ""))
    await use.aclose()


async def test_nobody_waits_for_a_user_that_is_gone(owner, monkeypatch):
    """Ray does not tell that a process ended. One that was only busy is a user still."""
    monkeypatch.setattr(pool_actor, "_SILENT_S", 0.1)
    monkeypatch.setattr(pool_actor, "_WATCH_S", 0.01)
    monkeypatch.setattr(pool_actor, "_LOOK_EVERY_S", 0.01)
    actor, use = owner().actor, PoolUse(SPEC)
    await actor.join("gone", SPEC, Weights(), False)
    await use.start()
    await use.update_weights(Update("v", "/w"))
    assert use.states[0].version == "v"
    await use.aclose()
    assert (await actor.watch("gone", -1)).states[0].state == "up"
    await actor.leave("gone")
    assert await actor.watch("gone", -1) is None
