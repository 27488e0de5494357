"""Servers whose guards were killed are found and ended, and nothing else is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
from pools import comes, lives, parent_of

from qreward_plugins.replicas import guard
from qreward_plugins.replicas.launch import LocalServer
from qreward_plugins.replicas.local_pool_use import LocalPoolUse
from qreward_plugins.replicas.orphans import end_orphans, find_orphans
from qreward_plugins.system.processes import ProcessMark, machine

pytestmark = pytest.mark.anyio


def kill_guard(server_pid):
    """Kill both processes of the guard of a server at once, as somebody does who ends all of them by name."""
    watcher = parent_of(server_pid)
    guard = parent_of(watcher)
    os.kill(guard, signal.SIGSTOP)  # otherwise it may end the server when the watcher is gone
    os.kill(watcher, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    return guard, watcher


def notes(folder):
    return list(folder.glob("*.server"))


async def orphaned(spec, stand_ins):
    """Start a pool, and kill its process, its guard and its watcher, so that its server is an orphan."""
    use = LocalPoolUse(spec)
    await use.start()
    (server, *_) = stand_ins.living()
    pool = parent_of(server, 3)
    os.kill(pool, signal.SIGSTOP)
    closing = asyncio.ensure_future(use.aclose())  # it leaves, and starts no other pool
    await asyncio.sleep(0)
    guards = kill_guard(server)
    os.kill(pool, signal.SIGKILL)
    await closing
    await comes(lambda: not any(map(lives, (pool, *guards))))
    return server


async def test_the_next_pool_ends_a_server_whose_guard_was_killed(stand_ins, shared_directory):
    """Whatever its spec is: the server holds a device."""
    server = await orphaned(stand_ins.spec("stubborn", "children=1"), stand_ins)
    assert len(stand_ins.living()) == 2
    (orphan,) = find_orphans(shared_directory)
    assert (orphan.source, orphan.replica, orphan.devices) == ("own", 0, "cpu")
    assert orphan.pids == sorted(stand_ins.living())
    use = LocalPoolUse(stand_ins.spec(restarts=1))
    await use.start()
    assert not lives(server)
    assert len(stand_ins.living()) == 1
    assert find_orphans(shared_directory) == []
    await use.aclose()
    assert notes(shared_directory) == []


async def test_a_child_that_outlives_the_server_is_told_by_its_output(stand_ins, shared_directory):
    server = await orphaned(stand_ins.spec("stubborn", "children=1"), stand_ins)
    os.kill(server, signal.SIGKILL)
    await comes(lambda: len(stand_ins.living()) == 1)
    (orphan,) = find_orphans(shared_directory)
    assert orphan.pids == stand_ins.living()
    end_orphans(shared_directory)
    assert stand_ins.living() == []
    assert notes(shared_directory) == []


async def test_a_pool_ends_its_own_server_whose_guard_was_killed(stand_ins, shared_directory):
    """Otherwise the replica that is started again would find its device in use."""
    use = LocalPoolUse(stand_ins.spec())
    await use.start()
    (first,) = stand_ins.living()
    kill_guard(first)
    await comes(lambda: use.states and use.states[0].restarts and use.states[0].url)
    assert not lives(first)
    assert len(stand_ins.living()) == 1
    await use.aclose()


async def test_stopping_a_server_whose_guard_was_killed_ends_it(stand_ins, shared_directory):
    server = LocalServer(stand_ins.spec("children=1"), 0, folder=stand_ins.folder, private=shared_directory)
    await server.start()
    kill_guard(stand_ins.living()[0])
    await server.ended()
    await server.stop()
    assert stand_ins.living() == []
    assert notes(shared_directory) == []


@pytest.mark.parametrize("how", ["old Python", "sandbox"])
async def test_where_one_process_cannot_be_signalled_for_certain_it_is_named(
    stand_ins, shared_directory, monkeypatch, caplog, how
):
    """And other servers start."""
    server = await orphaned(stand_ins.spec(), stand_ins)

    def refuse(*words):
        raise PermissionError

    if how == "old Python":
        monkeypatch.delattr(signal, "pidfd_send_signal")
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    end_orphans(shared_directory)
    assert lives(server)
    said = f"a server of replica 0 of own is unsupervised, and this system cannot end it safely: kill -9 {server}"
    assert caplog.messages == [said]
    monkeypatch.undo()
    end_orphans(shared_directory)
    assert not lives(server)


def test_a_note_that_cannot_be_written_leaves_no_part(tmp_path):
    path = tmp_path / "key.0-1.server"
    path.mkdir()
    guard._Note(str(path), "{}").write(1, None)
    assert list(tmp_path.iterdir()) == [path]


async def test_servers_that_are_supervised_are_left_alone(stand_ins, shared_directory):
    spec = stand_ins.spec()
    server = LocalServer(spec, 0, folder=stand_ins.folder, private=shared_directory)
    await server.start()
    (pid,) = stand_ins.living()
    assert len(notes(shared_directory)) == 1
    watcher = parent_of(pid)
    for stopped in (server.pid, watcher):  # one that is stopped may go on
        os.kill(stopped, signal.SIGSTOP)
        end_orphans(shared_directory)
        assert find_orphans(shared_directory) == []
        assert lives(pid)
        os.kill(stopped, signal.SIGCONT)
    await server.stop()
    assert notes(shared_directory) == []


@pytest.mark.parametrize("what", ["number given away", "other machine", "supervised", "unreadable", "later version"])
def test_a_process_that_is_not_certainly_ours_is_left_alone(shared_directory, what):
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mark = ProcessMark.of(other.pid)
        gone, me = [mark.pid, mark.started - 1], [os.getpid(), ProcessMark.of(os.getpid()).started]
        note = {
            "machine": "another" if what == "other machine" else machine(),
            "guard": me if what == "supervised" else gone,
            "watcher": gone,
            "server": gone if what == "number given away" else [mark.pid, mark.started],
            "output": 0,
            "label": {"source": "own", "replica": 0, "devices": "0"},
        }
        label = {} if what == "later version" else note["label"]
        path = shared_directory / "key.0-1.server"
        path.write_text("{" if what == "unreadable" else json.dumps({**note, "label": label}))
        assert find_orphans(shared_directory) == []
        end_orphans(shared_directory)
        assert other.poll() is None
        assert path.exists() == (what != "number given away")
        path.write_text(json.dumps({**note, "machine": machine(), "guard": gone, "server": [mark.pid, mark.started]}))
        assert [orphan.pids for orphan in find_orphans(shared_directory)] == [[other.pid]]
    finally:
        other.communicate()
