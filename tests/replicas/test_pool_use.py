"""What engines share: one pool of a process, which ends with its last user."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from qreward_plugins.replicas import PoolSpec, Topology, pool_actor, pool_use
from qreward_plugins.replicas.pool import PoolFailed, Update, Weights
from qreward_plugins.replicas.pool_actor import PoolActor
from qreward_plugins.replicas.pool_use import PoolUse
from tests.kit import comes

from .pools import Server

pytestmark = pytest.mark.anyio


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
