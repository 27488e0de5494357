"""A use that finds a pool and starts none, and the counts that a pool asks its users for."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest
from pools import comes, parent_of

from qreward_plugins.replicas import local_pool_use, pool_status
from qreward_plugins.replicas.commands import Commands
from qreward_plugins.replicas.local_pool_use import LocalPoolUse
from qreward_plugins.replicas.pool import ChangeFailed, PoolFailed
from qreward_plugins.replicas.pool_process import PoolProcess
from qreward_plugins.replicas.pool_search import RunningPool, chosen, describe
from qreward_plugins.replicas.pool_status import PoolStatus, ReplicaLoad, Reports
from qreward_plugins.replicas.replica_state import ReplicaState
from qreward_plugins.replicas.weights import Weights

pytestmark = pytest.mark.anyio


async def test_a_pool_is_found_before_it_is_ready(stand_ins):
    spec = stand_ins.spec("never")
    starts, finds = LocalPoolUse(spec), LocalPoolUse(spec)
    starting = asyncio.ensure_future(starts.start())
    await comes(stand_ins.living)
    await finds.find()
    status = await finds.status()
    assert ([state.state for state in status.replicas], status.processes) == (["starting"], 1)
    await finds.aclose()
    await starts.aclose()
    with pytest.raises(PoolFailed):
        await starting


async def test_what_is_found_and_then_lost_is_not_started_again(stand_ins, caplog):
    starts, finds = LocalPoolUse(stand_ins.spec()), LocalPoolUse(stand_ins.spec())
    await starts.start()
    await finds.find()
    assert (await finds.status()).processes == 1
    pool = parent_of(stand_ins.living()[0], 3)
    leaving = asyncio.ensure_future(starts.aclose())
    await asyncio.sleep(0)  # it leaves now, so it does not start the pool again
    os.kill(pool, signal.SIGKILL)
    await leaving
    await comes(lambda: finds.ended and not stand_ins.living())
    for command in (finds.status, finds.wake_up, finds.sleep):
        with pytest.raises((PoolFailed, ChangeFailed), match="it has ended"):
            await command()
    assert stand_ins.living() == []
    assert "started again" not in caplog.text
    await finds.aclose()


async def test_no_change_waits_for_a_guest_that_is_stopped(stand_ins):
    """A shell in which somebody has pressed Ctrl-Z answers nothing."""
    starts, stopped, finds = (LocalPoolUse(stand_ins.spec(replicas=2)) for _ in range(3))
    await starts.start()
    await stopped.find()
    stopped.send = lambda message: False
    await finds.find()
    status = await finds.status()
    assert (status.processes, status.silent) == (1, 0)
    await finds.sleep(within_s=10.0)
    assert [state.state for state in (await finds.status()).replicas] == ["asleep"] * 2
    for use in (finds, stopped, starts):
        await use.aclose()


async def test_a_pool_ends_with_its_last_user_and_not_with_its_last_guest(stand_ins):
    starts, guest = LocalPoolUse(stand_ins.spec()), LocalPoolUse(stand_ins.spec())
    await starts.start()
    await guest.find()
    (state,) = starts.states
    assert starts.gate.enter(state.url)  # a call that does not end
    sleeping = asyncio.ensure_future(guest.sleep(within_s=600.0))
    await comes(lambda: guest.states[0].state == "draining")
    await starts.aclose()
    assert stand_ins.living() == []
    with pytest.raises((ChangeFailed, PoolFailed), match="their last user has ended"):
        await sleeping
    await guest.aclose()


async def test_a_pool_that_ends_takes_no_command():
    sent = []
    commands = Commands(list, lambda user, message: sent.append((user, message)))
    await commands.aclose()
    commands.receive("guest", {"command": "wake", "id": 7, "arguments": {}})
    [(user, message)] = sent
    assert (user, message["id"]) == ("guest", 7)
    assert "last user has ended" in message["error"]["problem"]


async def test_a_process_that_has_no_pool_yet_gets_none_from_who_only_finds(stand_ins, shared_directory, monkeypatch):
    """The process that has started it, and has the spec, may be gone."""
    monkeypatch.setattr(local_pool_use, "_CONNECT_TRIES", 2)
    spec = stand_ins.spec()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(shared_directory / f"{spec.key}.sock"))
    listening.listen()
    pool = PoolProcess(listening, shared_directory, spec.key)
    running = asyncio.ensure_future(pool.run())
    finds = LocalPoolUse(spec)
    with pytest.raises(PoolFailed, match="the process of the pool ends at once"):
        await finds.find()
    await finds.aclose()
    assert stand_ins.living() == []
    pool._unused.set()
    await running


async def test_the_counts_of_all_processes_are_added():
    sent: asyncio.Queue[str] = asyncio.Queue()
    reports = Reports(lambda user, message: sent.put_nowait(user))
    asking = asyncio.ensure_future(reports.ask(["first", "second", "gone"]))
    assert {await sent.get() for _ in range(3)} == {"first", "second", "gone"}
    reports.receive("first", {"0": {"requests": 3, "pending_tokens": 7, "health": {"up": 1}}})
    reports.receive("first", {"0": {"requests": 3}})  # twice: it answers another question, too
    reports.left("gone")
    assert not asking.done()
    reports.receive("second", {"0": {"requests": 2, "health": {"backing_off": 1}}, "1": {"requests": 1}})
    loads, silent = await asking
    assert silent == 0
    health = {"up": 1, "backing_off": 1}
    assert loads == {0: ReplicaLoad(requests=5, pending_tokens=7, health=health), 1: ReplicaLoad(requests=1)}


async def test_a_process_that_sends_no_counts_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(pool_status, "_REPORT_WITHIN_S", 0.01)
    reports = Reports(lambda user, message: None)
    assert await reports.ask(["stopped"]) == ({}, 1)
    assert await reports.ask([]) == ({}, 0)


def test_a_status_is_read_as_it_was_written():
    load = ReplicaLoad(1, 2, 3, 4, 5, {"up": 2})
    status = PoolStatus((ReplicaState(0, "up"), ReplicaState(1, "down")), Weights("v", revision=1), 2, 1, {0: load})
    assert PoolStatus.of(status.as_mapping()) == status


def test_the_digests_of_a_spec_tell_what_differs_and_no_secret(stand_ins):
    spec, other = stand_ins.spec(api_key="sk-one"), stand_ins.spec(api_key="sk-two", restarts=9)
    digests = spec.digests
    assert {name for name in digests if digests[name] != other.digests[name]} == {"api_key", "restarts"}
    assert digests["name"] == "own"
    assert "sk-one" not in str(digests)


def test_the_pool_is_chosen_by_what_the_configuration_says(stand_ins):
    def running(key, **changes):
        return RunningPool.of(key, key, describe(stand_ins.spec(**changes)))

    spec = stand_ins.spec(api_key="sk-shell", log_folder="/home/logs", environment={"A": "1"})
    written = {"environment": {"A": "1"}}
    own = running("own", api_key="sk", log_folder="/run/logs", **written)
    elsewhere = running("elsewhere", api_key="sk-shell", log_folder="/run/logs", **written)
    exact = running("exact", api_key="sk-shell", log_folder="/home/logs", **written)
    other = running("other", environment={"A": "2"})
    fields = frozenset({"api_key", "log_folder"})
    assert chosen(spec, fields, []) is None
    assert chosen(spec, fields, [other, own]) is own
    assert chosen(spec, fields, [own, elsewhere]) is elsewhere  # the shell has its key
    assert chosen(spec, frozenset(), [own, exact]) is exact
    assert chosen(spec, fields | {"environment"}, [other]) is other
    with pytest.raises(PoolFailed, match=r"2 pools of 'own' .*: elsewhere; exact\. They differ in: log_folder"):
        chosen(spec, fields, [own, elsewhere, exact])
    with pytest.raises(PoolFailed, match=r"other differs in: environment\.A\. Use the configuration"):
        chosen(spec, fields, [other])
    with pytest.raises(PoolFailed, match="own differs in: api_key, log_folder"):
        chosen(spec, frozenset(), [own])
