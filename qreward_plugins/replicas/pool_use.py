"""Defines `PoolUse`: the use of a pool by one engine, wherever the pool lives: in an actor of the Ray job if Ray is up,
and in a thread of this process otherwise. Both carry a `PoolActor`.

A thread follows the pool, because an engine may move from one event loop to another while its servers go on. An event
loop sends calls. So the count of calls and the decision to send are taken under a lock: once a process has said that it
has no calls at a replica that drains, none begins there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from anyio.from_thread import BlockingPortalProvider

from ..system.ray_actors import ray_is_up
from ..system.threads import LoopsEvent
from .pool import ChangeFailed, PoolFailed, ReplicaState, Update, Weights
from .pool_actor import PoolActor, Report
from .server_kinds import PoolSpec

if TYPE_CHECKING:
    from .ray_server import RayOwner

_log = logging.getLogger("qreward_plugins.replicas")

_SILENT_S = 120.0
"""Seconds beyond those of a start, or of a stop, within which a pool must have answered."""
_LOOK_EVERY_S = 1.0
_LOST = "the process of the pool has ended; it is started again with the weights that it had"
_COMES_BACK = {"updating", "draining", "starting", "down"}
"""The states of a replica for which calls wait."""
PoolOwner: TypeAlias = "ProcessOwner | RayOwner"
"""The owner of a pool. `where` names it, for people; `lost` are the errors of a call whose owner has ended. `call`
returns a future for which a thread and any event loop can wait."""


class PoolUse:
    """One engine's use of a pool, which starts with the first use and ends with the last one."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.states: tuple[ReplicaState, ...] = ()
        self.version = 0
        """Number of changes of `states` so far."""
        self.weights = Weights()
        """The weights that the pool serves, as it last reported."""
        self.asleep = False
        """Whether the pool sleeps, as it last reported."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after every change of `states`, in any thread."""
        self.ended = False
        """Whether the pool is not followed any more: it failed, or this use has ended."""
        self._user = secrets.token_hex(8)
        self._owner: PoolOwner | None = None
        self._receiving: dict[str, Callable[[list[int]], None]] = {}
        self._seen = -1
        """The last report (`Report.version`) of the pool."""
        self._reporting = threading.Lock()
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        """Calls under way by URL."""
        self._thread: threading.Thread | None = None
        self._start_over = LoopsEvent()
        self._follow_over = LoopsEvent()
        self._failure: PoolFailed | None = None
        self._closing = self._given_up = False
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
        with self._lock:
            if self._closing:
                raise PoolFailed("it is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="qreward-pool", daemon=True)
                self._thread.start()
        within_s = self.spec.start_within_s + self.spec.stop_within_s + _SILENT_S
        if not await self._start_over.wait(within_s):
            self._given_up = True
            raise PoolFailed(f"{self._where} has not ended its start within {within_s:g} s")
        if self._failure is not None:
            raise PoolFailed(self._failure.problem, self._failure.log)

    async def aclose(self) -> None:
        """End the use. After the last one, wait until all servers have ended, unless the owner hangs. Idempotent."""
        with self._lock:
            self._closing = True
            if self._thread is None or self._pid != os.getpid():
                return
            if self._owner is not None:
                with suppress(Exception):  # Ray may be shut down
                    self._owner.call("leave", self._user)
        within_s = self.spec.stop_within_s + _SILENT_S
        if not await self._follow_over.wait(0.0 if self._given_up else within_s):
            self._given_up = True
            _log.warning("source %s: %s has not ended its servers", self.spec.name, self._where)

    # Commands

    async def update_weights(
        self, update: Update, on_receiving: Callable[[list[int]], None] = lambda numbers: None
    ) -> Weights:
        """Update the weights of the pool, and return the new ones; see `Changes.update`.

        Cancelling ends only the wait, except for an update from memory, which ends. Raises `ChangeFailed`, also if the
        pool is lost meanwhile, and `PoolFailed`.
        """
        token, loop = secrets.token_hex(8), asyncio.get_running_loop()

        def begin(numbers: list[int]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(on_receiving, numbers)

        self._receiving[token] = begin
        try:
            weights: Weights = await self._command(token, "update", update, token)
            return weights
        except asyncio.CancelledError:
            if not update.path and self._owner is not None:
                self._owner.call("cancel", token)
            raise
        finally:
            self._receiving.pop(token, None)

    async def sleep(self, *, within_s: float = 600.0) -> None:
        """Free the devices of the pool; see `Changes.sleep`. Cancelling ends only the wait."""
        await self._command(secrets.token_hex(8), "sleep", within_s)

    async def wake_up(self) -> None:
        """End the sleep of the pool; see `Changes.wake`. Cancelling ends only the wait."""
        await self._command(secrets.token_hex(8), "wake")

    async def _command(self, *arguments: Any) -> Any:
        await self.start()
        owner = self._owner
        if self.ended or owner is None:
            raise PoolFailed("it has ended")
        result, failure = None, None
        try:
            result = await asyncio.wrap_future(owner.call("command", *arguments))
        except ChangeFailed as error:
            failure = ChangeFailed(error.problem, replicas=error.replicas, log=error.log)
        except owner.lost:
            raise ChangeFailed(_LOST) from None
        # The caller finds the states of after the command.
        with suppress(PoolFailed, *owner.lost):
            report: Report | None = await asyncio.wrap_future(owner.call("watch", self._user, -1))
            if report is not None:
                self._report(report)
        if failure is not None:
            raise failure
        return result

    # Calls

    def enter(self, url: str) -> bool:
        """Count a call at the replica at `url`, unless it takes none."""
        with self._lock:
            if not any(state.url == url and state.state == "up" for state in self.states):
                return False
            self._calls[url] += 1
            return True

    def leave(self, url: str) -> None:
        """Count down a call that `enter` let in."""
        with self._lock:
            self._calls[url] -= 1
            if not self._calls[url]:
                del self._calls[url]
            drained = self._drained(url)
        self._tell(drained)

    def _drained(self, *urls: str) -> dict[int, int]:
        """Return number and ticket of those of these replicas that are draining and have no calls."""
        return {
            state.number: state.ticket
            for state in self.states
            if state.url in urls and state.state == "draining" and not self._calls[state.url]
        }

    def _tell(self, drained: Mapping[int, int]) -> None:
        if drained and self._owner is not None:
            with suppress(Exception):  # Ray may be shut down
                self._owner.call("idle", self._user, drained)

    @property
    def held(self) -> str:
        """Why the replicas take no calls for a while, although nothing is wrong; "" if one does, or if none will."""
        states = {state.state for state in self.states}
        if "up" in states or self.ended:
            return ""
        if "asleep" in states:
            return "it sleeps"
        # A pool that was started and has no states was lost.
        return "its servers start, or are changed" if states & _COMES_BACK or (self.started and not states) else ""

    # What the pool reports, mostly to the thread that follows it

    def _run(self) -> None:
        failure = PoolFailed("it is closed")
        try:
            self._follow()
        except PoolFailed as error:
            failure = PoolFailed(error.problem, error.log)
        except Exception as error:
            _log.warning("the pool of %s cannot be followed", self.spec.name, exc_info=error)
            failure = PoolFailed(f"the pool cannot be followed ({type(error).__name__}: {error})")
        self.ended = True
        self._end_start(failure)
        self._take(())
        with self._lock:
            owner, self._owner = self._owner, None
        with suppress(Exception):  # Ray may be shut down
            if owner is not None:
                self._result(owner.call("leave", self._user))
                owner.release()
        self._follow_over.set()

    def _follow(self) -> None:
        """Report on the pool until this use is to end. A pool that is lost is started again. Raises `PoolFailed`."""
        while not self._closing:
            owner = self._owner = owner_of(self.spec)
            try:
                self._result(owner.call("join", self._user, self.spec, self.weights, self.asleep))
                self._seen = -1
                while not self._closing:
                    report: Report | None = self._result(owner.call("watch", self._user, self._seen))
                    if report is None:  # this use has ended, or a restarted owner does not know it: join again
                        break
                    self._report(report)
            except owner.lost:
                _log.warning("the pool of %s has ended; it is started again", self.spec.name)
                self._take(())
                time.sleep(_LOOK_EVERY_S)  # Ray restarts its owner

    def _result(self, future: Future[Any]) -> Any:
        """Wait for what the owner answers. Raises `PoolFailed` if nobody waits for it any more."""
        while True:
            try:
                return future.result(_LOOK_EVERY_S)
            except NotDone:
                if future.done():
                    raise
                if self._given_up:
                    raise PoolFailed("it hangs") from None

    def _report(self, report: Report) -> None:
        """Take in what the pool says, unless something later is known. Any thread may call this."""
        with self._reporting:
            if report.version <= self._seen:
                return
            self._seen = report.version
            self.weights = report.weights
            self.asleep = all(state.state == "asleep" for state in report.states)
            token, numbers = report.receiving
            if (begin := self._receiving.pop(token, None)) is not None:
                begin(numbers)
            self._take(report.states)
            if report.ready:
                self._end_start()

    def _take(self, states: Sequence[ReplicaState]) -> None:
        with self._lock:
            self.states = tuple(states)
            self.version += 1
            drained = self._drained(*(state.url for state in states))
        # In this order: a call that is refused finds the new states.
        self._tell(drained)
        self.on_change()

    def _end_start(self, failure: PoolFailed | None = None) -> None:
        if not self._start_over.is_set:
            self._failure = failure
            self._start_over.set()

    @property
    def _where(self) -> str:
        return "its pool" if self._owner is None else self._owner.where


class ProcessOwner:
    """A pool of this process, in a thread with an event loop of its own: an engine may move from one loop to another
    while its servers go on. Engines with equal pools share it; the thread ends with the last of them.
    """

    where: str = "its pool in this process"
    lost: tuple[type[Exception], ...] = ()
    _all: ClassVar[dict[tuple[int, str], tuple[PoolActor, BlockingPortalProvider]]] = {}
    """By process, because a forked child has no threads, and by `PoolSpec.key`."""

    def __init__(self, spec: PoolSpec) -> None:
        key = (os.getpid(), spec.key)
        self._actor, self._thread = self._all.setdefault(key, (PoolActor(), BlockingPortalProvider()))
        self._portal = self._thread.__enter__()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the `PoolActor`. The future has its result, or what it raises. Any thread may call this."""
        run: Callable[..., Any] = getattr(self._actor, method)
        return self._portal.start_task_soon(run, *arguments)

    def release(self) -> None:
        """End the use of this owner, after `PoolActor.leave`. The last end waits for all calls of the pool. None hangs:
        the last `leave` has ended the commands and answered those that watch, and a use that is closed makes no more.
        """
        self._thread.__exit__(None, None, None)


def owner_of(spec: PoolSpec) -> PoolOwner:
    """Return the owner of a pool. It blocks until Ray has answered, if Ray is up."""
    if not ray_is_up():
        return ProcessOwner(spec)
    from .ray_server import RayOwner

    return RayOwner(spec, PoolActor)
