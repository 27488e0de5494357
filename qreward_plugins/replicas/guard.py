"""Runs a server, and ends all of its processes when it exits or when whoever started it is gone.

Servers leave processes behind. vLLM's engine and workers outlive a killed server for ever, and a signal that the kernel
sends at the death of a parent reaches the server only. So two processes hold every process of a server: the guard,
which is the child of the starter, and below it the watcher, which is the parent of the server. Each ends everything if
the other one is gone: Ray, for example, kills the direct children of an actor.

- The standard input is a pipe that the starter keeps open. Its end asks the server to stop (SIGTERM) and ends it after
  `grace_s` seconds (SIGKILL). SIGTERM to the guard does the same. SIGUSR1 and SIGKILL to the guard end everything at
  once: the guard does it at SIGUSR1, also if the watcher hangs, and the watcher at SIGKILL, also if the guard hangs.
- Processes that the server has left, also those in sessions of their own, are adopted by the watcher, and end with it.
- Output goes into a log file, which is renamed to NAME.1 when it has grown to `log_bytes`.
- The exit code is that of the server, or 128 plus the number of the signal that ended it.
- The watcher notes in the file NOTE which processes these are, with LABEL (JSON), and removes it at the end. If both
  processes are killed (SIGKILL), the server runs on, and the note stays: `orphans.py` ends the server then.

Usage: python -I -S guard.py PARENT_PID GRACE_S LOG LOG_BYTES NOTE LABEL COMMAND ...  in a new session. NOTE may be
empty. It needs Linux, and imports only the standard library, so that it starts at once and in any environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
_LONGEST_SWEEP_S = 20.0
_MOST_READS = 16
_CANNOT_START = 127


def main(parent: int, grace_s: float, log: str, log_bytes: int, note: str, label: str, command: list[str]) -> NoReturn:
    """Be the guard: start the watcher, and end what it leaves."""
    _adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Where it is ignored, which a process inherits, the system tells nobody how a child ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # The starter may have given a locked file to the guard. The server must not hold the lock, too.
        if descriptor > 2 and os.path.exists(f"/proc/self/fd/{descriptor}"):
            os.set_inheritable(descriptor, False)
    alive, held = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(held)
        code = 1
        try:
            code = _watch(parent, alive, grace_s, log, log_bytes, _Note(note, label), command)
        finally:
            os._exit(code)
    os.close(alive)
    # The watcher alone reads the pipe of the starter and writes the log.
    _to_null(0)
    _to_null(1)
    _to_null(2)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(watcher, signal.SIGTERM))
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(watcher, signal.SIGKILL))
    code = _exit_code(_wait_for(watcher))
    _sweep()
    _Note(note, label).remove_at_end()
    os._exit(code)


def _watch(
    parent: int, guard_alive: int, grace_s: float, log: str, log_bytes: int, note: _Note, command: list[str]
) -> int:
    """Be the watcher: run the server until it exits or is not wanted any more. Return the exit code."""
    _adopt_orphans()
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    output, theirs = os.pipe()
    os.set_blocking(output, False)
    writer = _Log(log, log_bytes)
    # Both: a watcher that is killed just after the start has noted by which pipe the server can be told.
    note.write(theirs, None)
    try:
        server = _start(command, theirs)
    except OSError as error:
        writer.write(f"{command[0]}: {error.strerror}\n".encode())
        note.remove()
        return _CANNOT_START
    note.write(theirs, server)
    os.close(theirs)
    readers = [0, guard_alive, wake, output]
    with_parent = _descriptor_of(parent)
    if with_parent is not None:
        readers.append(with_parent)
    code: int | None = None
    kill_at: float | None = None
    while code is None:
        left_s = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select(readers, [], [], left_s)
        if output in ready and not writer.copy(output):
            readers.remove(output)
        if wake in ready:
            os.read(wake, 4096)
            code = _reap(server)
        if guard_alive in ready or (kill_at is not None and time.monotonic() >= kill_at):
            break
        unwanted = 0 in ready or (with_parent is not None and with_parent in ready)
        if (stopped or unwanted) and kill_at is None:
            kill_at = time.monotonic() + grace_s
            readers = [fd for fd in readers if fd not in (0, with_parent)]
            _kill(server, signal.SIGTERM)
    codes = _sweep()
    note.remove_at_end()
    writer.copy(output)
    return code if code is not None else codes.get(server, 128 + signal.SIGKILL)


class _Note:
    """The file that says which processes belong together. The watcher writes it."""

    def __init__(self, path: str, label: str) -> None:
        self._path, self._label = path, label

    def write(self, output: int, server: int | None) -> None:
        """Note the processes, and the pipe to whose end `output` the server and its descendants write."""
        if not self._path:
            return
        marks = {"guard": _mark(os.getppid()), "watcher": _mark(os.getpid()), "server": server and _mark(server)}
        part = self._path + ".part"
        # A full disk must not end a server.
        with suppress(OSError, ValueError, IndexError):
            # As `processes.machine`, which this file cannot import.
            with open("/proc/sys/kernel/random/boot_id") as file:
                machine = f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
            known = {"machine": machine, "output": os.fstat(output).st_ino, "label": json.loads(self._label), **marks}
            with open(part, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                json.dump(known, file)
            os.replace(part, self._path)
            return
        with suppress(OSError):
            os.unlink(part)

    def remove_at_end(self) -> None:
        """Remove it, unless a process hangs in the kernel and has survived the sweep."""
        if self._path and not _descendants():
            self.remove()

    def remove(self) -> None:
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)


class _Log:
    """A log file of bounded size, with one file before it."""

    def __init__(self, path: str, most: int) -> None:
        self._path, self._most = path, most
        self._open()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._file).st_size

    def copy(self, source: int) -> bool:
        """Copy what there is to read, at most 1 MiB. Return False at the end."""
        # A server may write faster than the disk does; the watcher has more to look after than its log.
        for _ in range(_MOST_READS):
            try:
                text = os.read(source, 65536)
            except BlockingIOError:
                return True
            if not text:
                return False
            self.write(text)
        return True

    def write(self, text: bytes) -> None:
        # A full disk must not end a server.
        try:
            self._size += os.write(self._file, text)
            if self._size >= self._most:
                full, self._size = self._file, 0
                os.replace(self._path, self._path + ".1")
                self._open()
                os.close(full)
        except OSError:
            pass


def _start(command: list[str], output: int) -> int:
    """Start the server; return its process id. Raises OSError if there is no such program."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [(os.POSIX_SPAWN_DUP2, nothing, 0), (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
    usual = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE]
    try:
        return os.posix_spawnp(command[0], command, os.environ, file_actions=files, setsigdef=usual, setsigmask=[])
    finally:
        os.close(nothing)


def _sweep() -> dict[int, int]:
    """Kill all descendants until there are none. Return the exit codes of those that were children."""
    codes: dict[int, int] = {}
    until = time.monotonic() + _LONGEST_SWEEP_S
    pause_s = 0.001
    while True:
        # Only orphans of processes that were killed become children, so each look may find new ones.
        for pid in _descendants():
            _kill(pid, signal.SIGKILL)
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                codes[pid] = _exit_code(status)
        except ChildProcessError:
            return codes
        if time.monotonic() > until:
            return codes
        time.sleep(pause_s)
        pause_s = min(0.1, 2 * pause_s)


def _descendants() -> list[int]:
    """Return the process ids of all descendants."""
    children: dict[int, list[int]] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name of a program may hold blanks and parentheses.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(pid)
    found, pending = [], [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _mark(pid: int) -> list[int]:
    """Return the number of a process, and its start in clock ticks; empty if it has ended. See `ProcessMark`."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return [pid, int(file.read().rpartition(b")")[2].split()[19])]
    except (OSError, ValueError, IndexError):
        return []


def _reap(server: int) -> int | None:
    """Collect children that have ended. Return the exit code of the server if it is one of them."""
    code = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return code
            if pid == server:
                code = _exit_code(status)
    except ChildProcessError:
        return code


def _wait_for(pid: int) -> int:
    """Wait for a child; adopted processes that end before it are collected."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return status


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _descriptor_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None where the kernel has none.

    The pipe of the starter may be held open by a process that the starter forked, so its end is not enough.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        ended, held = os.pipe()
        os.close(held)
        return ended
    except OSError:
        return None


def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _to_null(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor)
    os.close(nothing)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6], sys.argv[7:])
