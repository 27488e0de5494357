"""Finds and ends unsupervised servers: both processes of their guard were killed (`guard.py`).

A guard notes its server in the private directory, and removes the note at the end. A note whose guard and watcher have
ended is that of an orphan. Its processes are the server and its descendants, and those that write to the pipe which the
watcher made for the output of this server alone. A process that cannot be told for certain is left alone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.processes import ProcessMark, machine, own_processes, parent

_log = logging.getLogger("qreward_plugins.replicas")

SUFFIX = ".server"
"""The end of the name of a note."""
_END_WITHIN_S = 20.0
_ROUNDS = 50
_OUTPUTS = (1, 2)
_LABEL: Mapping[str, Callable[[Any], Any]] = {"source": str, "replica": int, "devices": str}


@dataclass(frozen=True)
class Orphan:
    """An unsupervised server: its replica, and its processes."""

    source: str
    replica: int
    devices: str
    processes: tuple[ProcessMark, ...]

    @property
    def pids(self) -> list[int]:
        """The numbers of its processes."""
        return sorted(process.pid for process in self.processes)

    def as_mapping(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return {"source": self.source, "replica": self.replica, "devices": self.devices, "pids": self.pids}


@dataclass(frozen=True)
class _Note:
    """What a watcher has noted. `server` is None before the server was started; `output` is the number of the pipe."""

    guard: ProcessMark
    watcher: ProcessMark
    server: ProcessMark | None
    output: int
    label: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Note | None:
        """Read a note; None if it is that of another machine or container, or no note."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(path.read_bytes())
            if known["machine"] == machine() != "":
                marks = [ProcessMark(*known[name]) if known[name] else None for name in ("guard", "watcher", "server")]
                label = {name: of(known["label"][name]) for name, of in _LABEL.items()}
                if marks[0] is not None and marks[1] is not None:
                    return cls(marks[0], marks[1], marks[2], int(known["output"]), label)
        return None

    def processes(self) -> frozenset[ProcessMark]:
        """The processes of the server that run now."""
        marks = {pid: mark for pid in own_processes() if (mark := ProcessMark.of(pid)) is not None}
        found = {pid for pid, mark in marks.items() if mark == self.server or self._writes_to_it(mark)}
        parents = {pid: parent(pid) for pid in marks}
        while more := {pid for pid, above in parents.items() if above in found} - found:
            found |= more
        return frozenset(marks[pid] for pid in found if pid != os.getpid())

    def _writes_to_it(self, mark: ProcessMark) -> bool:
        if mark.started < self.guard.started:
            return False
        for descriptor in _OUTPUTS:
            with suppress(OSError):
                status = os.stat(f"/proc/{mark.pid}/fd/{descriptor}")
                if stat.S_ISFIFO(status.st_mode) and status.st_ino == self.output:
                    return True
        return False


def find_orphans(folder: Path) -> list[Orphan]:
    """Return the unsupervised servers noted in a private directory."""
    return [_orphan(note, processes) for _, note, processes in _found(folder)]


def end_orphans(folder: Path) -> None:
    """Kill all processes of unsupervised servers noted in a private directory, and wait for their end. It
    blocks, at most some 20 seconds for each. Where the system cannot signal one process for certain, none is killed.
    """
    for path, note, processes in _found(folder):
        if not _can_send():
            left = _orphan(note, processes)
            what = "a server of replica %d of %s is unsupervised, and this system cannot end it safely: kill -9 %s"
            _log.warning(what, left.replica, left.source, " ".join(map(str, left.pids)))
            continue
        ended = _end(note, processes)
        orphan = _orphan(note, ended)
        pids = ", ".join(map(str, orphan.pids))
        if any(process.lives for process in ended):
            _log.warning("processes %s of replica %d of %s do not end", pids, orphan.replica, orphan.source)
            continue
        what = "a server of replica %d of %s, which nobody supervised, was ended (processes %s)"
        _log.warning(what, orphan.replica, orphan.source, pids)
        path.unlink(missing_ok=True)


def _found(folder: Path) -> list[tuple[Path, _Note, frozenset[ProcessMark]]]:
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        note = _Note.read(path)
        if note is None or note.guard.lives or note.watcher.lives:
            continue
        processes = note.processes()
        if processes:
            found.append((path, note, processes))
        else:
            path.unlink(missing_ok=True)
    return found


def _orphan(note: _Note, processes: Iterable[ProcessMark]) -> Orphan:
    return Orphan(**note.label, processes=tuple(processes))


def _end(note: _Note, processes: frozenset[ProcessMark]) -> frozenset[ProcessMark]:
    """Kill the processes, and return them. They are stopped first, so that none starts another one meanwhile."""
    known: frozenset[ProcessMark] = frozenset()
    for _ in range(_ROUNDS):
        if not processes - known:
            break
        for process in processes - known:
            _send(process, signal.SIGSTOP)
        known |= processes
        processes = note.processes()
    for process in known:
        _send(process, signal.SIGKILL)
    until, pause = time.monotonic() + _END_WITHIN_S, threading.Event()
    while any(process.lives for process in known) and time.monotonic() < until:
        pause.wait(0.01)
    return known


def _can_send() -> bool:
    """Whether `_send` can send signals: not in some builds of Python, kernels and sandboxes."""
    if not (hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")):
        return False
    try:
        descriptor = os.pidfd_open(os.getpid())
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(descriptor, 0)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _send(process: ProcessMark, number: int) -> None:
    """Send a signal to this very process: the descriptor is that of one process, also if its number is given away."""
    with suppress(OSError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if process.lives:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
