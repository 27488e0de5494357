"""Lock files of pools: one holder at a time, also while others remove the files, and no file without a holder stays."""

from __future__ import annotations

import fcntl
import os
import socket
import threading

import pytest

from qreward_plugins.replicas.lock_files import lock, locked, remove_left
from qreward_plugins.replicas.sleep_record import SleepRecord
from qreward_plugins.system.processes import ProcessMark

KEY = "0123456789abcdef"


@pytest.fixture
def path(tmp_path):
    return tmp_path / f"{KEY}.lock"


def test_only_files_of_pools_that_nobody_holds_are_removed(tmp_path, path):
    held = lock(path)
    pool = tmp_path / f"{KEY}.pool"
    others = [tmp_path / name for name in (f"{KEY}.log", "other.lock", "keeper.1.lock", "w.pool", f"{KEY}.lock.part")]
    for one in (pool, *others):
        one.touch()
    (tmp_path / "fedcba9876543210.lock").symlink_to(others[0])
    remove_left(tmp_path)
    assert path.exists()
    assert not pool.exists()
    assert all(one.exists() for one in others)
    os.close(held)
    remove_left(tmp_path)
    assert not path.exists()
    remove_left(tmp_path / "gone")


def killed_pool(folder):
    """The files of a pool whose process was killed while it slept, and their names."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / f"{KEY}.sock"))
    (folder / f"{KEY}-logs").mkdir()
    (folder / f"{KEY}-logs" / "own-0.log").write_text("of a server")
    for end in ("log", "lock", "pool", "0-1.server.part"):
        (folder / f"{KEY}.{end}").touch()
    SleepRecord(folder / f"{KEY}.asleep").write([ProcessMark(os.getpid(), 0)])
    return sorted(path.name for path in folder.iterdir())


def test_the_files_of_a_pool_that_was_killed_are_removed(shared_directory):
    killed_pool(shared_directory)
    remove_left(shared_directory)
    assert list(shared_directory.iterdir()) == []


@pytest.mark.parametrize("why", ["it hangs", "it is started", "a guard runs"])
def test_the_files_of_a_pool_that_may_be_used_stay(shared_directory, why):
    names = killed_pool(shared_directory)
    held, path = -1, shared_directory / f"{KEY}.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        if why == "it hangs":
            path.unlink()
            listening.bind(str(path))
            listening.listen(1)
        else:
            held = lock(path.with_suffix(".lock" if why == "it is started" else ".pool"))
        for _ in range(5):  # more than its backlog
            remove_left(shared_directory)
        left = {one.name for one in shared_directory.iterdir()}
        # Those that nobody holds are made again.
        assert left >= {name for name in names if not name.endswith((".lock", ".pool"))}
    if held >= 0:
        os.close(held)


def test_a_pool_that_was_killed_asleep_still_sleeps_for_its_users(shared_directory):
    killed_pool(shared_directory)
    record = SleepRecord(shared_directory / f"{KEY}.asleep")
    record.write([ProcessMark.of(os.getpid())])
    remove_left(shared_directory)
    assert record.holds()
    assert [path.name for path in shared_directory.iterdir()] == [f"{KEY}.asleep"]


def test_a_child_that_is_forked_meanwhile_does_not_keep_the_lock(path):
    end, held = os.pipe()
    with locked(path):
        child = os.fork()
        if child == 0:
            os.close(held)
            os.read(end, 1)
            os._exit(0)
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(held)
        os.waitpid(child, 0)
        os.close(end)


def test_whoever_waited_for_a_file_that_was_removed_locks_the_one_in_its_place(path, monkeypatch):
    first, waiting, got = lock(path), threading.Event(), []
    flock = fcntl.flock

    def noted(descriptor, how):
        if threading.current_thread() is not threading.main_thread():
            waiting.set()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", noted)
    thread = threading.Thread(target=lambda: got.append(lock(path)))
    thread.start()
    assert waiting.wait(10)
    path.unlink()
    second = lock(path)  # the file in its place, of another process
    os.close(first)
    thread.join(0.2)
    assert not got, "two hold the lock at once"
    os.close(second)
    thread.join(10)
    (third,) = got
    assert os.fstat(third).st_ino == path.stat().st_ino
    os.close(third)


def test_many_that_lock_and_remove_are_never_two_at_once(tmp_path, path):
    inside, most, done = [], [], []

    def work():
        for _ in range(50):
            held = lock(path)
            inside.append(None)
            most.append(len(inside))
            inside.pop()
            os.close(held)
            remove_left(tmp_path)
        done.append(None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(done), max(most)) == (4, 1)
    remove_left(tmp_path)
    assert list(tmp_path.iterdir()) == []
