"""Defines `PoolUse`, the use of a pool by one process, and `LocalPoolUse`, that of a pool on this machine.

A thread follows the pool, because an engine may move from one event loop to another while its servers go on.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from ..named_actors import in_thread
from .changes import ChangeFailed
from .gate import Gate
from .group_weights import GroupWeights
from .pool import PoolFailed
from .replica_state import ReplicaState
from .runtime_folder import NoRuntimeFolder, runtime_folder
from .spec import PoolSpec
from .weights import Drain, Update, Weights

_log = logging.getLogger("qreward_plugins.replicas")

_PROGRAM = (
    # The child of a child: Ray kills the children of an actor, and the pool serves other processes, too.
    "import os, sys\nif os.fork(): os._exit(0)\n"
    "import json; sys.path[:] = json.loads(sys.argv[4])\n"
    "from qreward_plugins.replicas.pool_process import main; main(int(sys.argv[1]), *sys.argv[2:4])"
)
LINE_BYTES = 2**24
"""Most bytes of a message to a pool. It reads no longer one, and would take its user for gone."""
_CONNECT_TRIES = 40
_BETWEEN_TRIES_S = 0.05
_LOST_TRIES = 3
_SILENT_S = 120.0
_LOST = "the process of the pool has ended; it is started again with the weights that it had"


_HELD: Mapping[str, str] = {
    "asleep": "it sleeps",
    "updating": "its weights are updated",
    "draining": "its weights are updated, or it is about to sleep",
}
"""By state of a replica: why calls wait for it."""


class _Command:
    """A command of this process that is under way."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        result: asyncio.Future[dict[str, Any]],
        on_receiving: Callable[[list[int]], None],
    ) -> None:
        self._loop = loop
        self.result = result
        self._on_receiving = on_receiving

    def heard(self, news: Mapping[str, Any]) -> None:
        """Handle a message of the pool about it, in its event loop. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._take, news)

    def _take(self, news: Mapping[str, Any]) -> None:
        if self.result.done():
            return
        if "receiving" in news:
            self._on_receiving(news["receiving"])
        elif "error" in news:
            error = news["error"]
            self.result.set_exception(ChangeFailed(error["problem"], replicas=error["replicas"], log=error["log"]))
        else:
            self.result.set_result(news["done"])


class PoolUse(ABC):
    """One process's use of a pool. `follow`, which runs in a thread of its own, reports what it learns by `_learned`,
    and the end of the start by `_started`.
    """

    def __init__(self, spec: PoolSpec, groups: GroupWeights | None = None) -> None:
        self.spec = spec
        self.states: tuple[ReplicaState, ...] = ()
        self.version = 0
        """Number of changes of `states` so far."""
        self.weights = Weights()
        """The weights that the pool serves, as it last reported."""
        self.asleep = False
        """Whether the pool slept when it was last heard of."""
        self.gate = Gate(groups)
        self.on_news: Callable[[], None] = lambda: None
        """Called in the thread that follows the pool, after every change of `states`."""
        self._numbers = itertools.count(1)
        self._commands: dict[int, _Command] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self.ended = False
        """Whether the pool is not followed any more: it failed, or this use has ended."""
        self._over = False
        self._failure: PoolFailed | None = None
        self._closing = False
        self._pid = os.getpid()

    @property
    def started(self) -> bool:
        """Whether the start of the pool is over, successfully."""
        return self._over and self._failure is None

    async def start(self) -> None:
        """Start the pool, or find it, and wait until all replicas are ready. Cancelling ends only the wait.

        Raises `PoolFailed`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._closing:
                raise PoolFailed("it is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="qreward-pool", daemon=True)
                self._thread.start()
            if self._over:
                future.set_result(None)
            else:
                self._waiting.append((loop, future))
        spec = self.spec
        # An earlier pool may have to end first. A process that takes longer than this hangs.
        longest_s = spec.start_within_s + spec.stop_within_s + _SILENT_S
        await asyncio.wait([future], timeout=longest_s)
        if not future.done():
            raise PoolFailed(f"its process has reported nothing for {longest_s:g} s")
        if self._failure is not None:
            raise PoolFailed(self._failure.problem, self._failure.log)

    async def aclose(self) -> None:
        """End the use. If it was the last one, wait until every server has ended. Idempotent."""
        with self._lock:
            self._closing = True
            thread = self._thread
        if thread is None or self._pid != os.getpid():
            return
        self.leave()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wait() -> None:
            thread.join()
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

        threading.Thread(target=wait, name="qreward-pool-end", daemon=True).start()
        await ended

    # Commands

    async def update_weights(
        self, update: Update, on_receiving: Callable[[list[int]], None] = lambda numbers: None
    ) -> Weights:
        """Update the weights of the pool, and return the new ones. See `Changes.update`.

        Cancelling ends only the wait, except for an update from memory, which ends. Raises `ChangeFailed` and
        `PoolFailed`.
        """
        return Weights(**await self._command("update", update.as_mapping(), on_receiving))

    async def sleep(self, *, level: int = 1, drain: Drain = "wait", within_s: float = 600.0) -> None:
        """Free the devices of the pool; see `Changes.sleep`. Cancelling ends only the wait."""
        await self._command("sleep", {"level": level, "drain": drain, "within_s": within_s})

    async def wake_up(self) -> None:
        """End the sleep of the pool; see `Changes.wake`. Cancelling ends only the wait."""
        await self._command("wake", {})

    async def _command(
        self,
        name: str,
        details: Mapping[str, Any],
        on_receiving: Callable[[list[int]], None] = lambda numbers: None,
    ) -> dict[str, Any]:
        await self.start()
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        command = self._commands[number] = _Command(loop, loop.create_future(), on_receiving)
        saying = asyncio.ensure_future(in_thread(lambda: self.say({"do": name, "id": number, "with": dict(details)})))
        try:
            if not await asyncio.shield(saying):
                raise PoolFailed("it has ended") if self.ended else ChangeFailed(_LOST)
            return await command.result
        except asyncio.CancelledError:
            # The command itself may still be on its way.
            saying.add_done_callback(lambda saying: saying.cancelled() or saying.exception())
            if name == "update" and not details["path"]:
                saying.add_done_callback(lambda _: self.say({"cancel": number}))
            raise
        finally:
            self._commands.pop(number, None)

    def leave_replica(self, url: str) -> None:
        """Count down a call that `gate` let in."""
        self._drained(self.gate.leave(url))

    def sample_ended(self, group: str) -> None:
        """Note that a sample of a group has its outcome."""
        self._drained(self.gate.ended(group))

    def _drained(self, drained: list[tuple[int, int]]) -> None:
        if drained:
            self.say({"idle": drained})

    @abstractmethod
    def say(self, message: Mapping[str, Any]) -> bool:
        """Send a message to the pool; see `Commands.heard`. Return False if there is no pool now. A message may get
        lost if the pool ends: then `_lost` is called afterwards. Raises `ValueError` if it is too long.
        """

    @property
    def held(self) -> str:
        """Why the replicas take no calls for a while, although nothing is wrong; "" if one does, or if none will."""
        states = {state.state for state in self.states}
        if "up" in states:
            return ""
        return next((reason for state, reason in _HELD.items() if state in states), "")

    def _heard(self, news: Mapping[str, Any]) -> None:
        """Handle a message of the pool. Raises `PoolFailed` if it has failed."""
        if "failed" in news:
            raise PoolFailed(news["failed"], news["log"])
        if "id" in news:
            command = self._commands.get(news["id"])
            if command is not None:
                command.heard(news)
            return
        self.weights = Weights(**news["weights"])
        self.asleep = all(state["state"] == "asleep" for state in news["replicas"])
        self._learned([ReplicaState(**state) for state in news["replicas"]])
        if news["ready"]:
            self._started()

    def _lost(self) -> None:
        """Forget the replicas of a pool that has ended, and fail its commands."""
        self._learned(())
        self._lose_commands()

    def _lose_commands(self) -> None:
        """Fail the commands that were said to a pool that has ended. Nobody may say more to it by then."""
        for command in list(self._commands.values()):
            command.heard({"error": {"problem": _LOST, "replicas": [], "log": ""}})

    def _left(self) -> bool:
        """Whether this use is to end."""
        return self._closing

    @abstractmethod
    def follow(self) -> None:
        """Start or find the pool, and report on it until it ends or `leave` is called. Raises `PoolFailed`."""

    @abstractmethod
    def leave(self) -> None:
        """Let `follow` return, once every server has ended if this was the last use. Does not block."""

    def _run(self) -> None:
        try:
            self.follow()
        except PoolFailed as error:
            self._started(error)
        except Exception as error:
            _log.warning("the pool of %s cannot be followed", self.spec.name, exc_info=error)
            self._started(PoolFailed(f"the pool cannot be followed ({type(error).__name__}: {error})"))
        self.ended = True
        self._lost()
        self._started(PoolFailed("it is closed"))

    def _learned(self, states: Sequence[ReplicaState]) -> None:
        before = {state.number: state for state in self.states}
        for state in states:
            was = before.get(state.number)
            if was is not None and was.state != state.state and state.state in ("down", "failed"):
                _log.warning("source %s: replica %d is %s", self.spec.name, state.number, state.state)
        self.states = tuple(states)
        self.version += 1
        # In this order: a call that is refused finds the new states.
        self._drained(self.gate.take(self.states))
        self.on_news()

    def _started(self, failure: PoolFailed | None = None) -> None:
        with self._lock:
            if self._over and failure is None:
                return
            if not self._over:
                self._failure = failure
            self._over = True
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_wake, future)


class LocalPoolUse(PoolUse):
    """The use of a pool on this machine, which ends with its last user."""

    def __init__(self, spec: PoolSpec, groups: GroupWeights | None = None) -> None:
        super().__init__(spec, groups)
        self._channel: socket.socket | None = None
        self._greeted = False
        """Whether the pool knows this user. What comes before, it would take for the spec."""
        self._sending = threading.Lock()
        # A forked child would keep the connection open, and with it the servers, after this process has ended.
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) is not None and method())

    def follow(self) -> None:
        lost = 0
        while not self._left():
            for attempt in range(_CONNECT_TRIES):
                channel = self._channel = self._connect()
                with channel, suppress(OSError):
                    known = orjson.dumps({"weights": self.weights.as_mapping(), "asleep": self.asleep})
                    channel.sendall(self.spec.to_json() + b"\n" + known + b"\n")
                    self._greeted = True
                    if self._left():
                        self.leave()
                    try:
                        with channel.makefile("rb") as lines:
                            was_open = self._listen(lines)
                    finally:
                        self._greeted = False
                        self._lose_commands()
                    if was_open or self._left():
                        break
                # That pool was about to end.
                time.sleep(_BETWEEN_TRIES_S * min(attempt + 1, 10))
            else:
                raise PoolFailed("the process of the pool ends at once")
            self._channel = None
            self._lost()
            if not self._left():
                lost += 1
                if lost > _LOST_TRIES:
                    raise PoolFailed("the process of the pool has ended too often")
                _log.warning("the pool of %s has ended; it is started again", self.spec.name)

    def _listen(self, lines: Any) -> bool:
        """Handle the messages of the pool until its end. Return whether there was any."""
        any_line = False
        for line in lines:
            any_line = True
            self._heard(orjson.loads(line))
        return any_line

    def say(self, message: Mapping[str, Any]) -> bool:
        line = orjson.dumps(message) + b"\n"
        if len(line) > LINE_BYTES:
            raise ValueError(f"all bodies together take {len(line):,} bytes; {LINE_BYTES:,} are possible")
        with suppress(OSError), self._sending:
            channel = self._channel
            if channel is not None and self._greeted:
                channel.sendall(line)
                return True
        return False

    def leave(self) -> None:
        channel = self._channel
        if channel is not None:
            with suppress(OSError):
                channel.shutdown(socket.SHUT_WR)

    def _forget(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                os.close(self._channel.detach())

    def _connect(self) -> socket.socket:
        """Connect to the pool; start it if there is none."""
        try:
            folder = runtime_folder()
        except NoRuntimeFolder as error:
            raise PoolFailed(str(error)) from None
        path = folder / f"{self.spec.key}.sock"
        found = _connected(path)
        if found is not None:
            return found
        lock = -1
        try:
            lock = os.open(folder / f"{self.spec.key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _connected(path)
            if found is None:
                _start_process(path, folder, self.spec.key)
                found = _connected(path)
        except OSError as error:
            raise PoolFailed(f"no process can be started ({error.strerror or error}; {folder})") from None
        finally:
            if lock >= 0:
                os.close(lock)
        if found is None:
            raise PoolFailed("the process of the pool cannot be reached")
        return found


def _connected(path: Path) -> socket.socket | None:
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(str(path))
    except OSError:
        channel.close()
        return None
    return channel


def _start_process(path: Path, folder: Path, key: str) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1024)
        with (folder / f"{key}.log").open("wb") as log:
            starter = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(listening.fileno()), str(folder), key, json.dumps(sys.path)],
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        starter.wait()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
