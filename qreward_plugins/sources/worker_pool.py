"""Runs calls in a pool of worker processes; each runs one call at a time, and a killed worker is replaced.

Pools of the standard library cannot kill a call. Third-party pools that can use the wall clock, poll every 0.1 s, and
break when an exception cannot be unpickled. Workers start on demand. The pool owns the start of a worker: if the call
that caused it is cancelled, the start goes on. Otherwise a function with an import longer than the time limit of a call
would never run.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ..system.functions import Loader, absolute
from .worker import CallOverdue, CannotLoad, Worker
from .worker_program import END_WITHIN_S

_LOOK_AGAIN_S = 0.005
_KILLED_WITHIN_S = 1.0


class CannotStart(Exception):
    """A worker process died or took too long before it had loaded the function. No call caused it."""


class PoolClosed(Exception):
    """The pool was closed before the call could start."""


class WorkerPool:
    """Runs one function in `size` processes, and in up to `spare` more if all of these are busy.

    It serves one event loop at a time. The constructor raises the error of pickle if `loader` cannot be pickled.
    """

    def __init__(self, loader: Loader, size: int, *, spare: int = 0) -> None:
        self._boot = pickle.dumps(loader)
        self._places = [absolute(place) for place in sys.path]
        self._size = size
        self._most = size + spare
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._ending: set[Worker] = set()
        self._waiters: deque[asyncio.Future[Worker]] = deque()
        self._starts: dict[Worker, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._pid = os.getpid()
        # A pool that is never closed kills its workers when it is collected, or when the interpreter exits.
        weakref.finalize(self, _kill_all, self._workers, self._ending, self._pid)

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the workers."""
        return frozenset(worker.pid for worker in self._workers)

    async def call(self, message: bytes, limit_s: float, *, on_start: Callable[[], None]) -> tuple[bytes, bytes]:
        """Run one call, with the pickled arguments `message`, in an idle worker; return the kind and the payload.

        It has `limit_s` seconds from its start. `on_start` is called when it has a worker. Cancelling kills the worker,
        and what it started, before it returns.

        Raises WorkerDied, CallOverdue or ValueTooLarge if this call failed; PoolClosed, CannotLoad, CannotStart or
        OSError if no worker can run any call.
        """
        worker = await self._acquire()
        try:
            on_start()
            return await worker.call(message, limit_s)
        finally:
            self._give_back(worker)

    async def aclose(self) -> None:
        """End all workers: busy ones are killed, idle ones have 2 s to end by themselves. Idempotent."""
        self._closed = True
        loop = asyncio.get_running_loop()
        self._move_to(loop)
        starts = dict(self._starts)
        for start in starts.values():
            start.cancel()
        await asyncio.gather(*starts.values(), return_exceptions=True)
        for worker in starts:
            # A task that is cancelled before its first step does not run its `finally`.
            self._discard(worker)
        self._starts.clear()
        while self._waiters:
            _fail(self._waiters.popleft(), PoolClosed())
        busy = self._workers - set(self._idle)
        for worker in busy:
            # Killed but not closed: the call that waits at the channel closes it.
            worker.kill()
        for worker in self._idle:
            worker.close()
        ending = [*busy, *self._idle, *self._ending]
        self._idle.clear()
        try:
            ending = await _ended(ending, loop.time() + END_WITHIN_S)
        finally:
            for worker in ending:
                worker.kill()
        ending = await _ended(ending, loop.time() + _KILLED_WITHIN_S)
        self._workers.clear()
        self._ending.clear()
        self._ending.update(ending)

    async def _acquire(self) -> Worker:
        loop = asyncio.get_running_loop()
        self._move_to(loop)
        if self._closed:
            raise PoolClosed
        self._reap()
        while self._idle:
            worker = self._idle.pop()
            if worker.usable:
                return worker
            self._discard(worker)
        waiter: asyncio.Future[Worker] = loop.create_future()
        self._waiters.append(waiter)
        self._start_workers(len(self._waiters))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result())
            raise
        finally:
            with suppress(ValueError):
                self._waiters.remove(waiter)

    def _give_back(self, worker: Worker) -> None:
        if self._closed or not worker.usable:
            self._discard(worker)
            # Replaced even if no call waits, so that the next call need not wait for an import.
            self._start_workers(max(len(self._workers) < self._size, len(self._waiters)))
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        if len(self._workers) > self._size:
            self._discard(worker)
        else:
            self._idle.append(worker)

    def _start_workers(self, wanted: int) -> None:
        if self._closed or self._loop is None:
            return
        for _ in range(min(wanted - len(self._starts), self._most - len(self._workers))):
            try:
                worker = Worker(self._boot, self._places)
            except OSError as error:
                self._fail_waiters(error)
                return
            self._workers.add(worker)
            self._starts[worker] = self._loop.create_task(self._start(worker))

    async def _start(self, worker: Worker) -> None:
        failure: Exception | None = None
        try:
            await worker.start()
        except Exception as error:
            failure = error
        finally:
            self._starts.pop(worker, None)
            if not worker.usable:
                self._discard(worker)
        if failure is None:
            self._give_back(worker)
        elif isinstance(failure, CannotLoad):
            # Another worker could not load it either.
            self._fail_waiters(failure)
        else:
            if self._waiters:
                _fail(self._waiters.popleft(), CannotStart(_described(failure)))
            self._start_workers(len(self._waiters))

    def _fail_waiters(self, error: Exception) -> None:
        while self._waiters:
            _fail(self._waiters.popleft(), error)

    def _discard(self, worker: Worker) -> None:
        worker.kill()
        worker.close()
        self._workers.discard(worker)
        if not worker.ended():
            self._ending.add(worker)
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_later(_LOOK_AGAIN_S, self._reap)

    def _reap(self) -> None:
        self._ending -= {worker for worker in self._ending if worker.ended()}

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._pid != os.getpid():
            # After a fork the workers belong to the parent, which goes on using them.
            self._pid = os.getpid()
            for worker in self._workers:
                worker.close()
            self._workers = set()
            self._idle = []
            self._ending = set()
        elif loop is self._loop:
            return
        # Calls and starts of an earlier loop can never finish.
        self._loop = loop
        self._waiters.clear()
        self._starts.clear()
        for worker in self._workers - set(self._idle):
            self._discard(worker)


async def _ended(workers: list[Worker], until: float) -> list[Worker]:
    """Wait for the processes to end until the event loop's time `until`, and return those that still run."""
    loop = asyncio.get_running_loop()
    while workers := [worker for worker in workers if not worker.ended()]:
        if loop.time() >= until:
            break
        await asyncio.sleep(_LOOK_AGAIN_S)
    return workers


def _described(failure: Exception) -> str:
    return "it did not load the function in time" if isinstance(failure, CallOverdue) else str(failure)


def _fail(waiter: asyncio.Future[Worker], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)


def _kill_all(workers: set[Worker], ending: set[Worker], pid: int) -> None:
    if os.getpid() == pid:
        for worker in workers:
            worker.kill()
            worker.close()
        for worker in workers | ending:
            worker.reap(_KILLED_WITHIN_S)
