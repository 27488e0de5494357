"""The process that runs a pool for all processes of a user on this machine.

The first process that needs a pool starts it, the others find it by a socket in the private directory. A connection is
a use: the pool ends with its last user, however that one ended, because the kernel closes its connections. If this
process is killed, the guards end the servers.

A user sends its `PoolSpec` as one line of JSON. It gets a line after each change: `{"replicas": [...], "weights":
{...}, "ready": bool}`, or `{"failed": problem, "log": lines}`, after which the pool ends. A user that leaves shuts down
its side, and the pool closes the connection; to the last user, once every server has ended.

A user sends further lines: first `{"weights": {...}, "asleep": bool}`, what an earlier pool had; `{"idle": [[replica,
ticket], ...]}` when it has no calls at replicas that are draining; `{"command": "update" | "sleep" | "wake",
"id": n, "arguments": {...}}`, which is answered by `{"id": n, "result": {...}}` or `{"id": n, "error": {...}}`; and
`{"cancel": n}`. `{"id": n, "receiving": [...]}` says which replicas begin to receive tensors. The command "status" asks
the other users for their counts: they get `{"report": true}`, and send `{"loads": {...}}` (`PoolStatus`).

Whoever sends `"starts": false` in the second line is a guest: it begins no pool, and if none has begun, its connection
is closed. A guest gets the states and gives commands, as a user does. But it sends no requests: so no pool goes on for
it, and no change waits for it. `{}` and `{"describe": true}` ask for the digests of the spec (`PoolSpec.digests`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import orjson

from ..system.processes import ProcessMark, is_own_user, peer_pid
from ..system.threads import in_thread
from .commands import Commands
from .launch import LocalServer
from .local_pool_use import BACKLOG, LINE_BYTES
from .lock_files import listens, lock, locked, remove_files, remove_left
from .pool import Pool, PoolFailed
from .pool_search import describe
from .sleep_record import SleepRecord
from .spec import PoolSpec
from .weights import Weights

_log = logging.getLogger("qreward_plugins.replicas")

_FIRST_USER_S = 30.0
"""Seconds after which a pool ends that nobody has begun to use."""
_FAILURE_SHOWN_S = 5.0
_UNREADABLE = (
    "the process of the pool cannot read what this one sends. Do they run the same version of qreward-plugins?"
)
_LOCKED_WITHIN_S = 1.0
_TOUCH_EVERY_S = 3600.0
"""Seconds after which the files of a pool are touched: systems remove files from /tmp that are some days old."""


class PoolProcess:
    """Runs one pool for the users that connect to `listening`. `key` is that of its spec."""

    def __init__(self, listening: socket.socket, folder: Path, key: str) -> None:
        self._listening = listening
        self._folder = folder
        self._key = key
        self._users: set[asyncio.StreamWriter] = set()
        self._guests: set[asyncio.StreamWriter] = set()
        self._pool: Pool | None = None
        self._commands: Commands | None = None
        self._server: asyncio.Server | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ready = False
        self._failed: PoolFailed | None = None
        self._unused = asyncio.Event()
        self._last_user: set[asyncio.StreamWriter] = set()
        """The user with whose end the pool ends."""
        self._lock = -1
        self._locking: asyncio.Future[int] | None = None
        self._logs: Path | None = None
        self._marks: dict[asyncio.StreamWriter, ProcessMark] = {}
        self._sleep = SleepRecord(folder / f"{key}.asleep")

    async def run(self) -> None:
        """Serve until the last user has left, or SIGTERM comes; then stop the servers."""
        loop = asyncio.get_running_loop()
        # The backlog is that of the starter; a pool that hangs must not block those who connect.
        how: dict[str, Any] = {"sock": self._listening, "limit": LINE_BYTES, "backlog": BACKLOG}
        server = self._server = await asyncio.start_unix_server(self._serve, **how)
        loop.add_signal_handler(signal.SIGTERM, self._unused.set)
        first = loop.call_later(_FIRST_USER_S, lambda: None if self._users else self._unused.set())
        while not self._unused.is_set():
            with anyio.move_on_after(_TOUCH_EVERY_S):
                await self._unused.wait()
            self._touch()
        first.cancel()
        if not self._users - self._last_user:
            self._sleep.clear()
        # Whoever comes now is refused, and starts a pool of its own, which waits for the lock of this one.
        server.close()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._commands is not None:
            await self._commands.aclose()
        if self._pool is not None:
            await self._pool.stop()
        await self._end_locking()
        self._tidy()
        for writer in (*self._users, *self._guests):
            writer.close()

    async def _end_locking(self) -> None:
        """Take the lock that a start which was cancelled has asked for, so that its file is removed. A lock that an
        earlier pool still has is left to that pool.
        """
        if self._locking is not None and self._lock < 0:
            await asyncio.wait([self._locking], timeout=_LOCKED_WITHIN_S)
            if self._locking.done() and self._locking.exception() is None:
                self._lock = self._locking.result()

    def _touch(self) -> None:
        for path in (self._folder, *self._folder.glob(f"{self._key}.*")):
            with suppress(OSError):
                os.utime(path)

    def _tidy(self) -> None:
        """Remove the files, unless they are those of a later pool, and what killed pools have left."""
        with locked(self._folder / f"{self._key}.lock"):
            if not listens(self._folder / f"{self._key}.sock"):
                remove_files(self._folder, self._key)
            elif self._logs is not None and self._lock >= 0:
                # The later pool waits for our lock before it makes its own.
                shutil.rmtree(self._logs, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)  # a guard that still runs holds it, too
        remove_left(self._folder)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not is_own_user(writer.get_extra_info("socket")):
            writer.close()
            return
        try:
            spec, known = await reader.readline(), await reader.readline()
            about = orjson.loads(known or b"{}")
            if about.get("describe"):
                _send(writer, {} if self._pool is None else describe(self._pool.spec))
            is_guest = not about.get("starts", True)
            if "weights" not in about or self._unused.is_set() or (is_guest and self._pool is None):
                writer.close()
                return
            (self._guests if is_guest else self._users).add(writer)
            mark = ProcessMark.of(peer_pid(writer.get_extra_info("socket")))
            if mark is not None and not is_guest:
                self._marks[writer] = mark
            weights = Weights(**about["weights"])
            if self._pool is None:
                # This user may be new, and know nothing of a trainer that has let the pool sleep.
                self._begin(PoolSpec.from_json(spec), weights, about["asleep"] or self._sleep.holds())
            else:
                self._pool.learn(weights)
            self._note_sleep()
            self._send_state(writer)
            assert self._commands is not None
            while line := await reader.readline():
                self._commands.receive(writer, orjson.loads(line))
        except (OSError, ValueError):
            pass
        except (LookupError, TypeError, AttributeError) as error:
            # Such as a process that has a later version of this package.
            _log.warning("a process sends what this pool cannot read", exc_info=error)
            _send(writer, {"failed": f"{_UNREADABLE} ({type(error).__name__}: {error})", "log": ""})
        if self._commands is not None:
            self._commands.left(writer)
        self._marks.pop(writer, None)
        if self._users == {writer}:
            self._last_user = {writer}
            self._unused.set()  # the connection is closed when all has ended
        else:
            self._users.discard(writer)
            self._note_sleep()
            self._guests.discard(writer)
            writer.close()

    def _begin(self, spec: PoolSpec, weights: Weights, asleep: bool) -> None:
        if spec.log_folder is None:
            folder = self._logs = self._folder / f"{self._key}-logs"
        else:
            folder = Path(spec.log_folder)

        def server(number: int) -> LocalServer:
            return LocalServer(spec, number, folder=folder, held=(self._lock,), private=self._folder)

        commands = self._commands = Commands(lambda: self._users, _send)
        pool = self._pool = Pool(
            spec, server, on_change=self._broadcast, idle=commands.idle, weights=weights, asleep=asleep
        )
        self._starting = asyncio.ensure_future(self._start(pool, folder))
        commands.serve(pool, self._starting)

    async def _start(self, pool: Pool, logs: Path) -> None:
        try:
            # Guards hold the lock, too. So it is free only when no server of an earlier pool is left.
            self._locking = in_thread(lambda: lock(self._folder / f"{self._key}.pool"))
            self._lock = await asyncio.shield(self._locking)
            # An earlier pool has removed this folder before its lock was free.
            await in_thread(lambda: _make_folder(logs))
            await pool.start()
            self._ready = True
        except PoolFailed as error:
            self._failed = error
        except Exception as error:
            _log.exception("the pool cannot be started")
            self._failed = PoolFailed(f"the pool cannot be started ({type(error).__name__}: {error})")
        self._broadcast()
        if self._failed is not None:
            asyncio.get_running_loop().call_later(_FAILURE_SHOWN_S, self._unused.set)
            if self._server is not None:
                self._server.close()

    def _note_sleep(self) -> None:
        """Record whether the pool sleeps, before anybody is told: a trainer uses the devices then."""
        if self._pool is None or self._unused.is_set():
            return
        if all(state.state == "asleep" for state in self._pool.states):
            self._sleep.write(self._marks.values())
        else:
            self._sleep.clear()

    def _broadcast(self) -> None:
        self._note_sleep()
        for writer in (*self._users, *self._guests):
            self._send_state(writer)

    def _send_state(self, writer: asyncio.StreamWriter) -> None:
        assert self._pool is not None
        state: dict[str, Any] = {
            "replicas": [state.as_mapping() for state in self._pool.states],
            "weights": self._pool.weights.as_mapping(),
            "ready": self._ready,
        }
        if self._failed is not None:
            state = {"failed": self._failed.problem, "log": self._failed.log}
        _send(writer, state)


def _make_folder(logs: Path) -> None:
    try:
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the folder {logs} for the logs of its servers cannot be made ({error.strerror}). See `log_folder`"
        raise PoolFailed(problem) from None


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(orjson.dumps(message) + b"\n")


def main(descriptor: int, folder: str, key: str) -> None:
    """Run a pool at the listening socket `descriptor`."""
    asyncio.run(PoolProcess(socket.socket(fileno=descriptor), Path(folder), key).run())
