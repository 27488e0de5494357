"""Decides which process of a machine keeps the limits, with lock files in a private directory.

A keeper holds the lock of its file `keeper.N.lock` as long as it lives. The kernel frees the lock when the process
ends, however it ends, and the next process locks the same file. A keeper that does not answer, such as a stopped
process, still holds its lock. Then another process makes the file of N + 1, locks it, and removes the file of N. The
old keeper checks before each answer that its file is still there and is the last one, so it answers nobody when it
comes back.

The file also holds the keeper's last sign of life: when (the machine's monotonic clock), and who. No share was given
later, so the next keeper knows when all shares have expired. It also says whether the next keeper can know whom it has
to hear before that (worker_locks.py). A keeper that ends in order leaves its state in `keeper.state`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import orjson

from ..quotas.shared import Resource
from ..system.private_directory import is_in_place, write_whole
from ..system.processes import boot_id
from .keeper import MARGIN_S, TTL_S
from .messages import Charged
from .wire import MOST_BYTES, Unreadable, dump, load, read_charged, write_charged

_log = logging.getLogger("qreward_plugins.sharing")

STAMP_EVERY_S = 1.0
"""Most seconds between the last sign of life in the file and an answer."""
_STAMP_BYTES = 256
_STATE = "keeper.state"
_NAME = re.compile(r"keeper\.([1-9][0-9]{0,9})\.lock")


class Inheritance(NamedTuple):
    """What a new keeper takes over from earlier ones."""

    first: bool
    """Whether there was none."""
    expired_at: float | None
    """When all shares that they gave, and that are not in `charged`, have expired; None if that is unknown, or with
    `charged`, if there are none.
    """
    charged: Mapping[str, Mapping[Resource, Charged]] | None
    """What counts as spent, if the last one ended in order."""
    listed: bool
    """Whether all workers that may hold shares of them have files, see worker_locks.py."""


def latest(directory: Path) -> int:
    """Return the number of the last lock file; 0 if there is none. Raises OSError."""
    found = (_NAME.fullmatch(name) for name in os.listdir(directory))
    return max((int(match[1]) for match in found if match), default=0)


def socket_path(directory: Path, number: int) -> Path:
    """Return the path of the keeper's socket."""
    return directory / f"keeper.{number}.sock"


class KeeperLock:
    """The held lock of one file. `lock` makes one."""

    def __init__(self, directory: Path, number: int, descriptor: int) -> None:
        self.directory = directory
        self.number = number
        self._descriptor = descriptor
        self._stamped_at = -math.inf
        self._listed = False

    @classmethod
    def lock(cls, directory: Path, number: int) -> KeeperLock | None:
        """Lock the file of a number, which is made if it does not exist; None if another process holds it, or a file
        with a higher number exists. Raises OSError.
        """
        path = _path(directory, number)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        held = cls(directory, number, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if held.is_current():
                return held
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                held.release()
                raise
        held.release()
        return None

    def is_current(self) -> bool:
        """Return whether this is still the last keeper: its file is in place, and there is no later one."""
        if not is_in_place(self._descriptor, _path(self.directory, self.number)):
            return False
        return not os.path.lexists(_path(self.directory, self.number + 1))

    def inherit(self, now: float, *, met: bool) -> Inheritance:
        """Return what is known of earlier keepers, and remove their files. `met`: this process has seen one."""
        written = self._read(_path(self.directory, self.number))
        first = self.number == 1 and written == b"" and not met
        if written == b"" and self.number > 1:
            # The keeper that is replaced has the file before.
            written = self._read(_path(self.directory, self.number - 1))
        inherited = Inheritance(True, None, None, True)
        if not first:
            inherited = self._inherited(written, now)
        for number in range(max(1, self.number - 8), self.number):
            for path in (_path(self.directory, number), socket_path(self.directory, number)):
                with suppress(OSError):
                    path.unlink()
        return inherited

    def stamp(self, now: float, boot: str, *, listed: bool = False) -> bool:
        """Record a sign of life of the keeper `boot` if the last one is `STAMP_EVERY_S` old, or if `listed` has
        changed: whether all workers that may hold a share have files. Return False if neither that, nor that the time
        is unknown, can be recorded: then the keeper must end.
        """
        if now - self._stamped_at < STAMP_EVERY_S and listed == self._listed:
            return True
        self._listed = listed
        stamp = orjson.dumps({"clock": _clock(), "boot": boot, "at": now, "listed": listed}).ljust(_STAMP_BYTES)
        try:
            if os.pwrite(self._descriptor, stamp, 0) != len(stamp):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            try:
                # Needs no space. The next keeper sees that there was one, and not when.
                os.ftruncate(self._descriptor, 1)
            except OSError:
                return False
            if self._stamped_at == -math.inf:
                _log.warning("the quota keeper cannot record that it lives (%s)", error.strerror)
        self._stamped_at = now
        return True

    def leave(self, boot: str, charged: Mapping[str, Mapping[Resource, Charged]], expired_at: float) -> None:
        """Leave the state for the next keeper; see `Keeper`. If it cannot be written, it waits as after a death."""
        known = {"sources": write_charged(charged), "expired_at": expired_at if expired_at > 0 else None}
        try:
            write_whole(self.directory / _STATE, dump({"clock": _clock(), "boot": boot, **known}))
        except OSError as error:
            _log.info("the quota keeper cannot leave its state to the next one (%s)", error.strerror)

    def release(self) -> None:
        """Free the lock. The file stays: it says when the keeper lived."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _inherited(self, written: bytes, now: float) -> Inheritance:
        expired_at, boot, listed = None, "", False
        with suppress(Unreadable):
            stamp = load(written)
            at, by = stamp.get("at"), stamp.get("boot")
            if stamp.get("clock") == _clock() and isinstance(at, (int, float)) and isinstance(by, str):
                # Whoever was answered had sent its report before; it keeps its share for TTL_S from then.
                expired_at = min(now, at + STAMP_EVERY_S) + TTL_S + MARGIN_S
                boot, listed = by, stamp.get("listed") is True
        expired_at = now + TTL_S + MARGIN_S if expired_at is None else expired_at
        with suppress(Unreadable, KeyError):
            state = load(self._read(self.directory / _STATE))
            if boot and (state.get("boot"), state.get("clock")) == (boot, _clock()):
                unknown = state["expired_at"]
                if unknown is None or isinstance(unknown, (int, float)):
                    return Inheritance(False, unknown, read_charged(state.get("sources")), listed)
        return Inheritance(False, expired_at, None, listed)

    @staticmethod
    def _read(path: Path) -> bytes:
        try:
            with open(path, "rb") as file:
                return file.read(MOST_BYTES + 1)
        except OSError:
            return b""


def _path(directory: Path, number: int) -> Path:
    return directory / f"keeper.{number}.lock"


def _clock() -> str:
    """Identify the monotonic clock: it starts anew with the machine, and a time namespace has another one."""
    parts = [boot] if (boot := boot_id()) else []
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/time"))
    return " ".join(parts)
