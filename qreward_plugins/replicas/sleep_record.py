"""Defines `SleepRecord`: the note of a pool that it sleeps, for the one that replaces it if its process is killed.

The processes that use the pool know that it sleeps, and say so when they connect to the next one. But a process that
has just come may be the first to connect: it would start servers on devices that a trainer is using.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import orjson

from ..system.private_directory import write_whole
from ..system.processes import ProcessMark, machine


class SleepRecord:
    """The file `path` of a pool, which exists while all of its replicas sleep. It names the processes that use it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: frozenset[ProcessMark] | None = None

    def write(self, users: Iterable[ProcessMark]) -> None:
        """Note that the pool sleeps, and who uses it."""
        marks = frozenset(users)
        if marks == self._written:
            return
        text = orjson.dumps({"machine": machine(), "users": sorted((one.pid, one.started) for one in marks)})
        # A full disk must not keep a pool from its sleep.
        with suppress(OSError):
            write_whole(self._path, text)
            self._written = marks

    def clear(self) -> None:
        """Note that the pool does not sleep. Idempotent."""
        self._written = None
        with suppress(OSError):
            self._path.unlink()

    def holds(self) -> bool:
        """Whether an earlier pool slept when its process ended, and a process that used it still runs."""
        return self._state() == "holds"

    def remove_spent(self) -> None:
        """Remove it if no process that used the pool runs any more. Those of another container cannot be told."""
        if self._state() == "spent":
            self.clear()

    def _state(self) -> str:
        try:
            known = orjson.loads(self._path.read_bytes())
            users = [ProcessMark(pid, started) for pid, started in known["users"]]
            if known["machine"] != machine() or machine() == "":
                return "foreign"
        except (OSError, ValueError, KeyError, TypeError):
            return "spent"
        return "holds" if any(user.lives for user in users) else "spent"
