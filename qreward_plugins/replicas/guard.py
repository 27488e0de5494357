"""Runs a server, and ends all of its processes when it exits or when its owner is gone.

Servers leave processes behind: vLLM's engine and workers outlive a killed server. So the guard adopts every process
that the server leaves, also those in sessions of their own, and ends all of them. It is nobody's child and has a
session of its own: Ray kills the direct children of an actor that has died, and a terminal those of its session.

- The standard input is a pipe that the owner keeps open. Its end, the end of the owner, or SIGTERM asks the server to
  stop (SIGTERM), and ends it after `grace_s` seconds (SIGKILL).
- The standard output is a pipe to the owner: a line with the process id of the guard, and at the end a line with the
  exit code of the server, or 128 plus the number of the signal that ended it. Without the second line the guard was
  killed, and the owner ends its processes (`end_session`).
- The standard error is the log of the server.

Usage: python -I -S guard.py OWNER_PID GRACE_S COMMAND ...  It needs Linux, and imports only the standard library, so
that it starts at once and in any environment.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

MARK = "QREWARD_SERVER"
"""A variable of all processes of a server. Some leave the session of the guard."""
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>
_LONGEST_SWEEP_S = 20.0
_CANNOT_START = 127


def main(owner: int, grace_s: float, command: list[str]) -> None:
    """Run the server until it exits or is not wanted any more."""
    if os.fork():
        os._exit(0)
    os.setsid()
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    stopped: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _tell(os.getpid())
    try:
        server = _start(command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        _tell(_CANNOT_START)
        return
    ends = [0, *_descriptor_of(owner)]
    kill_at: float | None = None
    code: int | None = None
    while code is None and (kill_at is None or time.monotonic() < kill_at):
        left_s = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select([wake, *ends], [], [], left_s)
        if wake in ready:
            os.read(wake, 4096)
            code = _reap().get(server)
        if kill_at is None and (stopped or set(ready) & set(ends)):
            kill_at, ends = time.monotonic() + grace_s, []
            _kill(server, signal.SIGTERM)
    codes = _sweep()
    _tell(codes.get(server, 128 + signal.SIGKILL) if code is None else code)


def end_session(session: int, mark: str) -> None:
    """Kill all processes of a guard that was killed: those of its session, those that carry the mark of its server
    (`MARK`), and their descendants. Block until there are none, at most for 20 s.
    """
    until, pause_s, needle = time.monotonic() + _LONGEST_SWEEP_S, 0.001, f"{MARK}={mark}".encode()
    killed: set[int] = set()
    while True:
        seen = dict(_processes())
        found = {pid for pid, (_, at) in seen.items() if at == session or needle in _environment(pid)}
        found |= _below(found, {pid: parent for pid, (parent, _) in seen.items()})
        for pid in found:
            _kill(pid, signal.SIGKILL)
        # A dying process loses its mark first and the memory of its devices last.
        killed |= found
        if killed.isdisjoint(seen) or time.monotonic() > until:
            return
        time.sleep(pause_s)
        pause_s = min(0.1, 2 * pause_s)


def _start(command: list[str]) -> int:
    """Start the server; return its process id. Raises OSError if there is no such program."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [(os.POSIX_SPAWN_DUP2, nothing, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    usual = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE]
    return os.posix_spawnp(command[0], command, os.environ, file_actions=files, setsigdef=usual, setsigmask=[])


def _sweep() -> dict[int, int]:
    """Kill all descendants until there are none. Return the exit codes of those that were children."""
    codes: dict[int, int] = {}
    until, pause_s = time.monotonic() + _LONGEST_SWEEP_S, 0.001
    while True:
        # Only orphans of processes that were killed become children, so each look may find new ones.
        found = _below({os.getpid()}, {pid: parent for pid, (parent, _) in _processes()})
        for pid in found:
            _kill(pid, signal.SIGKILL)
        codes |= _reap()
        if not found or time.monotonic() > until:
            return codes
        time.sleep(pause_s)
        pause_s = min(0.1, 2 * pause_s)


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each process that runs or waits to be collected, with its parent and its session."""
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            # The name of a program may hold blanks and parentheses.
            state, parent, _, session, *_ = file.read().rpartition(b")")[2].split()
            if state not in b"ZX" or int(parent) == os.getpid():
                yield pid, (int(parent), int(session))


def _below(above: set[int], parents: dict[int, int]) -> set[int]:
    """Return the descendants of these processes."""
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in above | found} - found:
        found |= more
    return found


def _environment(pid: int) -> list[bytes]:
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().split(b"\0")
    return []


def _reap() -> dict[int, int]:
    """Collect the children that have ended. Return their exit codes."""
    codes: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            codes[pid] = code if code >= 0 else 128 - code
    return codes


def _descriptor_of(pid: int) -> list[int]:
    """Return a descriptor that becomes readable when the process ends; none where the kernel has none.

    The pipe of the owner may be held open by a process that the owner has forked, so its end is not enough.
    """
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        ended, held = os.pipe()
        os.close(held)
        return [ended]
    except (OSError, AttributeError):
        return []


def _tell(number: int) -> None:
    with suppress(OSError):  # the owner may be gone
        os.write(1, b"%d\n" % number)


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
