"""Proves that a worker of this machine is dead, by a lock that it holds on a file of its own as long as it lives.

The kernel frees the lock when the last thread of the process has ended, however it ended. From then on the process can
send nothing. A closed connection proves less: the process may have closed its event loop only. So does a process ID: it
is used again, is another one in another container, and a dead child keeps it until its parent asks.

A worker locks `workers/NAME.lock` before its first report and removes the file when it leaves. So the files of a
directory name every worker that may hold a share. A process that was forked without Python's fork handlers holds the
lock, too: then the worker counts as alive, and its share ends with its time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ..system.private_directory import is_in_place

_DIRECTORY = "workers"
_SUFFIX = ".lock"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class WorkerLock:
    """The held lock of one worker. `hold` makes one."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        _held.add(self)

    @classmethod
    def hold(cls, directory: Path, worker: str) -> WorkerLock:
        """Make the file of a worker and lock it. Raises OSError, also if another process holds it."""
        path = _path(directory, worker)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if state(directory, worker) == "alive":
            raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock", os.fspath(path))
        # The file gets its name when it is locked, or a keeper might take its worker for dead.
        made = path.with_name(f"{secrets.token_hex(8)}.part")
        descriptor = os.open(made, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(made, path)
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            made.unlink(missing_ok=True)
        return cls(path, descriptor)

    def refresh(self) -> bool:
        """Return whether the file is still in place, and mark it as used, for programs that remove old files."""
        with suppress(OSError):
            os.utime(self._descriptor)
        return is_in_place(self._descriptor, self._path)

    def release(self) -> None:
        """Remove the file and free the lock."""
        if self._descriptor >= 0 and self.refresh():
            with suppress(OSError):
                self._path.unlink()
        self.close()

    def close(self) -> None:
        """Free the lock, or this process's part of it after a fork. The file stays."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def state(directory: Path, worker: str) -> Literal["alive", "dead", "unknown"]:
    """Return what the lock of a worker proves; `unknown` if it has no file. Removes the file of a dead one."""
    try:
        path = _path(directory, worker)
        descriptor = os.open(path, _FLAGS)
    except OSError:
        return "unknown"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_in_place(descriptor, path):
            return "unknown"  # the file was replaced after it was opened
        path.unlink()
    except BlockingIOError:
        return "alive"
    except OSError:
        return "unknown"
    finally:
        os.close(descriptor)
    return "dead"


def named(directory: Path) -> frozenset[str]:
    """Return the workers that have a file. Raises OSError if the directory cannot be read."""
    try:
        files = os.listdir(directory / _DIRECTORY)
    except FileNotFoundError:
        return frozenset()
    names = (file.removesuffix(_SUFFIX) for file in files if file.endswith(_SUFFIX))
    return frozenset(name for name in names if _NAME.fullmatch(name))


def not_dead(directory: Path) -> frozenset[str]:
    """Return the workers that have a file and are not proved dead. Raises OSError if the directory cannot be read."""
    return frozenset(name for name in named(directory) if state(directory, name) != "dead")


def _path(directory: Path, worker: str) -> Path:
    if _NAME.fullmatch(worker) is None:
        raise OSError(f"no name of a file: {worker!r}")
    return directory / _DIRECTORY / f"{worker}{_SUFFIX}"


_held: weakref.WeakSet[WorkerLock] = weakref.WeakSet()


def _close_inherited() -> None:
    for lock in list(_held):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
