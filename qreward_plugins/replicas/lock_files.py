"""Locks the files of pools in the private directory, and removes those that nobody holds.

A file is removed only under its own lock. Whoever waited for that lock gets it for a file that is gone. So after
locking, a process looks whether the file is still in its place, and opens it again if not.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path

from ..private_directory import is_in_place

_NAME = re.compile(r"[0-9a-f]{16}\.(lock|pool)")


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


def remove_unheld(folder: Path) -> None:
    """Remove the lock files of all pools that no process holds, also those of processes that were killed."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if _NAME.fullmatch(name):
                _remove(folder / name)


def _remove(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_in_place(descriptor, path):
                path.unlink()
        finally:
            os.close(descriptor)
