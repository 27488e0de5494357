"""Lock files of pools: one holder at a time, also while others remove the files, and no file without a holder stays."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

from qreward_plugins.replicas.lock_files import lock, remove_unheld

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
    remove_unheld(tmp_path)
    assert path.exists()
    assert not pool.exists()
    assert all(one.exists() for one in others)
    os.close(held)
    remove_unheld(tmp_path)
    assert not path.exists()
    remove_unheld(tmp_path / "gone")


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
            remove_unheld(tmp_path)
        done.append(None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(done), max(most)) == (4, 1)
    remove_unheld(tmp_path)
    assert list(tmp_path.iterdir()) == []
