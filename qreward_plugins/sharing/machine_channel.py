"""The connection to the keeper of this machine. If there is no keeper, this process becomes it.

Nothing here proves to a worker that a keeper is dead, so shares are never prolonged: they expire as if the keeper were
silent. The next keeper is there within milliseconds, and a report that got no answer goes to it.

The channel holds a lock for each worker of this process that reports over it (worker_locks.py), from before its first
report until it leaves. The lock proves to the keeper whether the worker is dead. A channel that relays the reports of
other processes holds none: its own death would prove nothing of theirs.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

from ..errors import ConfigurationError, KeeperSilent
from ..system.private_directory import private_directory
from ..system.processes import is_own_user
from ..system.threads import in_thread
from .frames import receive, send
from .keeper_lock import latest, socket_path
from .machine_keeper import MachineKeeper, take_over
from .messages import Answer, Report
from .wire import Unreadable, read_answer, write_report
from .worker_locks import WorkerLock

CONNECT_WITHIN_S = 2.0
"""Seconds for finding a keeper or starting one."""
LOOK_AT_LOCKS_EVERY_S = 600.0
"""Seconds between two looks at the locks. A look keeps programs that remove old files from removing these."""
_LOOK_EVERY_S = 0.02
_ENDED = "the quota keeper of this machine has ended"

_lock = threading.Lock()
_users: dict[Path, int] = {}
"""Open channels of this process, by directory."""
_kept: dict[Path, list[MachineKeeper]] = {}
"""Keepers of this process, by directory; the last one of each may be alive, the others were replaced."""


class _Connection:
    """An open connection to a keeper, in one event loop."""

    def __init__(self, stream: socket.socket, number: int) -> None:
        self.number = number
        self.loop = asyncio.get_running_loop()
        self.waiting: dict[tuple[str, int], asyncio.Future[Answer | None]] = {}
        self.is_open = True
        self._stream = stream
        self._to_send: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._tasks = [self.loop.create_task(self._read()), self.loop.create_task(self._write())]
        _connections.add(self)

    def ask(self, report: Report) -> asyncio.Future[Answer | None]:
        """Send a report. The future raises `ConnectionError` if the connection ends before the answer."""
        answered: asyncio.Future[Answer | None] = self.loop.create_future()
        answered.add_done_callback(_retrieve)
        self.waiting[report.worker, report.number] = answered
        self._to_send.put_nowait({"report": write_report(report)})
        return answered

    def drop(self) -> None:
        """Close the socket without its event loop, which is closed or belongs to a parent process."""
        self.is_open = False
        self._stream.close()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end()

    async def _read(self) -> None:
        try:
            while (message := await receive(self._stream)) is not None:
                worker, number, answer = message.get("worker"), message.get("number"), message.get("answer")
                if not isinstance(worker, str) or not isinstance(number, int):
                    raise Unreadable("an answer names its report")
                answered = self.waiting.pop((worker, number), None)
                if answered is not None and not answered.done():
                    answered.set_result(None if answer is None else read_answer(answer))
        except (Unreadable, OSError):
            pass
        finally:
            self._end()

    async def _write(self) -> None:
        try:
            while True:
                await send(self._stream, await self._to_send.get())
        except OSError:
            pass
        finally:
            self._end()

    def _end(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for task in self._tasks:
            task.cancel()
        self._stream.close()
        for answered in self.waiting.values():
            if not answered.done():
                answered.set_exception(ConnectionError(_ENDED))
        self.waiting.clear()


_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()


class MachineChannel:
    """The `Channel` to the keeper of this user on this machine, in `directory`. `relays`: the workers that report over
    it are in other processes.
    """

    def __init__(self, directory: Path, *, relays: bool = False) -> None:
        self.kept_by = ""
        self._directory = directory
        self._relays = relays
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._pid = -1
        self._met = False
        self._closed = False
        self._silent = 0  # number of the keeper that did not answer
        self._locks: dict[str, WorkerLock] = {}
        self._looked_at = -math.inf

    async def exchange(self, report: Report) -> Answer | None:
        try:
            return await self._exchange(report)
        finally:
            lock = self._locks.pop(report.worker, None) if report.leaves else None
            if lock is not None:
                lock.release()

    async def _exchange(self, report: Report) -> Answer | None:
        for again in (True, False):
            if self._closed:
                raise KeeperSilent("the channel to the quota keeper is closed")
            connection = self._open_connection()
            if connection is None and report.leaves:
                return None  # the last report of a worker does not start a keeper
            if connection is None:
                connection = await self._connect()
                self._looked_at = -math.inf
            if not self._relays:
                self._hold_lock(report.worker)
            try:
                return await connection.ask(report)
            except ConnectionError:
                # An answer that has come was accepted; this one has not, so the next keeper may give it.
                if not again:
                    raise KeeperSilent(_ENDED) from None
        raise AssertionError

    async def end_keeper(self) -> None:
        """Replace a keeper that does not answer. It finds that out when it goes on, and answers nobody."""
        connection = self._connection
        self._silent = connection.number if connection is not None else self._latest()
        if connection is not None:
            await connection.aclose()
            self._connection = None

    async def describe(self) -> str:
        """Return who keeps the limits. Starts no keeper. Raises `KeeperSilent`."""
        try:
            with anyio.fail_after(CONNECT_WITHIN_S):
                status = await _status(self._directory)
        except TimeoutError:
            raise KeeperSilent("the quota keeper of this machine does not answer") from None
        except (OSError, Unreadable) as error:
            raise KeeperSilent(f"the quota keeper of this machine cannot be asked ({error})") from None
        if status is None:
            return f"kept by nobody yet in {self._directory}; the first engine will"
        workers = status.get("workers")
        return f"kept by process {status.get('pid')} in {self._directory}, for {workers} engines now"

    async def aclose(self) -> None:
        """Close the connection. The last channel of a process ends the keeper of the process."""
        self._closed = True
        locks, self._locks = self._locks, {}
        connection, self._connection = self._connection, None
        connecting, self._connecting = self._connecting, None
        if self._pid != os.getpid():
            return
        if connecting is not None and connecting.get_loop() is asyncio.get_running_loop():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        if connection is not None and connection.loop is asyncio.get_running_loop():
            await connection.aclose()
        elif connection is not None:
            connection.drop()
        for lock in locks.values():
            lock.release()
        self._pid = -1
        with _lock:
            _users[self._directory] -= 1
            kept: list[MachineKeeper] = []
            if not _users[self._directory]:
                del _users[self._directory]
                kept = _kept.pop(self._directory, [])
        for keeper in kept:
            if keeper.is_running:
                await asyncio.shield(in_thread(keeper.end))

    def _hold_lock(self, worker: str) -> None:
        """Hold the lock of a worker. Without one, the keeper cannot learn that the worker is dead."""
        now = asyncio.get_running_loop().time()
        held = self._locks.get(worker)
        if held is not None and now - self._looked_at < LOOK_AT_LOCKS_EVERY_S:
            return
        self._looked_at = now
        if held is None or not held.refresh():
            with suppress(OSError):
                self._locks[worker] = WorkerLock.hold(self._directory, worker)
                if held is not None:
                    held.close()  # not before: a file that is in place and not locked says that the worker is dead

    def _open_connection(self) -> _Connection | None:
        connection = self._connection
        if connection is None:
            return None
        if self._pid != os.getpid() or connection.loop is not asyncio.get_running_loop():
            connection.drop()
            self._connection = None
        elif not connection.is_open or connection.number < self._latest():
            connection._end()
            self._connection = None
        return self._connection

    def _latest(self) -> int:
        with suppress(OSError):
            return latest(self._directory)
        return 0

    async def _connect(self) -> _Connection:
        """Return the connection. Concurrent calls share one attempt."""
        if self._pid != os.getpid():
            self._pid, self._connecting = os.getpid(), None
            with _lock:
                _users[self._directory] = _users.get(self._directory, 0) + 1
        connecting = self._connecting
        if connecting is None or connecting.done() or connecting.get_loop() is not asyncio.get_running_loop():
            connecting = self._connecting = asyncio.ensure_future(self._find())
            connecting.add_done_callback(_retrieve)
        self._connection = await asyncio.shield(connecting)
        return self._connection

    async def _find(self) -> _Connection:
        loop = asyncio.get_running_loop()
        gives_up_at, problem = loop.time() + CONNECT_WITHIN_S, "it does not listen"
        while loop.time() < gives_up_at:
            try:
                private_directory(os.fspath(self._directory))  # it may have been removed
                number = latest(self._directory)
                if number and number != self._silent:
                    connection = await self._try(number, gives_up_at - loop.time())
                    if connection is not None:
                        self._met, self._silent = True, 0
                        return connection
                    self._start(number)
                elif number:
                    self._start(number + 1)
                else:
                    self._start(1)
            except (OSError, RuntimeError) as error:
                problem = getattr(error, "strerror", None) or str(error)
            except ConfigurationError as error:
                problem = error.mistakes[0].problem.removesuffix(".")
            await asyncio.sleep(_LOOK_EVERY_S)
        raise KeeperSilent(f"the quota keeper of this machine cannot be reached in {self._directory} ({problem})")

    async def _try(self, number: int, within_s: float) -> _Connection | None:
        """Connect to the keeper of a number; None if nobody listens."""
        loop = asyncio.get_running_loop()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.setblocking(False)
        try:
            path = os.fspath(socket_path(self._directory, number))
            with anyio.fail_after(within_s):
                await loop.sock_connect(stream, path)
            if not is_own_user(stream):
                raise PermissionError(errno.EPERM, "the keeper is a process of another user")
            with anyio.fail_after(within_s):
                hello = await receive(stream)
        except (FileNotFoundError, ConnectionError):
            stream.close()
            return None
        except TimeoutError:
            stream.close()
            raise OSError(errno.ETIMEDOUT, "it does not answer") from None
        except Unreadable as error:
            stream.close()
            raise OSError(errno.EPROTO, str(error)) from None
        except BaseException:
            stream.close()
            raise
        if hello is None:
            stream.close()
            return None
        mine = hello.get("pid") == os.getpid()
        self.kept_by = "this process" if mine else f"process {hello.get('pid')} of this machine"
        return _Connection(stream, number)

    def _start(self, number: int) -> None:
        """Become the keeper of a number if nobody holds its lock."""
        with _lock:
            kept = _kept.get(self._directory, [])
            if kept and kept[-1].is_alive and kept[-1].lock.number >= number:
                return
            taken = take_over(self._directory, number, met=self._met)
            if taken is not None:
                _kept[self._directory] = [*(one for one in kept if one.is_running), taken]


def _close_inherited() -> None:
    global _lock
    _lock = threading.Lock()
    _users.clear()
    _kept.clear()
    for connection in list(_connections):
        connection.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


async def _status(directory: Path) -> Mapping[str, Any] | None:
    """Return what the keeper says of itself; None if there is none. Raises `OSError` and `Unreadable`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.setblocking(False)
        path = os.fspath(socket_path(directory, latest(directory)))
        try:
            await asyncio.get_running_loop().sock_connect(stream, path)
        except (FileNotFoundError, ConnectionError):
            return None
        await receive(stream)
        await send(stream, {"status": True})
        reply = await receive(stream)
        status = reply.get("status") if reply is not None else None
        return status if isinstance(status, dict) else None


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()
