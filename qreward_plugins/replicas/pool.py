"""Defines `Pool`: starts all replicas together, starts those again that die, and stops all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from .launch import ServerFailed
from .spec import PoolSpec

__all__ = ["Pool", "PoolFailed", "PoolSpec", "ReplicaState", "Server"]

_log = logging.getLogger("qreward_plugins.replicas")

_BACKOFF_S = (1.0, 60.0)
"""Seconds before the first restart, which double with each further one, and their bound."""
_STEADY_S = 600.0
"""Seconds after which a replica that has been up for so long may be restarted as often as at first."""


class Server(Protocol):
    """One start of one server, wherever it runs; see `LocalServer`."""

    url: str

    async def start(self) -> str: ...

    async def ended(self) -> ServerFailed: ...

    async def stop(self) -> None: ...


class PoolFailed(Exception):
    """A pool could not be started. `log` are the last lines of the server at fault, not redacted."""

    def __init__(self, problem: str, log: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.log = log


@dataclass(frozen=True)
class ReplicaState:
    """What is known of a replica. `url` is "" while it is not up. `restarts` counts all restarts so far."""

    number: int
    state: Literal["starting", "up", "down", "failed", "stopped"] = "starting"
    url: str = ""
    devices: str = ""
    restarts: int = 0
    problem: str = ""

    def as_mapping(self) -> dict[str, Any]:
        """Its fields as plain values."""
        return asdict(self)


class Pool:
    """The replicas of one source. It serves the event loop in which it was started.

    `server` makes the server of a replica, for each start anew. `on_change` is called after every change of `states`.
    """

    def __init__(
        self, spec: PoolSpec, server: Callable[[int], Server], on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._spec = spec
        self._server = server
        self._on_change = on_change
        self._servers: dict[int, Server] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        topology = spec.topology
        self._states = [
            ReplicaState(number, devices=topology.shown_devices(number)) for number in range(topology.data_parallel)
        ]

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state of each replica."""
        return tuple(self._states)

    async def start(self) -> None:
        """Start all replicas at the same time, and wait until all are ready.

        If one of them ends, or is not ready within `start_within_s`, all are stopped. Raises `PoolFailed` then.
        Cancelling stops all, too.
        """
        starts = {asyncio.ensure_future(self._start_one(state.number)): state.number for state in self._states}
        try:
            await asyncio.wait(starts, timeout=self._spec.start_within_s, return_when=asyncio.FIRST_EXCEPTION)
            failure = self._failure(starts)
        except BaseException:
            await _cancel(starts)
            await self.stop()
            raise
        if failure is not None:
            await _cancel(starts)
            await self.stop()
            raise failure
        self._tasks = [asyncio.ensure_future(self._supervise(number)) for number in starts.values()]

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
                log = getattr(self._servers.get(number), "log_tail", str)()
                late = PoolFailed(f"replica {number}: it is not ready after {self._spec.start_within_s:g} s", log)
        return late

    async def stop(self) -> None:
        """Stop all replicas at the same time, with every process of theirs. Idempotent; cancelling ends only the
        wait.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await _cancel(self._tasks)
        results = await asyncio.gather(*(server.stop() for server in self._servers.values()), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                _log.warning("a replica of %s could not be stopped", self._spec.name, exc_info=result)
        for state in self._states:
            self._set(replace(state, state="stopped", url=""))

    async def _start_one(self, number: int) -> None:
        """Start a replica once, and wait until it is ready. Raises `ServerFailed`."""
        server = self._servers[number] = self._server(number)
        url = await server.start()
        self._set(replace(self._states[number], state="up", url=url, problem=""))

    async def _supervise(self, number: int) -> None:
        """Start a replica again whenever it ends, until it has ended too often in a row."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            server, up_at = self._servers[number], loop.time()
            if server.url:
                failed = await server.ended()
                if loop.time() - up_at >= _STEADY_S:
                    failures = 0
            failures += 1
            await server.stop()
            over = failures > self._spec.restarts
            state = self._states[number]
            self._set(replace(state, state="failed" if over else "down", url="", problem=failed.problem))
            _log.warning("replica %d of %s: %s%s", number, self._spec.name, failed.problem, _then(over))
            if over:
                return
            least_s, most_s = _BACKOFF_S
            await asyncio.sleep(min(most_s, least_s * 2 ** (failures - 1)))
            self._set(replace(self._states[number], state="starting", restarts=state.restarts + 1))
            try:
                await asyncio.wait_for(self._start_one(number), self._spec.start_within_s)
            except ServerFailed as error:
                failed = error
            except asyncio.TimeoutError:
                failed = ServerFailed(f"it is not ready after {self._spec.start_within_s:g} s")
            except Exception as error:
                _log.warning("replica %d of %s", number, self._spec.name, exc_info=error)
                failed = ServerFailed(f"it cannot be started ({type(error).__name__})")

    def _set(self, state: ReplicaState) -> None:
        if self._states[state.number] != state:
            self._states[state.number] = state
            self._on_change()


def _then(over: bool) -> str:
    return "; it is not started again" if over else "; it is started again"


async def _cancel(tasks: Any) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
