"""Locks the files of pools in the private directory, and removes what pools have left there.

A lock file is removed only under its own lock. Whoever waited for that lock gets it for a file that is gone. So after
locking, a process looks whether the file is still in its place, and opens it again if not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..system.private_directory import is_in_place
from .sleep_record import SleepRecord

_KEY = "[0-9a-f]{16}"
_LOCK = re.compile(rf"{_KEY}\.(lock|pool)")
_SOCKET = re.compile(rf"({_KEY})\.sock")


def lock(path: Path) -> int:
    """Lock the file at `path`, which is made if it does not exist. Return its descriptor; closing it frees the lock.

    Blocks until the lock is free. Raises OSError.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_in_place(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file at `path`; see `lock`."""
    descriptor = lock(path)
    try:
        yield
    finally:
        _release(descriptor)


def remove_left(folder: Path) -> None:
    """Remove the files of pools whose processes were killed, and all lock files that no process holds."""
    with suppress(OSError):
        names = os.listdir(folder)
        for found in filter(None, map(_SOCKET.fullmatch, names)):
            _remove_pool(folder, found[1])
        for name in filter(_LOCK.fullmatch, os.listdir(folder)):
            _remove(folder / name)


def remove_files(folder: Path, key: str) -> None:
    """Remove the socket of a pool that has ended, its output and the logs of its servers, and what was half written.
    The caller holds `KEY.lock`, so that no process starts such a pool meanwhile.
    """
    shutil.rmtree(folder / f"{key}-logs", ignore_errors=True)
    for path in (*folder.glob(f"{key}.*.part"), folder / f"{key}.log", folder / f"{key}.sock"):
        with suppress(OSError):
            path.unlink()


def _remove_pool(folder: Path, key: str) -> None:
    """Remove the files of a pool if its process and its guards have ended, and nobody is about to start it."""
    with suppress(OSError), _locked_now(folder / f"{key}.lock") as nobody_starts_it:
        if nobody_starts_it and not listens(folder / f"{key}.sock"):
            with _locked_now(folder / f"{key}.pool") as has_ended:
                if has_ended:
                    remove_files(folder, key)
                    SleepRecord(folder / f"{key}.asleep").remove_spent()


def listens(path: Path) -> bool:
    """Whether a process listens at a Unix socket, also one that hangs. It does not block."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.setblocking(False)
        return channel.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


@contextmanager
def _locked_now(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, which is made if it does not exist, unless somebody else does. It does not block."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        got = is_in_place(descriptor, path)
    except OSError:
        got = False
    try:
        yield got
    finally:
        if got:
            _release(descriptor)
        else:
            os.close(descriptor)


def _remove(path: Path) -> None:
    with suppress(OSError), _locked_now(path) as nobody_holds_it:
        if nobody_holds_it:
            path.unlink()


def _release(descriptor: int) -> None:
    # A child that was forked meanwhile has the descriptor, too. Closing ours would leave it the lock.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
