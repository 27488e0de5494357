"""What the system tells of the processes of this machine. Linux tells all of it, other systems some.

`ProcessMark` says which process is meant, so that no other one is ever taken for it. A number alone is not enough: the
system gives it to another process later, and a container has numbers of its own.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessMark:
    """A process: its number and its start, in clock ticks since the boot of the machine."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessMark | None:
        """Return the mark of a process that runs now; None if there is none, or only its exit code is left."""
        fields = _fields(pid)
        return None if fields is None or fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def lives(self) -> bool:
        """Whether this very process still runs."""
        return ProcessMark.of(self.pid) == self


def boot_id() -> str:
    """Return what tells this machine since its last boot from others; "" if the system does not tell."""
    with suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def peer_pid(peer: socket.socket) -> int:
    """Return the number of the process at the other end of a Unix socket; 0 if the system does not tell."""
    credentials = _credentials(peer)
    return 0 if credentials is None else credentials[0]


def is_own_user(peer: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this user. Where the system does not tell, the
    mode of the private directory has kept others out.
    """
    credentials = _credentials(peer)
    return credentials is None or credentials[1] == os.getuid()


def _credentials(peer: socket.socket) -> tuple[int, int] | None:
    """The process and the user at the other end of a Unix socket; None if the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state (the third one) on."""
    with suppress(OSError, ValueError):
        # The name of a program may hold blanks and parentheses.
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].decode().split()
    return None
