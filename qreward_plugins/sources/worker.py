"""A worker process as its parent sees it: one call at a time, and a kill that takes effect at once.

The two talk over a socket that the event loop watches, which needs no thread and nothing to poll. A call that does not
return, for whatever reason, leaves the worker in a state that nobody knows; so it is killed, together with everything
that the function started.
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
from contextlib import suppress

from .worker_program import CALL, HEADER

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from qreward_plugins.sources.worker_program import main; main(int(sys.argv[1]))"
)
LONGEST_START_S = 300.0
"""Seconds that a worker may take to load its function."""
_MOST_BYTES = 64 * 2**20


class WorkerDied(Exception):
    """The process ended in the middle of a call, or while it loaded the function."""


class CallOverdue(Exception):
    """The call took too long and was killed."""


class ValueTooLarge(Exception):
    """The function returned more than 64 MiB."""


class CannotLoad(Exception):
    """The worker cannot load the function; the message says why."""


class Worker:
    """One process. `boot` is the pickled loader of the function."""

    def __init__(self, boot: bytes) -> None:
        self._boot = boot
        self._killed = False
        self._overdue = False
        self._channel, theirs = socket.socketpair()
        try:
            self._channel.setblocking(False)
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(descriptor), json.dumps(sys.path)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                # One worker for each processor: libraries that start as many threads again would only get in their way.
                env={"OMP_NUM_THREADS": "1", **os.environ},
                # A group of its own, so that a kill takes what the function started along, and Ctrl-C leaves it to us.
                start_new_session=True,
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()

    async def start(self) -> None:
        """Wait until the function is loaded.

        Raises CannotLoad, WorkerDied or CallOverdue. Cancelling kills the worker.
        """
        _, payload = await self.call(self._boot, LONGEST_START_S)
        if payload:
            self.kill()
            raise CannotLoad(pickle.loads(payload))

    async def call(self, message: bytes, limit_s: float) -> tuple[bytes, bytes]:
        """Send one message and return the kind and the payload of the answer.

        Raises WorkerDied, CallOverdue or ValueTooLarge. However it ends but by returning, cancellation included, the
        worker is killed.
        """
        loop = asyncio.get_running_loop()
        overdue = loop.call_later(limit_s, self._kill_overdue)
        try:
            await loop.sock_sendall(self._channel, HEADER.pack(len(message), CALL) + message)
            length, kind = HEADER.unpack(await self._receive(loop, HEADER.size))
            if length > _MOST_BYTES:
                raise ValueTooLarge
            return kind, await self._receive(loop, length)
        except (OSError, EOFError):
            ending = await self._ending()
        except BaseException:
            self.kill()
            raise
        finally:
            overdue.cancel()
        self.kill()
        raise CallOverdue if self._overdue else WorkerDied(ending)

    async def _receive(self, loop: asyncio.AbstractEventLoop, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            chunk = await loop.sock_recv(self._channel, min(count - len(received), 1 << 20))
            if not chunk:
                raise EOFError
            received += chunk
        return bytes(received)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it can take another call."""
        return not self._killed and not self.ended()

    def ended(self) -> bool:
        """Say whether the process has ended, and reap it if so."""
        return self._process.poll() is not None

    def reap(self, limit_s: float) -> None:
        """Wait for a process that was killed, blocking; for where no event loop runs any more."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def close(self) -> None:
        """Close the channel, upon which the process ends by itself when it is idle."""
        self._channel.close()

    def kill(self) -> None:
        """Kill the process and all that it started. Idempotent."""
        if self._killed:
            return
        self._killed = True
        # The group is killed even if its first process has just ended: what that started may still be there.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # Wakes the call, if one waits; closing alone would not.
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _kill_overdue(self) -> None:
        self._overdue = True
        self.kill()

    async def _ending(self) -> str:
        # The channel ends a moment before the process has a status.
        for _ in range(20):
            if self.ended():
                status = self._process.returncode
                return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            await asyncio.sleep(0.005)
        return "still running, but it closed its channel"

    def __repr__(self) -> str:
        return f"Worker({self.pid})"
