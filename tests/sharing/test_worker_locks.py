"""What the lock of a worker proves, and to whom."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from qreward_plugins.sharing import worker_locks
from qreward_plugins.sharing.worker_locks import WorkerLock, not_dead, state

HOLDS = """
import os, sys, time
from pathlib import Path
from qreward_plugins.sharing.worker_locks import WorkerLock
held = WorkerLock.hold(Path(sys.argv[1]), "w")
if sys.argv[2] == "forks":
    forked, forks = os.pipe()
    if not os.fork():
        os.write(forks, b".")
        time.sleep(600)
        os._exit(0)
    os.read(forked, 1)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def hold(directory, how=""):
    """Return a process that holds the lock of `w`."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDS, os.fspath(directory), how], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert int(process.stdout.readline()) == process.pid
    return process


def end(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_worker_lives_until_its_process_is_killed(tmp_path):
    process = hold(tmp_path)
    assert state(tmp_path, "w") == "alive"
    assert not_dead(tmp_path) == {"w"}
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has asked how it ended
    assert state(tmp_path, "w") == "dead"
    assert not_dead(tmp_path) == frozenset()
    assert os.listdir(tmp_path / "workers") == []
    end(process)


def test_a_stopped_process_lives(tmp_path):
    process = hold(tmp_path)
    process.send_signal(signal.SIGSTOP)
    assert state(tmp_path, "w") == "alive"
    end(process)


def test_a_forked_child_is_no_sign_of_life(tmp_path):
    process = hold(tmp_path, "forks")
    process.kill()
    process.wait()
    assert state(tmp_path, "w") == "dead"
    end(process)


def test_its_own_process_sees_that_it_lives(tmp_path):
    held = WorkerLock.hold(tmp_path, "w")
    assert state(tmp_path, "w") == "alive"
    with pytest.raises(BlockingIOError):
        WorkerLock.hold(tmp_path, "w")
    held.release()
    assert state(tmp_path, "w") == "unknown"
    WorkerLock.hold(tmp_path, "w").release()


def test_what_a_dead_one_left_is_in_nobody_s_way(tmp_path):
    WorkerLock.hold(tmp_path, "w").close()
    held = WorkerLock.hold(tmp_path, "w")
    assert held.refresh()
    held.release()


def test_a_removed_file_proves_nothing(tmp_path):
    held = WorkerLock.hold(tmp_path, "w")
    (tmp_path / "workers" / "w.lock").unlink()
    assert not held.refresh()
    assert state(tmp_path, "w") == "unknown"
    other = WorkerLock.hold(tmp_path, "w")
    held.release()
    assert state(tmp_path, "w") == "alive"
    other.release()


def test_a_file_that_is_replaced_while_it_is_looked_at_is_left_alone(tmp_path, monkeypatch):
    WorkerLock.hold(tmp_path, "w").close()
    held = []

    def late(descriptor, operation):
        monkeypatch.undo()
        assert state(tmp_path, "w") == "dead"  # another process has looked meanwhile
        held.append(WorkerLock.hold(tmp_path, "w"))
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(worker_locks, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": late}))
    assert state(tmp_path, "w") == "unknown"
    assert held[0].refresh()
    assert state(tmp_path, "w") == "alive"
    held[0].release()


def test_a_file_that_cannot_be_marked_is_still_in_place(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    held = WorkerLock.hold(tmp_path, "w")
    with monkeypatch.context() as patch:
        patch.setattr(worker_locks.os, "utime", fails)
        assert held.refresh()
    held.release()


@pytest.mark.parametrize("name", ["", "../keeper.1", "a/b", "x" * 65])
def test_a_name_that_is_no_file_is_unknown(tmp_path, name):
    assert state(tmp_path, name) == "unknown"
    with pytest.raises(OSError, match="no name of a file"):
        WorkerLock.hold(tmp_path, name)
