"""Controls the worker processes of a source from their parent. Each runs one call at a time, and is killed at once.

Parent and worker talk over a socket that the event loop watches, without a thread and without polling. If a call does
not return, the state of the worker is unknown; so it is killed, with every process that the function started.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ..errors import NotStarted, SampleFault
from ..system.functions import Loader, absolute
from .worker_program import CALL, END_WITHIN_S, HEADER

_PROGRAM = (
    "import json, os, sys; sys.stderr and os.dup2(2, 1); sys.stdout = sys.stderr; "
    "sys.path[:] = json.loads(sys.argv[2]); "
    "from qreward_plugins.sources.worker_program import main; main(int(sys.argv[1]))"
)
"""What a function prints goes to stderr, line by line: on stdout it would break what `--json` writes."""
LONGEST_START_S = 300.0
"""Seconds that a worker may take to load its function."""


class WorkerDied(Exception):
    """The process ended in the middle of a call, or while it loaded the function. The message says how."""


class CannotLoad(Exception):
    """The worker cannot load the function; the message says why."""


def _nothing() -> None:
    return None


class Worker:
    """One process. `boot` is the pickled loader of the function, `places` those where it imports modules. `variables`
    are added to its environment before it imports anything.
    """

    def __init__(self, boot: bytes, places: Sequence[str], variables: Mapping[str, str]) -> None:
        self.variables = variables
        self._boot = boot
        self.killed = False
        # Weak: the interpreter keeps the workers to its end, and a loop or a future leads to the pool, which would not
        # be collected.
        self._loop: Callable[[], asyncio.AbstractEventLoop | None] = _nothing
        """The event loop that watches the channel, from the first call on."""
        self._answer: Callable[[], asyncio.Future[tuple[bytes, bytes]] | None] = _nothing
        self._received = bytearray()
        self._channel, theirs = socket.socketpair()
        try:
            self._channel.setblocking(False)
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(descriptor), json.dumps(places)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                # There is one worker per processor, so more threads in each would only compete.
                env={"OMP_NUM_THREADS": "1", **os.environ, **variables},
                # A process group of its own: a kill also ends what the function started, and Ctrl-C reaches only us.
                start_new_session=True,
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()

    async def start(self) -> None:
        """Wait until the function is loaded.

        Raises CannotLoad or WorkerDied. Cancelling kills the worker.
        """
        loop = asyncio.get_running_loop()
        overdue = loop.call_later(LONGEST_START_S, self.kill)
        try:
            _, payload = await self.call(self._boot)
        except WorkerDied:
            if loop.time() < overdue.when():
                raise
            raise WorkerDied(f"had not loaded the function after {LONGEST_START_S:g} s") from None
        finally:
            overdue.cancel()
        if payload:
            self.kill()
            raise CannotLoad(pickle.loads(payload))

    async def call(self, message: bytes) -> tuple[bytes, bytes]:
        """Send one message and return the kind and the payload of the answer.

        Raises WorkerDied. If it raises or is cancelled, it kills the worker.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop():
            self._unwatch()
            loop.add_reader(self._channel, self._read)
            self._loop = weakref.ref(loop)
        answer: asyncio.Future[tuple[bytes, bytes]] = loop.create_future()
        self._answer = weakref.ref(answer)
        try:
            await loop.sock_sendall(self._channel, HEADER.pack(len(message), CALL) + message)
            return await answer
        except (OSError, EOFError):
            ending = await self._ending()
        except BaseException:
            self.kill()
            raise
        finally:
            self._answer = _nothing
        self.kill()
        raise WorkerDied(f"died ({ending})")

    def _read(self) -> None:
        try:
            chunk = self._channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        received, answer = self._received, self._answer()
        received += chunk
        if answer is None:
            # It ended while it was idle, or it sent something unasked.
            self._unwatch()
            self.kill()
        elif not chunk:
            self._unwatch()
            if not answer.done():
                answer.set_exception(EOFError())
        elif len(received) >= HEADER.size:
            length, kind = HEADER.unpack_from(received)
            if len(received) == HEADER.size + length:
                payload = bytes(received[HEADER.size :])
                received.clear()
                if not answer.done():
                    answer.set_result((kind, payload))

    def _unwatch(self) -> None:
        loop, self._loop = self._loop(), _nothing
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._channel)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it can take another call."""
        return not self.killed and not self.ended()

    def ended(self) -> bool:
        """Whether the process has ended; reaps it if so."""
        return self._process.poll() is not None

    def reap(self, limit_s: float) -> None:
        """Wait for a killed process, and block meanwhile. For use without an event loop."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def close(self) -> None:
        """Close the channel. An idle process then ends by itself."""
        self._unwatch()
        self._channel.close()

    def kill(self) -> None:
        """Kill the process and all that it started. Idempotent."""
        if self.killed:
            return
        self.killed = True
        # The group is killed even if the worker has just ended: its children may still run.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # Wakes a waiting call; closing the socket would not.
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    async def _ending(self) -> str:
        # The channel closes shortly before the process has an exit status.
        for _ in range(20):
            if self.ended():
                status = self._process.returncode
                return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            await asyncio.sleep(0.005)
        return "still running, but it closed its channel"


_LOOK_AGAIN_S = 0.005
_KILLED_WITHIN_S = 1.0


class PoolClosed(Exception):
    """The pool was closed before the call could start."""


class WorkerPool:
    """Runs one function in `size` processes. Each gets one of the mappings of environment `variables`, evenly; the
    successor of a process that has died gets the mapping of that one.

    It serves one event loop at a time. Messages begin with `name`. The constructor raises the error of pickle if
    `loader` cannot be pickled.
    """

    def __init__(self, name: str, loader: Loader, size: int, variables: Sequence[Mapping[str, str]] = ({},)) -> None:
        self._name = name
        self._boot = pickle.dumps(loader)
        self._variables = variables
        self._places = [absolute(place) for place in sys.path]
        self._size = size
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._ending: set[Worker] = set()
        self._waiters: deque[asyncio.Future[Worker]] = deque()
        self._starts: dict[Worker, asyncio.Task[Exception | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        # A pool that is never closed kills its workers when it is collected, or when the interpreter exits.
        weakref.finalize(self, _kill_all, self._workers, self._ending, os.getpid())

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the workers."""
        return frozenset(worker.pid for worker in self._workers)

    async def start(self) -> None:
        """Start all workers ahead of the first call, and wait until each has loaded the function or failed. Cancelling
        ends only the wait.

        Raises CannotLoad or PoolClosed. A failure of some of them is left to the calls, which start workers again.
        """
        if self._closed:
            raise PoolClosed
        self._move_to(asyncio.get_running_loop())
        self._start_workers(self._size)
        if starts := list(self._starts.values()):
            await asyncio.wait(starts)
        for start in starts:
            failure = PoolClosed() if start.cancelled() else start.result()
            if isinstance(failure, (CannotLoad, PoolClosed)):
                raise failure
            if failure is not None and not self._workers:
                raise CannotLoad(f"no worker process could be started (it {failure})")

    async def call(self, message: bytes, *, on_start: Callable[[], None]) -> tuple[bytes, bytes]:
        """Run one call, with the pickled arguments `message`, in an idle worker; return the kind and the payload.

        `on_start` is called when it has a worker. Cancelling kills the worker, and what it started, before it returns.

        Raises SampleFault if this call failed; PoolClosed, CannotLoad or NotStarted if no worker can run any call.
        """
        worker = await self._acquire()
        try:
            on_start()
            return await worker.call(message)
        except WorkerDied as death:
            raise SampleFault(f"{self._name}: its worker process {death}", reason="crashed") from None
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
        if self._closed or worker.killed:
            self._discard(worker)
            # Replaced even if no call waits, so that the next call need not wait for an import. Another one may be
            # starting, in place of another worker.
            self._start_workers(max(len(self._starts) + 1, len(self._waiters)))
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._idle.append(worker)

    def _start_workers(self, wanted: int) -> None:
        if self._closed or self._loop is None:
            return
        for _ in range(min(wanted - len(self._starts), self._size - len(self._workers))):
            try:
                worker = Worker(self._boot, self._places, min(self._variables, key=self._users))
            except OSError as error:
                self._fail_waiters(self._not_started(error.strerror))
                return
            self._workers.add(worker)
            self._starts[worker] = self._loop.create_task(self._start(worker))

    def _users(self, variables: Mapping[str, str]) -> int:
        return sum(worker.variables is variables for worker in self._workers)

    async def _start(self, worker: Worker) -> Exception | None:
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
                _fail(self._waiters.popleft(), self._not_started(f"it {failure}"))
            self._start_workers(len(self._waiters))
        return failure

    def _not_started(self, why: object) -> NotStarted:
        return NotStarted(f"{self._name}: no worker process can be started ({why})")

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
        if loop is self._loop:
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
