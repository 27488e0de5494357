"""Pools of stand-in servers: real processes, which start late, hang, die, lie, refuse to stop and leave children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import aiohttp
import anyio
import pytest
from pools import STAND_IN, comes, lives

from qreward_plugins.replicas import Pool, PoolSpec, Topology, guard
from qreward_plugins.replicas.changes import Changes
from qreward_plugins.replicas.launch import LocalServer, ServerFailed
from qreward_plugins.replicas.pool import PoolFailed
from qreward_plugins.replicas.ports import free_port

pytestmark = pytest.mark.anyio


def pool_of(stand_ins, spec, **options):
    return Pool(spec, lambda number: LocalServer(spec, number, folder=stand_ins.folder), **options)


def started(command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)


def children_of(pid):
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_taken(port):
    with socket.socket() as here:
        return here.connect_ex(("127.0.0.1", port)) == 0


async def models(url):
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as reply:
        return [model["id"] for model in (await reply.json())["data"]]


async def test_replicas_start_at_the_same_time_each_with_a_port_and_a_name_of_its_own(stand_ins):
    changes, made = [], []
    spec = stand_ins.spec("ready_after=0.2", "pieces", replicas=3)

    def server(number):
        made.append(LocalServer(spec, number, folder=stand_ins.folder))
        return made[-1]

    pool = Pool(spec, server, on_change=lambda: changes.append([one.pid for one in made]))
    await pool.start()
    assert len(set(changes[0]) - {None}) == 3  # all are started before the first one is ready
    assert [state.state for state in pool.states] == ["up"] * 3
    listed = [await models(state.url) for state in pool.states]
    assert [names[0] for names in listed] == ["judge"] * 3
    assert len({names[1] for names in listed}) == 3
    assert len(stand_ins.living()) == 3
    assert len(changes) == 3
    await pool.stop()
    await pool.stop()
    assert stand_ins.living() == []
    assert {state.state for state in pool.states} == {"stopped"}
    assert not any("qreward" in str(child) for child in asyncio.all_tasks())


@pytest.mark.parametrize(("code", "shown"), [(3, "exit code 3"), (132, "by SIGILL: its program needs a newer CPU")])
async def test_a_start_fails_as_a_whole_and_shows_the_log_of_the_guilty_one(stand_ins, code, shown):
    pool = pool_of(stand_ins, stand_ins.spec("only=1", f"exit={code}", "children=1", replicas=3))
    with pytest.raises(PoolFailed, match=rf"replica 1: it ended before it was ready \({shown}\)") as caught:
        await pool.start()
    assert caught.value.log.splitlines()[-1].startswith("RuntimeError: no memory for the weights")
    assert stand_ins.living() == []


@pytest.mark.parametrize(
    ("fault", "lacks"), [("never", "does not answer"), ("wrong", "lists .*, and not the name own-0-")]
)
async def test_a_replica_that_does_not_get_ready_in_time_fails_the_start(stand_ins, fault, lacks):
    """A server that lists another model is not ours, whatever it answers to other questions."""
    pool = pool_of(stand_ins, stand_ins.spec("only=0", fault, replicas=2, start_within_s=1.5))
    with pytest.raises(PoolFailed, match=rf"after 1\.5 s \(start_within_s\): .*/v1/models {lacks}") as caught:
        await pool.start()
    assert "stand-in own-0-" in caught.value.log
    assert stand_ins.living() == []


async def test_another_program_on_the_port_is_not_taken_for_our_server(stand_ins, monkeypatch):
    other = started([sys.executable, "-I", "-S", str(STAND_IN), str(port := free_port()), "x", "judge"])
    try:
        monkeypatch.setattr("qreward_plugins.replicas.launch.free_port", lambda host: port)
        spec = stand_ins.spec()
        server = LocalServer(spec, 0, folder=stand_ins.folder)

        assert other.stdout.readline().startswith(b"stand-in x")
        await comes(lambda: is_taken(port))
        with pytest.raises(ServerFailed, match="ended before it was ready") as caught:
            await server.start()
        assert "Address already in use" in caught.value.log
        assert stand_ins.pids_file.read_text().count("\n") == 3  # each try has asked for a port
    finally:
        other.kill()
        other.stdout.close()
        other.wait()


async def test_a_program_that_does_not_exist_is_named(stand_ins):
    pool = pool_of(stand_ins, stand_ins.spec(command=("no-such-server", "{port}", "{name}")))
    with pytest.raises(PoolFailed, match="exit code 127") as caught:
        await pool.start()
    assert caught.value.log == "no-such-server: No such file or directory"


async def test_a_log_that_cannot_be_written_is_named(stand_ins):
    (stand_ins.folder / "own-0.log").mkdir()
    server = LocalServer(stand_ins.spec(), 0, folder=stand_ins.folder)
    with pytest.raises(ServerFailed) as failed:
        await server.start()
    assert failed.value.problem == f"its log {stand_ins.folder}/own-0.log cannot be written (Is a directory)"
    await server.stop()


async def test_a_server_that_refuses_to_stop_ends_with_all_that_it_has_started(stand_ins):
    pool = pool_of(stand_ins, stand_ins.spec("stubborn", "children=2", stop_within_s=0.3))
    await pool.start()
    assert len(stand_ins.living()) == 3
    began = time.monotonic()
    await pool.stop()
    assert time.monotonic() - began >= 0.3
    assert stand_ins.living() == []


async def test_a_replica_that_dies_is_started_again_with_its_children_gone(stand_ins, monkeypatch):
    monkeypatch.setattr("qreward_plugins.replicas.pool._BACKOFF_S", (0.05, 0.1))
    seen = []
    spec = stand_ins.spec("children=1", replicas=2, restarts=1)
    pool = pool_of(stand_ins, spec, on_change=lambda: seen.append(tuple(state.state for state in pool.states)))
    await pool.start()
    first, second = pool.states
    before = stand_ins.living()
    os.kill(int(stand_ins.pids_file.read_text().split()[0]), signal.SIGKILL)
    await comes(lambda: sum(state.restarts for state in pool.states) == 1 and all(state.url for state in pool.states))
    assert {first.url, second.url} & {state.url for state in pool.states}
    assert len(stand_ins.living()) == len(before)
    assert any("down" in states for states in seen)
    again = next(state for state in pool.states if state.restarts)
    # Both the server and its child are killed. The guard of a killed server kills the child, too, and may come first.
    for pid in stand_ins.living():
        if pid not in before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    await comes(lambda: pool.states[again.number].state == "failed")
    assert pool.states[again.number].problem == "it ended (by SIGKILL: perhaps memory ran out)"
    assert pool.states[1 - again.number].state == "up"
    await pool.stop()


async def test_cancelling_a_start_leaves_nothing(stand_ins):
    pool = pool_of(stand_ins, stand_ins.spec("never", "children=1"))
    starting = asyncio.ensure_future(pool.start())
    await comes(lambda: len(stand_ins.living()) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert stand_ins.living() == []


@pytest.mark.parametrize("victim", ["starter", "guard", "watcher"])
async def test_no_process_outlives_a_kill(stand_ins, victim):
    """Kill -9 of the process that started a server, of its guard (which Ray does), or of the watcher below."""
    program = """
        import asyncio, os, sys, time
        from pathlib import Path
        from qreward_plugins.replicas import PoolSpec
        from qreward_plugins.replicas.launch import LocalServer

        async def main():
            spec = PoolSpec.from_json(sys.argv[1].encode())
            server = LocalServer(spec, 0, folder=Path(sys.argv[2]))
            await server.start()
            if os.fork() == 0:  # a child that has all descriptors, as a data loader has
                time.sleep(20)
                os._exit(0)
            print(os.getpid(), server.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    spec = stand_ins.spec("stubborn", "children=1", stop_within_s=0.2)
    starter = started(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            textwrap.dedent(program),
            spec.to_json().decode(),
            str(stand_ins.folder),
        ],
    )
    try:
        pid, guard = map(int, starter.stdout.readline().split())
        (watcher,) = children_of(guard)
        assert len(stand_ins.living()) == 2
        os.kill({"starter": pid, "guard": guard, "watcher": watcher}[victim], signal.SIGKILL)
        await comes(lambda: not stand_ins.living() and not lives(guard) and not lives(watcher))
    finally:
        os.killpg(starter.pid, signal.SIGKILL)
        starter.stdout.close()
        starter.wait()


def test_a_spec_travels_as_json_and_its_repr_shows_no_environment():
    topology = Topology(2, 2, (0, "GPU-b", 2, 3), "cuda")
    arguments = {"x": [1], "seed": 2**64, "bias": float("inf"), "tool_token": "tt_secret"}
    spec = PoolSpec("a b", "vllm", "m", topology, arguments=arguments, environment={"HF_TOKEN": "hf_secret"})
    assert PoolSpec.from_json(spec.to_json()) == spec
    assert "secret" not in repr(spec) + repr(spec.launch("n", "h", 1))
    assert spec.file_name == "a_b"
    assert spec.key == PoolSpec.from_json(spec.to_json()).key != PoolSpec("a", "vllm", "m", topology).key


async def test_a_log_is_bounded(stand_ins, monkeypatch):
    monkeypatch.setattr("qreward_plugins.replicas.launch.LOG_BYTES", 10_000)
    loud = ("sh", "-c", "while :; do echo a line of this log of {name} {port}; done")
    server = LocalServer(stand_ins.spec(command=loud, stop_within_s=0.2), 0, folder=stand_ins.folder)
    starting = asyncio.ensure_future(server.start())
    await comes(lambda: (stand_ins.folder / "own-0.log.1").exists())
    starting.cancel()
    await asyncio.wait([starting])
    await server.stop()
    assert sum(path.stat().st_size for path in stand_ins.folder.glob("*.log*")) < 200_000
    assert len(server.log_tail().splitlines()) <= 30


@pytest.mark.parametrize("hanging", ["guard", "watcher"])
async def test_a_guard_or_watcher_that_hangs_keeps_nothing_alive(stand_ins, monkeypatch, hanging):
    monkeypatch.setattr("qreward_plugins.replicas.launch._GUARD_S", 0.2)
    server = LocalServer(stand_ins.spec("stubborn", "children=1", stop_within_s=0.1), 0, folder=stand_ins.folder)
    await server.start()
    (watcher,) = children_of(server.pid)
    os.kill({"guard": server.pid, "watcher": watcher}[hanging], signal.SIGSTOP)
    await server.stop()
    await comes(lambda: not stand_ins.living() and not lives(server.pid) and not lives(watcher))


async def test_a_server_that_hangs_in_its_sleep_is_stopped_long_before_a_start_would_fail(stand_ins, monkeypatch):
    """A trainer waits for its devices."""
    monkeypatch.setattr("qreward_plugins.replicas.operations.SLEEP_WITHIN_S", 0.2)
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


def test_a_log_never_keeps_the_watcher_from_its_other_work(tmp_path):
    """A server that writes faster than its disk takes it, and a folder that somebody removes."""
    folder = tmp_path / "logs"
    folder.mkdir()
    log = guard._Log(str(folder / "own-0.log"), 100_000)
    endless = os.open("/dev/zero", os.O_RDONLY)
    assert log.copy(endless)
    (folder / "own-0.log").unlink()
    assert log.copy(endless)
    os.close(endless)
    log.write(b"more")
    os.close(log._file)


async def test_a_stop_just_when_a_restart_has_succeeded_ends(stand_ins, monkeypatch):
    """`asyncio.wait_for` loses a cancellation that comes after its task has ended (before Python 3.12)."""
    monkeypatch.setattr("qreward_plugins.replicas.pool._BACKOFF_S", (0.0, 0.0))
    starts, stops = [], []

    class Fake:
        url = ""

        async def start(self, weights):
            starts.append(self)
            self.url = f"http://127.0.0.1:{len(starts)}"
            return self.url

        async def ended(self):
            if len(starts) > 1:
                await asyncio.Event().wait()
            return ServerFailed("it ended")

        async def stop(self):
            pass

    def on_change():
        if pool.states[0].restarts == 1 and pool.states[0].url and not stops:
            stops.append(asyncio.ensure_future(pool.stop()))

    pool = Pool(stand_ins.spec(), lambda number: Fake(), on_change)
    await pool.start()
    await comes(lambda: stops)
    done, _ = await asyncio.wait(stops, timeout=5)
    assert done
    assert pool.states[0].state == "stopped"


async def test_a_restart_that_raises_is_tried_again(stand_ins, monkeypatch):
    """Such as one for which there is no free port."""
    monkeypatch.setattr("qreward_plugins.replicas.pool._BACKOFF_S", (0.0, 0.0))
    starts = []

    class Fake:
        url = ""

        async def start(self, weights=None):
            starts.append(self)
            if len(starts) == 2:
                raise OSError("no free port")
            self.url = f"http://127.0.0.1:{len(starts)}"
            return self.url

        async def ended(self):
            if len(starts) > 2:
                await asyncio.Event().wait()
            return ServerFailed("it ended")

        async def stop(self):
            pass

    pool = Pool(stand_ins.spec(), lambda number: Fake())
    await pool.start()
    await comes(lambda: pool.states[0].restarts == 2 and pool.states[0].url)
    assert pool.states[0].state == "up"
    await pool.stop()
