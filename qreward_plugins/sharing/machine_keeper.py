"""The keeper of a machine's limits, in a process of its own: `python -c "... main(DIRECTORY)"`.

It serves a Unix socket in the private directory, and lives until no process is connected and nothing counts as spent.
So there is no state to leave behind, and programs that follow each other keep one window. At such an end it removes its
files, and the next keeper is a first one. If it was killed, its lock file is still there: then the next one counts
every limit as spent at first (see `Keeper`), unless that was long ago. The file holds the longest window that was
divided, because that is how long the next keeper has to remember at least.

Messages are pickled, behind four bytes of length: only processes of the same user come into the private directory. The
module imports little, so that the process starts in a moment and stays small.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

from .keeper import TTL_S, Keeper
from .messages import FORM

LOCK, SOCKET = "keeper.lock", f"{FORM}.sock"
"""All versions of the package have the same lock, so one keeper serves; its socket is its own (`private_directory`)."""
IDLE_S = 2.0
"""Seconds without a connection after which a keeper that charges nothing ends. Programs may follow each other."""
LOOK_EVERY_S = 0.5
_USUAL_WINDOW_S = 60.0
_FORGOTTEN_AFTER_S = TTL_S + 10.0
"""Seconds after the last mark of a killed keeper, and one window more, in which its shares may count."""


def frame(message: Any) -> bytes:
    """Return a message as it is sent."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(4, "big") + body


def peer_pid(peer: socket.socket) -> int:
    """Return the number of the process at the other end of a Unix socket; 0 if the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


class MachineKeeper:
    """Serves a keeper in `directory`, whose lock file is open and locked as `lock`."""

    def __init__(self, directory: str, lock: int) -> None:
        self._directory = directory
        self._lock = lock
        written, longest_window_s = os.pread(lock, 64, 0), 0.0
        with suppress(ValueError):
            longest_window_s = float(written or 0.0)
        # A keeper marks its file every `LOOK_EVERY_S`. Of one that was killed long ago nothing counts any more.
        age_s = time.time() - os.fstat(lock).st_mtime
        first = not written or age_s > _FORGOTTEN_AFTER_S + max(_USUAL_WINDOW_S, longest_window_s)
        self._keeper = Keeper(first=first)
        self._keeper.longest_window_s = longest_window_s
        self._connections = 0
        self._written = -1.0
        os.ftruncate(lock, max(1, len(written)))  # also a full disk takes the mark that there was a keeper

    async def serve(self) -> None:
        """Serve until nobody needs it any more, or its files are gone."""
        loop = asyncio.get_running_loop()
        path = os.path.join(self._directory, SOCKET)
        self._note_window()
        with suppress(FileNotFoundError):
            os.unlink(path)
        server = await asyncio.start_unix_server(self._attend, path, backlog=1024)
        used_at = loop.time()
        while self._in_place():
            await asyncio.sleep(LOOK_EVERY_S)
            self._note_window()
            now = loop.time()
            remembered_until = self._keeper.expired_at + max(_USUAL_WINDOW_S, self._keeper.longest_window_s)
            if self._connections or not self._keeper.charges_nothing(now) or now < remembered_until:
                used_at = now
            elif now - used_at >= IDLE_S:
                # Whoever connects from here on finds nobody, and starts the next keeper.
                server.close()
                for name in (SOCKET, LOCK):
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(self._directory, name))
                return

    def _in_place(self) -> bool:
        """Return whether this process can still be found. Mark its file as used, for programs that remove old ones."""
        with suppress(OSError):
            os.utime(self._lock)
            return os.path.samestat(os.fstat(self._lock), os.lstat(os.path.join(self._directory, LOCK)))
        return False

    def _note_window(self) -> None:
        window_s = self._keeper.longest_window_s
        if window_s > self._written:
            with suppress(OSError):  # the disk is full
                os.pwrite(self._lock, f"{window_s:.3f}\n".encode(), 0)
                self._written = window_s

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection until it ends."""
        answering: set[asyncio.Task[None]] = set()
        self._connections += 1
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                report = pickle.loads(await reader.readexactly(size))
                # A task takes its first step before the next message is read: reports keep their order.
                task = asyncio.create_task(self._answer(writer, report))
                answering.add(task)
                task.add_done_callback(answering.discard)
                await asyncio.sleep(0)
        except (OSError, EOFError):
            pass  # the process at the other end is gone
        finally:
            self._connections -= 1
            for task in answering:
                task.cancel()
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, report: Any) -> None:
        answer = await self._keeper.exchange(report)
        writer.write(frame((report.worker, report.number, answer)))


def main(directory: str) -> None:
    """Leave the process that started this one, and keep the limits if no other process does. Returns at the end."""
    if os.fork():
        return
    os.setsid()
    with suppress(OSError):
        os.chdir("/")
        with open("/proc/self/comm", "w") as name:
            name.write("qreward-keeper")
    path = os.path.join(directory, LOCK)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.lstat(path)):
            return  # the last keeper has ended in this moment
    except OSError:
        return  # another process keeps the limits

    async def serve() -> None:
        await MachineKeeper(directory, lock).serve()

    asyncio.run(serve())


def command(directory: str) -> list[str]:
    """Return the command that starts the process. It needs no installed package, so none is imported."""
    place = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    program = "import sys; sys.path.insert(0, sys.argv[2]); from qreward_plugins.sharing import machine_keeper; "
    program += "machine_keeper.main(sys.argv[1])"
    return [sys.executable, "-I", "-S", "-c", program, directory, place, "(qreward: keeper of shared limits)"]
