"""Controls one worker process from its parent: it runs one call at a time, and kills the process at once.

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
from collections.abc import Sequence
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
    """One process. `boot` is the pickled loader of the function, `places` those where it imports modules."""

    def __init__(self, boot: bytes, places: Sequence[str]) -> None:
        self._boot = boot
        self._killed = False
        self._overdue = False
        self._channel, theirs = socket.socketpair()
        try:
            self._channel.setblocking(False)
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(descriptor), json.dumps(places)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                # There is one worker per processor, so more threads in each would only compete.
                env={"OMP_NUM_THREADS": "1", **os.environ},
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

        Raises CannotLoad, WorkerDied or CallOverdue. Cancelling kills the worker.
        """
        _, payload = await self.call(self._boot, LONGEST_START_S)
        if payload:
            self.kill()
            raise CannotLoad(pickle.loads(payload))

    async def call(self, message: bytes, limit_s: float) -> tuple[bytes, bytes]:
        """Send one message and return the kind and the payload of the answer.

        Raises WorkerDied, CallOverdue or ValueTooLarge. If it raises or is cancelled, it kills the worker.
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
        """Whether the process has ended; reaps it if so."""
        return self._process.poll() is not None

    def reap(self, limit_s: float) -> None:
        """Wait for a killed process, and block meanwhile. For use without an event loop."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def close(self) -> None:
        """Close the channel. An idle process then ends by itself."""
        self._channel.close()

    def kill(self) -> None:
        """Kill the process and all that it started. Idempotent."""
        if self._killed:
            return
        self._killed = True
        # The group is killed even if the worker has just ended: its children may still run.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # Wakes a waiting call; closing the socket would not.
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _kill_overdue(self) -> None:
        self._overdue = True
        self.kill()

    async def _ending(self) -> str:
        # The channel closes shortly before the process has an exit status.
        for _ in range(20):
            if self.ended():
                status = self._process.returncode
                return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            await asyncio.sleep(0.005)
        return "still running, but it closed its channel"

    def __repr__(self) -> str:
        return f"Worker({self.pid})"
