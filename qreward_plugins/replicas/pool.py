"""Defines `Pool`: starts all replicas together, restarts those that die, and stops all of them.

`Changes` updates the weights of its replicas, and lets them sleep and wake.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import anyio

from ..system.threads import cancel_futures
from .control import ServerFailed
from .server_kinds import PoolSpec
from .weights import Weights

_log = logging.getLogger("qreward_plugins.replicas")

_BACKOFF_S = (1.0, 60.0)
"""Seconds before the first restart, which double with each further one, and their bound."""
_STEADY_S = 600.0
"""Seconds after which a replica that has been up for so long may be restarted as often as at first."""


State = Literal["starting", "up", "draining", "updating", "asleep", "stale", "down", "failed", "stopped"]
"""`draining`: it ends its calls and gets no more. `updating`: it gets other weights. `asleep`: its devices are free.
`stale`: it runs without the weights of the pool, which came from memory. `down`: it ended, and is started again.
`failed`: it ended too often."""


@dataclass(frozen=True)
class ReplicaState:
    """The state of one replica, as its pool reports it. `url` is "" while its server does not run. `restarts` counts
    all restarts so far.

    `version` and `identity` are those of its weights (`Weights`). `ticket` numbers the times that it was drained;
    `abort`: its calls have had their time to end, and are to be sent again elsewhere.
    """

    number: int
    state: State = "starting"
    url: str = ""
    devices: str = ""
    restarts: int = 0
    problem: str = ""
    version: str = ""
    identity: str = ""
    ticket: int = 0
    abort: bool = False


class Server(Protocol):
    """One start of one server, wherever it runs; see `LocalServer`."""

    url: str

    async def start(self, weights: Weights | None = None) -> str: ...

    async def ended(self) -> ServerFailed: ...

    async def call(self, operation: str, **arguments: Any) -> Any: ...

    async def stop(self) -> None: ...


class PoolFailed(ServerFailed):
    """A pool could not be started. `log` are the last lines of the server at fault, not redacted."""


class ChangeFailed(ServerFailed):
    """An update, a sleep or a wake-up of a pool failed. `replicas` are the numbers of the replicas at fault; `log` are
    the last lines of the log of the first one, not redacted.
    """

    def __init__(self, problem: str, *, replicas: Sequence[int] = (), log: str = "") -> None:
        super().__init__(problem, log)
        self.replicas = tuple(replicas)


def change_failure(failed: Mapping[int, ServerFailed], then: str) -> ChangeFailed:
    """Return the failure of a change in which these replicas failed. `then` says what happens to them now."""
    problems = "; ".join(f"replica {number}: {error.problem}" for number, error in sorted(failed.items()))
    log = next((error.log for _, error in sorted(failed.items()) if error.log), "")
    return ChangeFailed(f"{problems}; {then}", replicas=sorted(failed), log=log)


_ABORTED_S = 30.0
"""Seconds that the users of a replica have to cancel their calls. One that hangs is not waited for."""


async def _at_once(state: ReplicaState) -> None:
    """Return at once: for a pool whose users are not known."""


class Pool:
    """The replicas of one source. It serves the event loop in which it was started.

    `server` makes the server of a replica, for each start anew. `on_change` is called after every change of `states`.
    `idle` waits until no user has calls at a replica that is draining. `weights` are those of an earlier pool that this
    one replaces; default: those of the configuration. `asleep`: that one slept, so this one starts its servers when it
    wakes.
    """

    def __init__(
        self,
        spec: PoolSpec,
        server: Callable[[int], Server],
        on_change: Callable[[], None] = lambda: None,
        *,
        idle: Callable[[ReplicaState], Awaitable[None]] = _at_once,
        weights: Weights | None = None,
        asleep: bool = False,
    ) -> None:
        self.spec = spec
        self.starts_asleep = asleep
        self._weights = weights or Weights()
        self.has: dict[int, Weights] = {}
        """By replica: the weights with which it last took calls."""
        self.servers: dict[int, Server] = {}
        """The last start of each replica."""
        self.may_open = asyncio.Event()
        """Not set while a replica that was started again must not take calls yet."""
        self.may_open.set()
        self._server = server
        self._on_change = on_change
        self._idle = idle
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stopping: asyncio.Task[None] | None = None
        topology = spec.topology
        # Users remember whether a pool slept, so it says so from its first state on.
        first: State = "asleep" if asleep else "starting"
        self._states = [
            ReplicaState(number, first, devices=topology.shown_devices(number))
            for number in range(topology.data_parallel)
        ]

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state of each replica."""
        return tuple(self._states)

    @property
    def weights(self) -> Weights:
        """What replicas are started with from now on. Users hear of a change at once: the journal's keys have it."""
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        if weights != self._weights:
            self._weights = weights
            self._on_change()

    async def start(self) -> None:
        """Start all replicas at the same time, and wait until all are ready.

        If one of them ends, or is not ready within `start_within_s`, all are stopped. Raises `PoolFailed` then.
        Cancelling stops all, too. A pool that starts asleep starts none.
        """
        if self.starts_asleep:
            return
        starts = {asyncio.ensure_future(self.start_one(state.number)): state.number for state in self._states}
        try:
            await asyncio.wait(starts, timeout=self.spec.start_within_s, return_when=asyncio.FIRST_EXCEPTION)
            failure = self._failure(starts)
        except BaseException:
            await cancel_futures(list(starts))
            await self.stop()
            raise
        if failure is not None:
            await cancel_futures(list(starts))
            await self.stop()
            raise failure
        for number in starts.values():
            self.supervise(number)

    def _failure(self, starts: dict[asyncio.Task[None], int]) -> PoolFailed | None:
        late = None
        for start, number in starts.items():
            if start.done():
                error = start.exception()
                if isinstance(error, ServerFailed):
                    return PoolFailed(f"replica {number}: {error.problem}", error.log)
                if error is not None:
                    raise error
            elif late is None:
                log = getattr(self.servers.get(number), "log_tail", str)()
                late = PoolFailed(f"replica {number}: {self._late}", log)
        return late

    @property
    def _late(self) -> str:
        within = f"{self.spec.start_within_s:g} s (start_within_s)"
        return f"it is not ready after {within}: /v1/models does not list the name that it was started with"

    async def stop(self) -> None:
        """Stop all replicas at the same time, with every process of theirs. Idempotent; cancelling ends only the
        wait.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await cancel_futures(list(self._tasks.values()))
        results = await asyncio.gather(*(server.stop() for server in self.servers.values()), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                _log.warning("a replica of %s could not be stopped", self.spec.name, exc_info=result)
        for state in self._states:
            self.set(state.number, "stopped", url="")

    async def start_one(self, number: int, weights: Weights | None = None) -> None:
        """Start the server of a replica, and wait until it serves `weights`; default: those of the pool, also if these
        change meanwhile. Raises `ServerFailed`.
        """
        while True:
            wanted = weights or self.weights
            server = self.servers[number] = self._server(number)
            url = await server.start(wanted)
            if wanted.in_place and wanted.path:
                await server.call("load", path=wanted.path)
            if weights is not None:
                break
            await self.may_open.wait()
            if self.weights is wanted:
                break
            await server.stop()
        if wanted.from_memory:
            self.has.pop(number, None)
            self.set(number, "stale", url=url, problem=f"the weights {wanted.version} came from memory; update again")
        else:
            self.ready(number, wanted, url)

    def ready(self, number: int, weights: Weights, url: str) -> None:
        """Record that a replica serves `weights` and takes calls."""
        self.has[number] = weights
        self.set(number, "up", url=url, problem="", version=weights.version, identity=weights.identity)

    def supervise(self, number: int, failed: ServerFailed | None = None) -> None:
        """Start a replica again whenever it ends, from now on. `failed`: it has ended already, or is to be ended."""
        earlier = self._tasks.get(number)
        if earlier is not None:
            earlier.cancel()
        self._tasks[number] = asyncio.ensure_future(self._supervise(number, failed))

    def keep(self, number: int) -> None:
        """Supervise a replica that runs, unless that is done already."""
        if number not in self._tasks:
            self.supervise(number)

    async def leave_alone(self, numbers: Iterable[int]) -> None:
        """Stop supervising these replicas, until `supervise`."""
        await cancel_futures([self._tasks.pop(number) for number in numbers if number in self._tasks])

    async def drain(self, numbers: Sequence[int], *, within_s: float) -> None:
        """Let replicas get no more calls, and wait until their calls have ended. After `within_s` seconds, users are
        told to cancel them and to send them again.
        """
        numbers = [number for number in numbers if self._states[number].state == "up"]
        for number in numbers:
            self.set(number, "draining", ticket=self._states[number].ticket + 1, abort=False)
        waits = {asyncio.ensure_future(self._idle(self._states[number])): number for number in numbers}
        try:
            for limit_s in (within_s, _ABORTED_S):
                late = [number for wait, number in waits.items() if not wait.done()]
                for number in late if limit_s is _ABORTED_S else ():
                    self.set(number, "draining", abort=True)
                if late:
                    await asyncio.wait(waits, timeout=limit_s)
        finally:
            await cancel_futures(list(waits))

    async def _supervise(self, number: int, failed: ServerFailed | None) -> None:
        """Start a replica again whenever it ends, until it has ended too often in a row."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            server, up_at = self.servers[number], loop.time()
            if failed is None:
                failed = await server.ended()
                if loop.time() - up_at >= _STEADY_S:
                    failures = 0
            failures += 1
            await server.stop()
            over = failures > self.spec.restarts
            state = self._states[number]
            self.set(number, "failed" if over else "down", url="", problem=failed.problem)
            then = "it is not started again" if over else "it is started again"
            _log.warning("replica %d of %s: %s; %s", number, self.spec.name, failed.problem, then)
            if over:
                return
            least_s, most_s = _BACKOFF_S
            await asyncio.sleep(min(most_s, least_s * 2 ** (failures - 1)))
            self.set(number, "starting", restarts=state.restarts + 1)
            failed = await self.try_to_start(number)

    async def try_to_start(self, number: int, weights: Weights | None = None) -> ServerFailed | None:
        """Start a replica as `start_one` does, within `start_within_s` seconds. Return why it did not start."""
        try:
            # Not `asyncio.wait_for`: before Python 3.12 it loses a cancellation that comes just after the start.
            with anyio.fail_after(self.spec.start_within_s):
                await self.start_one(number, weights)
        except ServerFailed as error:
            return error
        except TimeoutError:
            return ServerFailed(self._late)
        except Exception as error:
            _log.warning("replica %d of %s", number, self.spec.name, exc_info=error)
            return ServerFailed(f"it cannot be started ({type(error).__name__})")
        return None

    def set(self, number: int, state: State, **changes: Any) -> None:
        """Change the reported state of a replica."""
        new = replace(self._states[number], state=state, **changes)
        if self._states[number] != new:
            self._states[number] = new
            self._on_change()
