"""What processes of one machine share: one pool, which ends with its last user."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import anyio
import pytest
from pools import comes, lives, parent_of

from qreward_plugins.replicas import local_pool_use, pool_process, pool_use
from qreward_plugins.replicas.local_pool_use import LocalPoolUse
from qreward_plugins.replicas.pool import ChangeFailed, PoolFailed
from qreward_plugins.replicas.pool_process import PoolProcess
from qreward_plugins.replicas.pool_use import PoolUse
from qreward_plugins.replicas.sleep_record import SleepRecord
from qreward_plugins.replicas.weights import Weights
from qreward_plugins.system.processes import ProcessMark, machine

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(shared_directory):
    return shared_directory


def running(program, *arguments):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), *arguments], stdout=subprocess.PIPE)


async def test_processes_share_one_pool_which_ends_with_the_last_of_them(stand_ins, folder):
    spec = stand_ins.spec(replicas=2, directory=str(folder))
    program = """
        import asyncio, sys
        from qreward_plugins.replicas.spec import PoolSpec
        from qreward_plugins.replicas.local_pool_use import LocalPoolUse

        async def main():
            use = LocalPoolUse(PoolSpec.from_json(sys.argv[1].encode()))
            await use.start()
            print(sorted(state.url for state in use.states), flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    use = LocalPoolUse(spec)
    other = running(program, spec.to_json().decode())
    try:
        await use.start()
        theirs = await asyncio.to_thread(other.stdout.readline)
        assert theirs.decode().strip() == str(sorted(state.url for state in use.states))
        assert len(stand_ins.living()) == 2
        await use.aclose()
        await use.aclose()
        assert len(stand_ins.living()) == 2  # the other process uses them still
    finally:
        other.kill()
        other.stdout.close()
        other.wait()
    await comes(lambda: not stand_ins.living() and not list(folder.glob("*-logs")))


async def test_the_last_one_waits_until_all_has_ended(stand_ins, folder):
    use = LocalPoolUse(stand_ins.spec("children=1"))
    await use.start()
    await use.aclose()
    assert stand_ins.living() == []
    with pytest.raises(PoolFailed, match="it is closed"):
        await use.start()
    again = LocalPoolUse(stand_ins.spec("children=1"))
    await again.start()
    (folder / "0123456789abcdef.pool").touch()  # of a pool that was killed
    await again.aclose()
    await comes(lambda: not list(folder.glob("*.sock")) and not [*folder.glob("*.lock"), *folder.glob("*.pool")])


async def test_users_that_come_at_the_same_time_start_it_once(stand_ins):
    uses = [LocalPoolUse(stand_ins.spec()) for _ in range(8)]
    await asyncio.gather(*(use.start() for use in uses))
    assert len(stand_ins.living()) == 1
    assert len({use.states[0].url for use in uses}) == 1
    await asyncio.gather(*(use.aclose() for use in uses))
    assert stand_ins.living() == []


async def test_all_users_are_told_why_a_start_failed(stand_ins):
    uses = [LocalPoolUse(stand_ins.spec("exit=1")) for _ in range(2)]
    results = await asyncio.gather(*(use.start() for use in uses), return_exceptions=True)
    for result in results:
        assert isinstance(result, PoolFailed)
        assert "replica 0: it ended before it was ready (exit code 1)" in str(result)
        assert "no memory for the weights" in result.log
    await asyncio.gather(*(use.aclose() for use in uses))


async def test_a_user_hears_of_a_replica_that_died(stand_ins):
    use = LocalPoolUse(stand_ins.spec(replicas=2, restarts=0))
    await use.start()
    os.kill(stand_ins.living()[0], signal.SIGKILL)
    await comes(lambda: sorted(state.state for state in use.states) == ["failed", "up"])
    assert sum(bool(state.url) for state in use.states) == 1
    await use.aclose()


async def test_a_pool_whose_process_is_killed_is_started_again(stand_ins, folder):
    use = LocalPoolUse(stand_ins.spec())
    await use.start()
    first = stand_ins.living()
    os.kill(parent_of(first[0], 3), signal.SIGKILL)
    await comes(lambda: stand_ins.living() and stand_ins.living() != first and use.states and use.states[0].url)
    assert not lives(first[0])
    await use.aclose()


async def test_a_pool_that_is_killed_asleep_sleeps_on_whoever_comes_first(stand_ins, folder, monkeypatch):
    """A trainer uses the devices. A process that has just come knows nothing of it, and may be the first to connect."""
    knows, new = LocalPoolUse(stand_ins.spec()), LocalPoolUse(stand_ins.spec())
    await knows.start()
    pool = parent_of(stand_ins.living()[0], 3)
    await knows.sleep()
    assert stand_ins.living() == []
    connects, may_connect = knows._connect, threading.Event()

    def late():
        may_connect.wait(60)
        return connects()

    monkeypatch.setattr(knows, "_connect", late)
    os.kill(pool, signal.SIGKILL)
    await comes(lambda: not knows.states)
    await new.start()
    assert [state.state for state in new.states] == ["asleep"]
    assert stand_ins.living() == []
    may_connect.set()
    await comes(lambda: knows.states)
    await knows.wake_up()
    assert len(stand_ins.living()) == 1
    assert list(folder.glob("*.asleep")) == []
    for use in (knows, new):
        await use.aclose()


def test_a_pool_sleeps_on_only_for_a_process_that_still_runs(folder):
    path = folder / "key.asleep"
    record, me = SleepRecord(path), ProcessMark.of(os.getpid())
    record.write([me])
    assert SleepRecord(path).holds()
    record.write([ProcessMark(me.pid, me.started + 1)])  # it had ended, and its number was given to this process
    assert not SleepRecord(path).holds()
    record.write([me])
    path.write_bytes(path.read_bytes().replace(machine().encode(), b"another machine"))
    assert not SleepRecord(path).holds()
    for text in (b"", b"{}", b"[]"):
        path.write_bytes(text)
        assert not SleepRecord(path).holds()
    record.clear()
    record.clear()
    assert not SleepRecord(path).holds()


async def test_whoever_joins_servers_that_sleep_is_told(stand_ins, caplog):
    """The process that let them sleep may have crashed, while `qreward serve-judge` keeps them."""
    first, second, colocated, looking = (LocalPoolUse(stand_ins.spec()) for _ in range(4))
    colocated.wakes = True
    await first.start()
    await first.sleep()
    assert caplog.messages == []
    await colocated.start()
    await looking.find()
    assert caplog.messages == []
    await second.start()
    (said,) = caplog.messages
    assert said.startswith("source own: its servers sleep")
    assert "`qreward pool wake`" in said
    for use in (first, second, colocated, looking):
        await use.aclose()


async def test_a_message_of_another_version_keeps_no_pool_from_its_end(stand_ins, folder, monkeypatch):
    use, other = LocalPoolUse(stand_ins.spec()), LocalPoolUse(stand_ins.spec())
    await use.start()
    with monkeypatch.context() as patched:
        patched.setattr("qreward_plugins.replicas.weights.Weights.as_mapping", lambda weights: {"later": 1})
        with pytest.raises(PoolFailed, match="the same version of qreward-plugins"):
            await other.start()
    with pytest.raises(ChangeFailed, match="unknown command 'later'"):
        await use._command("later", {})
    await other.aclose()
    await use.aclose()
    assert stand_ins.living() == []
    assert list(folder.iterdir()) == []


async def test_a_pool_that_hangs_does_not_block_the_event_loop(stand_ins):
    """Calls end there, and are reported, while another thread sends what the pool does not read."""
    use = LocalPoolUse(stand_ins.spec())
    await use.start()
    pool = parent_of(stand_ins.living()[0], 3)
    os.kill(pool, signal.SIGSTOP)
    sending = threading.Thread(target=use.send, args=[{"idle": [], "padding": "x" * 8_000_000}])
    sending.start()
    at_last = threading.Timer(30, os.kill, [pool, signal.SIGCONT])
    at_last.start()
    try:
        await comes(use._sending.locked)
        use._drained([(0, 1)])
        use._drained([(0, 2)])
        assert sending.is_alive()
    finally:
        at_last.cancel()
        os.kill(pool, signal.SIGCONT)
    await asyncio.to_thread(sending.join)
    await comes(lambda: not use._sends_idle)
    await use.aclose()
    assert stand_ins.living() == []


def test_a_record_that_cannot_be_written_leaves_no_part(folder):
    path = folder / "key.asleep"
    path.mkdir()
    SleepRecord(path).write([ProcessMark.of(os.getpid())])
    assert list(folder.iterdir()) == [path]


async def stopped(pid: int) -> None:
    """Stop a process, and wait until the system says so."""
    os.kill(pid, signal.SIGSTOP)
    await comes(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


async def test_a_pool_that_is_stopped_is_named_and_not_replaced(stand_ins, monkeypatch, caplog):
    """By Ctrl-Z, a debugger or SIGSTOP: it has its devices still."""
    spec = stand_ins.spec(stop_within_s=0.1)
    use, other, finds = (LocalPoolUse(spec) for _ in range(3))
    await use.start()
    (server,) = stand_ins.living()
    pool = parent_of(server, 3)
    for name in ("_SILENT_S", "_FOUND_WITHIN_S"):
        monkeypatch.setattr(pool_use, name, 0.2)
    for name in ("_START_SAID_AFTER_S", "_SEARCH_SAID_AFTER_S"):
        monkeypatch.setattr(pool_use, name, 0.1)
    await stopped(pool)
    path = local_pool_use.private_directory() / f"{use.spec.key}.sock"
    said = rf"the process {pool} of its pool \({path}\) has answered nothing for 0\.[23] s\. "
    said += f"It is stopped: let it go on with `kill -CONT {pool}`, or end it, and its servers, with `kill -9 {pool}`"
    for search in (finds.find, other.start):
        with pytest.raises(PoolFailed, match=said):
            await search()
    assert f"waiting for an answer of the process {pool} of its pool ({path}), at most 0.2 s" in caplog.text
    for each in (finds, other):
        await each.aclose()  # it does not wait for a pool that hangs
    assert stand_ins.living() == [server]
    os.kill(pool, signal.SIGCONT)
    again = LocalPoolUse(spec)
    monkeypatch.setattr(pool_use, "_SILENT_S", 60.0)
    await again.start()
    assert stand_ins.living() == [server]
    await stopped(pool)
    monkeypatch.setattr(pool_use, "_ENDED_WITHIN_S", -again.spec.stop_within_s)
    await again.aclose()
    assert f"the process {pool} of its pool ({path}) has not ended its servers within 0 s. It is stopped" in caplog.text
    os.kill(pool, signal.SIGCONT)
    monkeypatch.setattr(pool_use, "_ENDED_WITHIN_S", 150.0)
    await use.aclose()
    assert stand_ins.living() == []


async def test_a_search_names_a_pool_that_answers_nothing(stand_ins, monkeypatch):
    """It may be the one that is meant, with other devices than this process sees."""
    use, finds = LocalPoolUse(stand_ins.spec()), LocalPoolUse(stand_ins.spec(restarts=1))
    await use.start()
    pool = parent_of(stand_ins.living()[0], 3)
    monkeypatch.setattr(local_pool_use, "_DESCRIBED_WITHIN_S", 0.2)
    os.kill(pool, signal.SIGSTOP)
    said = (
        rf"no servers of it run .*; the process {pool} of its pool \(.*\.sock\) answers nothing\. It is stopped: let it"
    )
    with pytest.raises(PoolFailed, match=said):
        await finds.find()
    os.kill(pool, signal.SIGCONT)
    for each in (finds, use):
        await each.aclose()


async def test_a_child_that_is_forked_during_the_start_does_not_answer_for_the_pool(stand_ins, folder, monkeypatch):
    """Workers of a data loader are forked at any time, and live as long as the training."""
    children, popen = [], subprocess.Popen
    end, held = os.pipe()

    def forks(*words, **how):
        child = os.fork()
        if child == 0:
            os.close(held)
            os.read(end, 1)
            os._exit(0)
        children.append(child)
        return popen(*words, **how)

    monkeypatch.setattr(local_pool_use.subprocess, "Popen", forks)
    use = LocalPoolUse(stand_ins.spec())
    try:
        await use.start()
        monkeypatch.undo()
        monkeypatch.setattr("qreward_plugins.system.private_directory.USUAL", str(folder))
        (first,) = stand_ins.living()
        os.kill(parent_of(first, 3), signal.SIGKILL)
        # Another server: the use has lost the first pool.
        await comes(lambda: stand_ins.living() not in ([], [first]) and use.states and use.states[0].state == "up")
        await use.aclose()
        assert list(folder.iterdir()) == []
    finally:
        os.close(held)
        await asyncio.to_thread(lambda: [os.waitpid(child, 0) for child in children])
        os.close(end)


async def test_closing_during_the_start_leaves_nothing(stand_ins):
    use = LocalPoolUse(stand_ins.spec("never"))
    starting = asyncio.ensure_future(use.start())
    await comes(stand_ins.living)
    await use.aclose()
    with pytest.raises(PoolFailed):
        await starting
    assert stand_ins.living() == []


async def test_processes_with_other_variables_come_to_the_same_pool(stand_ins, monkeypatch, tmp_path):
    """As a login shell and a worker of Ray of one user."""
    uses = []
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
        uses.append(LocalPoolUse(stand_ins.spec()))
        await uses[-1].start()
    assert len(stand_ins.living()) == 1
    await asyncio.gather(*(use.aclose() for use in uses))


async def test_a_folder_that_others_may_enter_starts_nothing(stand_ins, folder):
    folder.chmod(0o755)
    use = LocalPoolUse(stand_ins.spec())
    with pytest.raises(PoolFailed, match=r"engine\.shared_directory: .* is not private.*chmod 700"):
        await use.start()
    assert list(folder.iterdir()) == []


async def test_a_pool_of_another_user_gets_no_spec(stand_ins, folder, monkeypatch):
    """Its spec holds the variables of the servers, which may be secrets."""
    spec = stand_ins.spec()
    monkeypatch.setattr(local_pool_use, "is_own_user", lambda peer: False)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / f"{spec.key}.sock"))
        listening.listen()
        assert local_pool_use._connected(folder / f"{spec.key}.sock") is None
        theirs, _ = listening.accept()
        with theirs:
            assert theirs.recv(1) == b""


async def test_the_files_of_a_pool_stay_young(folder, monkeypatch):
    """Systems remove files from /tmp that are some days old, and a training may take longer."""
    (folder / "other.lock").touch()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "key.sock"))
    listening.listen()
    for name in ("key.sock", "other.lock"):
        os.utime(folder / name, (0, 0))
    monkeypatch.setattr(pool_process, "_TOUCH_EVERY_S", 0.01)
    pool = PoolProcess(listening, folder, "key")
    running = asyncio.ensure_future(pool.run())
    await comes(lambda: (folder / "key.sock").stat().st_mtime > 0)
    pool._unused.set()
    await running
    assert (folder / "other.lock").stat().st_mtime == 0


async def test_a_pool_that_says_nothing_ends_the_wait(stand_ins, monkeypatch):
    class Hanging(PoolUse):
        """A pool whose process is stopped (SIGSTOP)."""

        end = threading.Event()

        def follow(self):
            self.end.wait(30)

        def leave(self, *, at_once=False):
            self.end.set()

        def send(self, message):
            pass

    monkeypatch.setattr("qreward_plugins.replicas.pool_use._SILENT_S", 0.0)
    use = Hanging(stand_ins.spec(start_within_s=0.05, stop_within_s=0.05))
    with pytest.raises(
        PoolFailed, match=r"its pool has answered nothing for 0\.05 s\. Nothing was started in its place"
    ):
        await use.start()
    use._reported.set()  # it has answered, and hangs during the start
    with pytest.raises(PoolFailed, match=r"its pool has not ended its start within 0\.1 s"):
        await use.start()
    await use.aclose()
    assert use.ended


async def test_a_user_that_leaves_while_the_pool_takes_its_lock_leaves_no_file(stand_ins, folder):
    spec = stand_ins.spec(directory=str(folder))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / f"{spec.key}.sock"))
    listening.listen()
    running = asyncio.create_task(PoolProcess(listening, folder, spec.key).run())
    reader, writer = await asyncio.open_unix_connection(str(folder / f"{spec.key}.sock"))
    known = {"weights": Weights().as_mapping(), "asleep": False, "starts": True}
    writer.write(spec.to_json() + b"\n" + json.dumps(known).encode() + b"\n")
    writer.write_eof()
    await reader.read()
    await running
    writer.close()
    assert list(folder.iterdir()) == []


async def test_a_pool_that_cannot_take_its_lock_says_so(stand_ins, folder):
    spec = stand_ins.spec(directory=str(folder))
    (folder / f"{spec.key}.pool").mkdir()
    use = LocalPoolUse(spec)
    with anyio.fail_after(20), pytest.raises(PoolFailed, match=r"the pool cannot be started \(IsADirectoryError"):
        await use.start()
    await use.aclose()


async def test_a_start_without_room_for_a_file_leaves_none(stand_ins, folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_pool_use, "_start_process", full)
    use = LocalPoolUse(stand_ins.spec(directory=str(folder)))
    with pytest.raises(PoolFailed, match=r"no process can be started .No space left on device"):
        await use.start()
    await use.aclose()
    assert list(folder.iterdir()) == []
