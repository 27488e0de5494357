"""Defines `PoolUse`: the use of a pool by one process, wherever the pool runs.

A thread follows the pool, because an engine may move from one event loop to another while its servers go on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..system.threads import LoopsEvent, in_thread
from .gate import Gate
from .group_weights import GroupWeights
from .pool import ChangeFailed, PoolFailed
from .pool_status import PoolStatus, ReplicaLoad
from .replica_state import ReplicaState
from .sent_command import SentCommand
from .spec import PoolSpec
from .weights import Drain, Update, Weights

_log = logging.getLogger("qreward_plugins.replicas")

_SILENT_S = 120.0
"""Seconds beyond `stop_within_s` within which a pool must have answered. Its process may have to be started."""
_FOUND_WITHIN_S = 30.0
"""The same for a pool that runs."""
_START_SAID_AFTER_S = 5.0
_SEARCH_SAID_AFTER_S = 1.0
"""Seconds after which the log says for whose answer a start, or a search for a pool that runs, waits."""
_ENDED_WITHIN_S = 150.0
"""Seconds beyond `stop_within_s` in which a pool has ended all of its servers."""
_LOST = "the process of the pool has ended; it is started again with the weights that it had"
_FOUND_ASLEEP = (
    "source %s: its servers sleep, because a process that shares them let them. Calls wait until they are woken: "
    "`engine.wake_up`, or `qreward pool wake`"
)
_LOST_TRIES = 3
"""How often a pool is started again that has ended although it was used."""
_ENDED: Mapping[str, Any] = {
    "error": {"problem": "the pool has ended before the command was done", "replicas": [], "log": ""}
}
_HELD: Mapping[str, str] = {
    "asleep": "it sleeps",
    "updating": "its weights are updated",
    "draining": "its weights are updated, or it is about to sleep",
}
"""By state of a replica: why calls wait for it."""


class PoolUse(ABC):
    """One process's use of a pool. `follow`, which runs in a thread of its own, reports the states of the replicas by
    `_set_states`, and the end of the start by `_end_start`.
    """

    def __init__(self, spec: PoolSpec, groups: GroupWeights | None = None) -> None:
        self.spec = spec
        self.states: tuple[ReplicaState, ...] = ()
        self.version = 0
        """Number of changes of `states` so far."""
        self.weights = Weights()
        """The weights that the pool serves, as it last reported."""
        self.asleep = False
        """Whether the pool sleeps, as it last reported."""
        self.gate = Gate(groups)
        self.on_change: Callable[[], None] = lambda: None
        """Called in the thread that follows the pool, after every change of `states`."""
        self._numbers = itertools.count(1)
        self._commands: dict[int, SentCommand] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.ended = False
        """Whether the pool is not followed any more: it failed, or this use has ended."""
        self.is_guest = False
        """Whether it only finds a pool that runs, and starts none; see `pool_process.py`."""
        self.wakes = False
        """Whether this process wakes the pool before it has calls for it."""
        self.unwritten: frozenset[str] = frozenset()
        """What the configuration leaves to the environment: a guest does not compare it (`chosen`)."""
        self.loads: Callable[[], Mapping[int, ReplicaLoad]] = dict
        """Returns what this process has sent to each replica, by number. The thread that follows the pool calls it."""
        self._idle: deque[list[tuple[int, int]]] = deque()
        self._sends_idle = False
        self._reported = LoopsEvent()
        self._start_over = LoopsEvent()
        self._losses = 0
        self._failure: PoolFailed | None = None
        self._closing = False
        self._hangs = False
        """Whether the pool was waited for in vain."""
        self._pid = os.getpid()

    @property
    def started(self) -> bool:
        """Whether the start of the pool is over, successfully."""
        return self._start_over.is_set and self._failure is None

    @property
    def begun(self) -> bool:
        """Whether the start of the pool has begun, and has not failed."""
        return self._thread is not None and self._failure is None

    async def start(self) -> None:
        """Start the pool, or find it, and wait until all replicas are ready. Cancelling ends only the wait.

        Raises `PoolFailed`.
        """
        spec = self.spec
        # An earlier pool may have to end first. A process that takes longer than this hangs.
        await self._answered(spec.stop_within_s + _SILENT_S)
        within_s = spec.start_within_s + spec.stop_within_s + _SILENT_S
        if not await self._start_over.wait(within_s):
            raise PoolFailed(f"{self.where()} has not ended its start within {within_s:g} s. {self.remedy()}")
        self._raise_failure()

    async def find(self) -> None:
        """Find the pool that runs, and wait until it reports, ready or not. This use starts none, also not later.

        Raises `PoolFailed` if none runs, or if it answers nothing.
        """
        self.is_guest = True
        await self._answered(_FOUND_WITHIN_S)
        self._raise_failure()

    async def _answered(self, within_s: float) -> None:
        """Follow the pool, and wait for its first report. Raises `PoolFailed`."""
        with self._lock:
            if self._closing:
                raise PoolFailed("it is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="qreward-pool", daemon=True)
                self._thread.start()
        if self._start_over.is_set:
            return
        first_s = min(within_s, _SEARCH_SAID_AFTER_S if self.is_guest else _START_SAID_AFTER_S)
        if await self._reported.wait(first_s):
            return
        where = await in_thread(self.where)
        _log.warning("source %s: waiting for an answer of %s, at most %g s", self.spec.name, where, within_s)
        if not await self._reported.wait(within_s - first_s):
            self._hangs = True
            where, remedy = await in_thread(self.where), await in_thread(self.remedy)
            raise PoolFailed(f"{where} has answered nothing for {within_s:g} s. {remedy}")

    def where(self) -> str:
        """Say where the pool runs, for people."""
        return "its pool"

    def remedy(self) -> str:
        """Say what to do about a pool that hangs; a sentence."""
        return "Nothing was started in its place"

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PoolFailed(self._failure.problem, self._failure.log)

    async def aclose(self) -> None:
        """End the use. If it was the last one, wait until every server has ended, unless its pool hangs. Idempotent."""
        with self._lock:
            self._closing = True
            thread = self._thread
        if thread is None or self._pid != os.getpid():
            return
        self.leave(at_once=self.is_guest or self._hangs)
        ended = in_thread(thread.join)
        within_s = self.spec.stop_within_s + _ENDED_WITHIN_S
        await asyncio.wait([ended], timeout=within_s)
        if not ended.done():
            where, remedy = await in_thread(self.where), await in_thread(self.remedy)
            what = "source %s: %s has not ended its servers within %g s. %s"
            _log.warning(what, self.spec.name, where, within_s, remedy)
            self.leave(at_once=True)

    # Commands

    async def update_weights(
        self, update: Update, on_receiving: Callable[[list[int]], None] = lambda numbers: None
    ) -> Weights:
        """Update the weights of the pool, and return the new ones. See `Changes.update`.

        Cancelling ends only the wait, except for an update from memory, which ends. An update from memory fails if the
        pool is lost meanwhile, because no further tensors come; others are carried out by its successor. Raises
        `ChangeFailed` and `PoolFailed`.
        """
        return Weights(**await self._command("update", update.as_mapping(), on_receiving))

    async def sleep(self, *, level: int = 1, drain: Drain = "wait", within_s: float = 600.0) -> None:
        """Free the devices of the pool; see `Changes.sleep`. Cancelling ends only the wait."""
        await self._command("sleep", {"level": level, "drain": drain, "within_s": within_s})

    async def wake_up(self) -> None:
        """End the sleep of the pool; see `Changes.wake`. Cancelling ends only the wait."""
        await self._command("wake", {})

    async def status(self) -> PoolStatus:
        """Ask a pool that `find` has found, ready or not, for its status. Raises `ChangeFailed` and `PoolFailed`."""
        return PoolStatus.of(await self._command("status", {}))

    async def _command(
        self,
        name: str,
        arguments: Mapping[str, Any],
        on_receiving: Callable[[list[int]], None] = lambda numbers: None,
    ) -> dict[str, Any]:
        if name == "status":
            await self.find()
        else:
            await self.start()
        number = next(self._numbers)
        message = {"command": name, "id": number, "arguments": dict(arguments)}
        from_memory = name == "update" and not arguments["path"]
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        command = self._commands[number] = SentCommand(message, result, on_receiving, repeats=not from_memory)
        sending = asyncio.ensure_future(in_thread(lambda: command.send(self.send)))
        try:
            is_sent = await asyncio.shield(sending)
            if not is_sent and self.ended:
                raise PoolFailed("it has ended")
            if not is_sent and not command.repeats:
                raise ChangeFailed(_LOST)
            return await result
        except asyncio.CancelledError:
            # The command itself may still be on its way.
            sending.add_done_callback(lambda sending: sending.cancelled() or sending.exception())
            if from_memory:
                sending.add_done_callback(lambda _: self.send({"cancel": number}))
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
        if not drained:
            return
        with self._lock:
            self._idle.append(drained)
            if self._sends_idle:
                return
            self._sends_idle = True
        # Sending blocks if the pool hangs, and an event loop calls this.
        threading.Thread(target=self._send_idle, name="qreward-pool-idle", daemon=True).start()

    def _send_idle(self) -> None:
        """Send what `_drained` was given, in its order."""
        while True:
            with self._lock:
                if not self._idle:
                    self._sends_idle = False
                    return
                drained = self._idle.popleft()
            self.send({"idle": drained})

    @abstractmethod
    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message to the pool; see `Commands.receive`. Return False if there is no pool now. A message may get
        lost if the pool ends: then `_lost` is called afterwards. Raises `ValueError` if it is too long.
        """

    @property
    def held(self) -> str:
        """Why the replicas take no calls for a while, although nothing is wrong; "" if one does, or if none will."""
        states = {state.state for state in self.states}
        if "up" in states:
            return ""
        return next((reason for state, reason in _HELD.items() if state in states), "")

    def _receive(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the pool. Raises `PoolFailed` if it has failed."""
        if "failed" in message:
            raise PoolFailed(message["failed"], message["log"])
        if "id" in message:
            command = self._commands.get(message["id"])
            if command is not None:
                command.receive(message)
            return
        if "report" in message:
            self.send({"loads": {str(number): asdict(load) for number, load in self.loads().items()}})
            return
        self.weights = Weights(**message["weights"])
        self.asleep = all(state["state"] == "asleep" for state in message["replicas"])
        self._set_states([ReplicaState(**state) for state in message["replicas"]])
        if self.asleep and not (self._reported.is_set or self.is_guest or self.wakes):
            _log.warning(_FOUND_ASLEEP, self.spec.name)
        self._reported.set()
        if message["ready"]:
            self._end_start()

    def _lost(self) -> None:
        """Forget the replicas of a pool that has ended, and the commands that were sent to it."""
        self._set_states(())
        self._lose_commands()

    def _count_loss(self) -> None:
        """Note that the pool has ended although it was used. Raises `PoolFailed` if it is not to be started again."""
        self._losses += 1
        if self.is_guest:
            raise PoolFailed("it has ended")
        if self._losses > _LOST_TRIES:
            raise PoolFailed("it has ended too often")
        _log.warning("the pool of %s has ended; it is started again", self.spec.name)

    def _resend(self) -> None:
        """Send a pool the commands that its predecessor has not finished. Messages reach it by now."""
        for command in list(self._commands.values()):
            command.send(self.send)

    def _lose_commands(self) -> None:
        """Fail the commands that were sent to a pool that has ended, unless its successor can carry them out. Nobody
        may send it more by then.
        """
        for command in list(self._commands.values()):
            if self.ended:
                command.receive(_ENDED)
            elif command.repeats:
                command.unsend()
            else:
                command.receive({"error": {"problem": _LOST, "replicas": [], "log": ""}})

    def _is_leaving(self) -> bool:
        """Whether this use is to end."""
        return self._closing

    @abstractmethod
    def follow(self) -> None:
        """Start or find the pool, and report on it until it ends or `leave` is called. Raises `PoolFailed`."""

    @abstractmethod
    def leave(self, *, at_once: bool = False) -> None:
        """Let `follow` return, once every server has ended if this was the last use, or `at_once`. Does not block."""

    def _run(self) -> None:
        try:
            self.follow()
        except PoolFailed as error:
            self._end_start(error)
        except Exception as error:
            _log.warning("the pool of %s cannot be followed", self.spec.name, exc_info=error)
            self._end_start(PoolFailed(f"the pool cannot be followed ({type(error).__name__}: {error})"))
        self.ended = True
        self._lost()
        self._end_start(PoolFailed("it is closed"))

    def _set_states(self, states: Sequence[ReplicaState]) -> None:
        before = {state.number: state for state in self.states}
        for state in states:
            was = before.get(state.number)
            if was is not None and was.state != state.state and state.state in ("down", "failed"):
                _log.warning("source %s: replica %d is %s", self.spec.name, state.number, state.state)
        self.states = tuple(states)
        self.version += 1
        # In this order: a call that is refused finds the new states.
        self._drained(self.gate.take(self.states))
        self.on_change()

    def _end_start(self, failure: PoolFailed | None = None) -> None:
        if not self._start_over.is_set:
            self._failure = failure
        self._reported.set()
        self._start_over.set()
