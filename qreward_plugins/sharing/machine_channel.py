"""The connection to the keeper of this machine. Whoever finds no keeper starts one (machine_keeper.py)."""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, KeeperLost, KeeperSilent, Mistake
from ..system.threads import in_thread
from .machine_keeper import SOCKET, command, frame, peer_pid
from .messages import Answer, Report

CONNECT_WITHIN_S = 5.0
"""Seconds for finding a keeper or starting one."""
START_AGAIN_S = 1.0
"""Seconds after which a keeper that was started and does not listen is started again."""
LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
"""Most bytes of a socket's path: the system has room for one more, the zero at its end."""
USUAL = "/tmp/qreward-{uid}"
"""The directory in which the processes of one user on one machine find the keeper. Every process of the user must come
to the same one, and nobody else may write to it. So it is /tmp/qreward-UID, whatever else the environment of a process
says: schedulers set another TMPDIR for each job, and XDG_RUNTIME_DIR is set in a login shell, but not in a worker of
Ray, a service or a cron job of the same user, and the system removes it when the user logs out, while a training goes
on."""
VARIABLE = "QREWARD_SHARED_DIRECTORY"
"""The environment variable with another directory."""
_LOOK_EVERY_S = 0.01
_ENDED = "the quota keeper of this machine has ended; a new one is started"


class _Connection:
    """An open connection to a keeper, in one event loop."""

    def __init__(self, stream: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        self.pid = peer_pid(stream)
        self.is_open = True
        self._waiting: dict[tuple[str, int], asyncio.Future[Answer | None]] = {}
        self._stream = stream
        self._sending = asyncio.Lock()
        self._reading = self.loop.create_task(self._read())

    async def ask(self, report: Report) -> Answer | None:
        """Send a report and return its answer. Raises `ConnectionError` if the keeper ends before."""
        answered: asyncio.Future[Answer | None] = self.loop.create_future()
        key = report.worker, report.number
        self._waiting[key] = answered
        try:
            async with self._sending:
                await self._send(frame(report))
            return await answered
        finally:
            self._waiting.pop(key, None)

    async def aclose(self) -> None:
        """Close the socket. Idempotent; its event loop may be another one, and closed."""
        self._close()
        if self.loop is asyncio.get_running_loop():
            await asyncio.gather(self._reading, return_exceptions=True)

    def _close(self) -> None:
        self.is_open = False
        if not self.loop.is_closed():
            self._reading.cancel()
        self._stream.close()

    async def _send(self, data: bytes) -> None:
        try:
            await self.loop.sock_sendall(self._stream, data)
        except BaseException as error:
            # Also after a cancellation: a part of the message may have been sent.
            self._close()
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                raise KeeperSilent(f"the quota keeper of this machine cannot be reached ({error.strerror})") from None
            raise

    async def _read(self) -> None:
        try:
            while True:
                worker, number, answer = await _receive(self._stream)
                answered = self._waiting.get((worker, number))
                if answered is not None and not answered.done():
                    answered.set_result(answer)
        except (OSError, EOFError):
            pass
        finally:
            self.is_open = False
            self._stream.close()
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_exception(ConnectionError())
                    answered.exception()  # asyncio need not log it: the caller may have given up


class MachineChannel:
    """The `Channel` to the keeper of this user on this machine.

    Raises `ConfigurationError` if the private directory cannot be used.
    """

    def __init__(self) -> None:
        self.kept_by = ""
        self._directory = os.fspath(private_directory())
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None

    async def exchange(self, report: Report) -> Answer | None:
        connection = self._connection
        if connection is not None and connection.loop is not asyncio.get_running_loop():
            await connection.aclose()
            connection = self._connection = None
        if connection is None or not connection.is_open:
            if report.leaves:
                return None  # the last report of a worker does not start a keeper
            connection = await self._connect()
        try:
            return await connection.ask(report)
        except ConnectionError:
            # The system closes a connection when the process has ended, and the keeper closes none before.
            raise KeeperLost(_ENDED) from None

    async def end_keeper(self) -> None:
        """Kill a keeper that does not answer."""
        connection, self._connection = self._connection, None
        # A connection to a stopped process opens, and does not end before the process does.
        if connection is not None and connection.is_open and connection.pid:
            with suppress(OSError):
                os.kill(connection.pid, signal.SIGKILL)
        if connection is not None:
            await connection.aclose()

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        connecting, self._connecting = self._connecting, None
        if connecting is not None and connecting.get_loop() is asyncio.get_running_loop():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()

    async def _connect(self) -> _Connection:
        """Return a new connection. Concurrent calls share one attempt."""
        connecting = self._connecting
        if connecting is None or connecting.done() or connecting.get_loop() is not asyncio.get_running_loop():
            connecting = self._connecting = asyncio.ensure_future(self._find())
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._connection = await asyncio.shield(connecting)
        return self._connection

    async def _find(self) -> _Connection:
        loop = asyncio.get_running_loop()
        now = loop.time()
        gives_up_at, start_at, problem = now + CONNECT_WITHIN_S, now, "it does not listen"
        while now < gives_up_at:
            try:
                stream = await self._open()
                if stream is not None:
                    connection = _Connection(stream)
                    self.kept_by = f"process {connection.pid} of this machine"
                    return connection
                if now >= start_at:
                    private_directory()  # it may have been removed
                    await in_thread(functools.partial(_start, self._directory))
                    start_at = loop.time() + START_AGAIN_S
            except OSError as error:
                problem = error.strerror or str(error)
            except ConfigurationError as error:
                problem = error.mistakes[0].problem.removesuffix(".")
            await asyncio.sleep(_LOOK_EVERY_S)
            now = loop.time()
        raise KeeperSilent(f"the quota keeper of this machine cannot be reached in {self._directory} ({problem})")

    async def _open(self) -> socket.socket | None:
        """Connect to the keeper; None if there is none. Raises `OSError`."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(stream, os.path.join(self._directory, SOCKET))
            return stream
        except BaseException as error:
            stream.close()
            if isinstance(error, (FileNotFoundError, ConnectionError)):
                return None
            raise


def _start(directory: str) -> None:
    """Start a keeper, which leaves this process at once. One that finds another keeper ends. Raises `OSError`."""
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command(directory), check=False, **silent)  # type: ignore[call-overload]


async def _receive(stream: socket.socket) -> Any:
    size = int.from_bytes(await _exactly(stream, 4), "big")
    return pickle.loads(await _exactly(stream, size))


async def _exactly(stream: socket.socket, count: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), bytearray()
    while len(parts) < count:
        part = await loop.sock_recv(stream, min(count - len(parts), 2**16))
        if not part:
            raise EOFError("the keeper has ended")
        parts += part
    return bytes(parts)


def private_directory() -> Path:
    """Return the directory, made if it does not exist.

    Raises `ConfigurationError` if its path is relative, or too long for sockets in it, or if it cannot be made, is no
    directory, belongs to another user, or is open to others. What another user has put in its place is refused, and
    left alone. So is a directory whose keeper is of another version of the package.
    """
    path = Path(os.environ.get(VARIABLE) or USUAL.format(uid=os.getuid())).expanduser()
    if not path.is_absolute():
        raise _refused(f"{path} is relative: processes in other folders would share nothing.", "Name an absolute path.")
    if len(os.fsencode(path / SOCKET)) > LONGEST_SOCKET_PATH:
        remedy = f"Name one whose path has at most {LONGEST_SOCKET_PATH - len(SOCKET) - 1} bytes."
        raise _refused(f"{path} is too long for a socket in it.", remedy)
    try:
        # makedirs gives the mode to the last directory only.
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise _refused(f"{path} cannot be made ({error.strerror}).", "Name one that this user may make.") from None
    if found.st_uid != os.getuid():
        problem = f"{path} belongs to another user (uid {found.st_uid}; this process has uid {os.getuid()})."
        raise _refused(problem, "Processes of one user share nothing with others. Name a directory of this user.")
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(f"{path} is no directory (a link is not followed).", "Name another one, or remove it.")
    if found.st_mode & 0o077:
        problem = f"{path} is not private: other users may enter it (mode {stat.S_IMODE(found.st_mode):o})."
        raise _refused(problem, "Name a directory that is for this alone, with the mode 700.")
    for other in path.glob("*.sock"):
        if other.name != SOCKET:
            problem = f"the keeper of limits in {path} is of another version of the package."
            remedy = "End its last run and wait a minute, or name a directory with its own limits."
            raise _refused(problem, f"{remedy} If it was killed, remove {other.name}.")
    return path


def _refused(problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError([Mistake(VARIABLE, problem, remedy)])
