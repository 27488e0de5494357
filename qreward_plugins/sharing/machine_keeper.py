"""The keeper of a machine's limits: a thread of the first process that needs one.

It has an event loop of its own, because the process's other loops may be blocked or closed. It serves a Unix socket, to
its own process, too. It ends when the last channel of its process is closed or the process exits, and leaves its state
to the next keeper; or when another keeper has replaced it.

It looks whether a worker is dead when the worker's connection has ended, and whether those are dead that an earlier
keeper may have given shares and that do not report. Their shares then wait for no time to expire (worker_locks.py).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import secrets
import socket
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

from ..system.processes import is_own_user
from .frames import receive, send
from .keeper import MARGIN_S, TTL_S, Keeper
from .keeper_lock import STAMP_EVERY_S, KeeperLock, socket_path
from .keeper_loop import KeeperLoop
from .messages import Report
from .wire import Unreadable, read_report, write_answer
from .worker_locks import named, not_dead, state

_log = logging.getLogger("qreward_plugins.sharing")

MOST_PEERS = 4096
"""Most connections at a time; further ones are closed at once."""
MOST_OPEN_REPORTS = 4096
"""Most reports of one connection that wait for an answer; no more are read meanwhile."""
END_WITHIN_S = 2.0
DEAD_WITHIN_S = 0.1
"""Seconds between two looks for dead workers, while there are any that may be dead."""

_keepers: weakref.WeakSet[MachineKeeper] = weakref.WeakSet()
_of_the_parent: list[MachineKeeper] = []
"""After a fork: what has no thread here. If its loop were collected, that would touch the parent's selector."""


class MachineKeeper:
    """Serves the keeper in a thread. `lock` is held, and released at the end. `met`: this process has seen another
    keeper.

    `start` raises `RuntimeError` if the system gives no thread.
    """

    def __init__(self, lock: KeeperLock, *, met: bool) -> None:
        self.lock = lock
        self._met = met
        self._boot = secrets.token_hex(8)
        self._running: KeeperLoop
        self._sockets: set[socket.socket] = set()
        self._peers: set[asyncio.Task[None]] = set()
        self._connections: dict[str, socket.socket] = {}
        """The last connection of each worker that reported."""
        self._gone: dict[str, float] = {}
        """Workers whose connection has ended, and when their shares have expired."""
        self._ended: asyncio.Event | None = None
        """Set when a connection of a worker has ended."""
        self._listed_from = -math.inf
        """When all living workers that may hold a share have files, as far as is known."""
        self._looked_at = -math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qreward-keeper", daemon=True)
        _keepers.add(self)

    @property
    def is_alive(self) -> bool:
        """Whether it serves, or is about to."""
        return self._thread.is_alive() and not self._stopping.is_set()

    @property
    def is_running(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. The socket is there soon after."""
        try:
            self._thread.start()
        except RuntimeError:
            self.lock.release()
            raise

    def end(self) -> None:
        """End in order, from any thread. Waits up to `END_WITHIN_S`."""
        self._stopping.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(stop.set)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(END_WITHIN_S)

    def close_inherited(self) -> None:
        """Close what a forked child has inherited, or the sockets and the lock would outlive this process."""
        for each in list(self._sockets):
            with suppress(OSError):
                each.close()
        self.lock.release()
        self._stopping.set()

    def _run(self) -> None:
        loop = self._loop = asyncio.SelectorEventLoop()
        try:
            loop.run_until_complete(self._serve())
        except Exception:
            _log.exception("the quota keeper of this machine has failed; another process may start one")
        finally:
            self._stopping.set()
            for each in list(self._sockets):
                each.close()
            self._sockets.clear()
            self.lock.release()
            loop.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        stop = self._stop = asyncio.Event()
        inherited = self.lock.inherit(loop.time(), met=self._met)
        unheard = self._not_dead() if inherited.listed else None
        # The clock is read anew: an earlier keeper may have answered until its file was replaced, which is before now.
        self._running = KeeperLoop(
            Keeper(
                loop.time(),
                boot=self._boot,
                first=inherited.first,
                expired_at=inherited.expired_at,
                charged=inherited.charged,
                unheard=unheard,
            ),
            may_answer=self._may_answer,
        )
        if unheard is None:
            self._found_one_without_file()
        if not self._stamp():
            _log.error("the quota keeper cannot write to %s, and ends", self.lock.directory)
            return
        path = socket_path(self.lock.directory, self.lock.number)
        with suppress(FileNotFoundError):
            path.unlink()
        listener = self._own(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(os.fspath(path))
        listener.listen(128)
        serving = [loop.create_task(self._accept(listener)), loop.create_task(self._look_for_dead())]
        try:
            while not (stop.is_set() or self._stopping.is_set()):
                with anyio.move_on_after(STAMP_EVERY_S):
                    await stop.wait()
                if not stop.is_set():
                    self._may_answer()
        finally:
            self._running.stop()
            if self.lock.is_current():
                keeper = self._running.keeper
                self.lock.leave(self._boot, keeper.charged(loop.time()), keeper.expired_at)
                with suppress(OSError):
                    path.unlink()
            ending = [*serving, *self._peers]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def _may_answer(self) -> bool:
        assert self._loop is not None
        assert self._stop is not None
        if self._stop.is_set() or self._stopping.is_set():
            return False
        # The sign of life comes first: a keeper that replaces this one after the check can read it.
        if self._stamp() and self.lock.is_current():
            return True
        _log.warning("this quota keeper ends: another process has replaced it, or its directory is gone or full")
        self._stop.set()
        return False

    def _stamp(self) -> bool:
        assert self._loop is not None
        now = self._loop.time()
        if now - self._looked_at >= STAMP_EVERY_S:
            self._looked_at = now
            self._look_for_files()
        return self.lock.stamp(now, self._boot, listed=now >= self._listed_from)

    def _not_dead(self) -> frozenset[str] | None:
        """Return the workers that are not proved dead; None if they cannot be listed."""
        try:
            return not_dead(self.lock.directory)
        except OSError as error:
            _log.warning("the quota keeper cannot list the workers of this machine (%s)", error.strerror)
            return None

    def _look_for_files(self) -> None:
        """Note whether the file of a worker was removed, by hand for example."""
        hears = self._running.keeper.hears
        # Over a connection that relays, many may come and never leave.
        self._connections = {worker: last for worker, last in self._connections.items() if hears(worker)}
        try:
            have = named(self.lock.directory)
        except OSError:
            have = frozenset()
        if not have.issuperset(self._connections) or not have.issuperset(self._gone):
            self._found_one_without_file()

    def _found_one_without_file(self) -> None:
        """Note that a worker without a file may hold a share, until the share has expired or is seen again."""
        assert self._loop is not None
        self._listed_from = max(self._loop.time() + TTL_S + MARGIN_S, self._running.keeper.expired_at)

    async def _look_for_dead(self) -> None:
        """Tell the keeper which workers are dead, of those that may be."""
        ended = self._ended = asyncio.Event()
        loop, keeper = asyncio.get_running_loop(), self._running.keeper
        while True:
            ended.clear()
            now = loop.time()
            self._gone = {worker: until for worker, until in self._gone.items() if now < until}
            may_be = {*self._gone, *keeper.unheard}
            dead = [worker for worker in may_be if state(self.lock.directory, worker) == "dead"]
            if dead:
                for worker in dead:
                    self._gone.pop(worker, None)
                self._running.died(dead)
            if self._gone or keeper.unheard:
                await asyncio.sleep(DEAD_WITHIN_S)
            else:
                await ended.wait()

    def _came(self, report: Report, stream: socket.socket) -> None:
        """Note who reports on a connection."""
        worker = report.worker
        if report.leaves:
            self._connections.pop(worker, None)
        else:
            if self._connections.get(worker) is not stream and state(self.lock.directory, worker) != "alive":
                self._found_one_without_file()
            self._connections[worker] = stream
        self._gone.pop(worker, None)

    def _went(self, stream: socket.socket) -> None:
        """Note that a connection has ended."""
        assert self._loop is not None
        expire_at = self._loop.time() + TTL_S + MARGIN_S
        gone = [worker for worker, last in self._connections.items() if last is stream]
        for worker in gone:
            del self._connections[worker]
            self._gone[worker] = expire_at
        if gone and self._ended is not None:
            self._ended.set()

    def _own(self, each: socket.socket) -> socket.socket:
        each.setblocking(False)
        self._sockets.add(each)
        return each

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                stream, _ = await loop.sock_accept(listener)
            except OSError as error:
                # No file descriptor is left, for example.
                _log.warning("the quota keeper cannot accept a connection (%s)", error.strerror)
                await asyncio.sleep(STAMP_EVERY_S)
                continue
            if len(self._peers) >= MOST_PEERS or not is_own_user(stream):
                stream.close()
                continue
            task = loop.create_task(self._attend(self._own(stream)))
            self._peers.add(task)
            task.add_done_callback(self._peers.discard)

    async def _attend(self, stream: socket.socket) -> None:
        """Answer one connection until it ends. Whatever it sends, it ends only itself."""
        answering: set[asyncio.Task[None]] = set()
        sending = asyncio.Lock()
        try:
            await send(stream, {"keeper": self._boot, "pid": os.getpid()})
            while (message := await receive(stream)) is not None:
                while len(answering) >= MOST_OPEN_REPORTS:
                    await asyncio.wait(answering, return_when=asyncio.FIRST_COMPLETED)
                if "status" in message:
                    async with sending:
                        await send(stream, {"status": self._status()})
                    continue
                report = read_report(message.get("report"))
                task = asyncio.create_task(self._answer(stream, report, sending))
                answering.add(task)
                task.add_done_callback(answering.discard)
                await asyncio.sleep(0)  # reports reach the keeper in the order in which they were sent
        except Unreadable as error:
            _log.warning("the quota keeper closes a connection that sent something unreadable: %s", error)
        except OSError:
            pass  # the process at the other end is gone, or does not read
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
            self._went(stream)
            self._sockets.discard(stream)
            stream.close()

    async def _answer(self, stream: socket.socket, report: Report, sending: asyncio.Lock) -> None:
        self._came(report, stream)
        answer = await self._running.exchange(report)
        message: dict[str, Any] = {"worker": report.worker, "number": report.number, "answer": None}
        if answer is not None:
            message["answer"] = write_answer(answer)
        async with sending:
            try:
                await send(stream, message)
            except OSError:
                with suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)

    def _status(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "workers": self._running.keeper.workers, "boot": self._boot}


def _close_inherited() -> None:
    for keeper in list(_keepers):
        keeper.close_inherited()
        _of_the_parent.append(keeper)
    _keepers.clear()


def _end_all() -> None:
    for keeper in list(_keepers):
        keeper.end()


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def take_over(directory: Path, number: int, *, met: bool) -> MachineKeeper | None:
    """Start the keeper of a number in this process; None if another process holds its lock. Raises `OSError` and
    `RuntimeError`.
    """
    lock = KeeperLock.lock(directory, number)
    if lock is None:
        return None
    keeper = MachineKeeper(lock, met=met)
    keeper.start()
    return keeper
