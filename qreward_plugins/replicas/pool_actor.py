"""Defines `PoolActor`: owns a pool, and does what its users ask for.

With Ray it is a named actor of the job: one for the job with `placement: ray`, and one on each node with
`placement: local`. Without Ray it lives in a thread of the process that uses it (`pool_use.py`). It stops the servers
when its last user leaves. A command goes on when whoever gave it stops waiting, so that no pool stays half changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from .changes import Changes
from .pool import ChangeFailed, Pool, PoolFailed, ReplicaState, Server, Weights
from .server import LocalServer
from .server_kinds import PoolSpec

_log = logging.getLogger("qreward_plugins.replicas")

_WATCH_S = 30.0
"""Most seconds until a user that watches is answered, and asks again."""
_SILENT_S = 60.0
"""Seconds without a question after which no change waits for a user's calls: Ray does not tell that a process ended."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Report:
    """What a user is told of a pool. `version` counts the changes so far. `ready`: its start is over. `receiving`:
    see `Pool.receiving`.
    """

    version: int
    states: tuple[ReplicaState, ...]
    weights: Weights
    ready: bool
    receiving: tuple[str, list[int]]


@dataclass
class _User:
    """A user: when it was last heard of, and by replica the last ticket for which it has no calls."""

    seen: float
    tickets: dict[int, int] = field(default_factory=dict)


class PoolActor:
    """One pool and its users. All methods are called in one event loop; users name themselves."""

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}
        self._pool: Pool | None = None
        self._changes: Changes | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._failed: PoolFailed | None = None
        self._commands: dict[str, asyncio.Task[Any]] = {}
        self._version = 0
        self._changed = asyncio.Event()

    async def join(self, user: str, spec: PoolSpec, weights: Weights, asleep: bool) -> None:
        """Begin a use. The first one starts the pool; `weights` and `asleep` are what a lost one had."""
        while self._stopping is not None:
            await asyncio.wait([self._stopping])
        self._users[user] = _User(asyncio.get_running_loop().time())
        if self._pool is None:
            self._failed = None
            self._pool = Pool(spec, self._maker(spec), self._change, idle=self._idle, weights=weights, asleep=asleep)
            self._changes = Changes(self._pool)
            self._starting = asyncio.ensure_future(self._start(self._pool))

    async def watch(self, user: str, version: int) -> Report | None:
        """Wait for a change after `version`, for some seconds at most, and return the state of the pool. None for a
        user that has left. Raises `PoolFailed` if the pool could not be started.
        """
        if version == self._version and user in self._users:
            with anyio.move_on_after(_WATCH_S):
                await self._changed.wait()
        if self._failed is not None:
            raise PoolFailed(self._failed.problem, self._failed.log)
        if user not in self._users or self._pool is None or self._starting is None:
            return None
        self._users[user].seen = asyncio.get_running_loop().time()
        pool = self._pool
        return Report(self._version, pool.states, pool.weights, self._starting.done(), pool.receiving)

    async def idle(self, user: str, tickets: Mapping[int, int]) -> None:
        """Note that a user has no calls at draining replicas (number and ticket)."""
        if user in self._users:
            self._users[user].tickets.update(tickets)
            self._wake()

    async def command(self, token: str, change: str, *arguments: Any) -> Any:
        """Carry out a method of `Changes` once the pool has started, and return its result. Cancelling ends only the
        wait. `token` names it, for `cancel`.
        """
        starting, changes = self._starting, self._changes
        if starting is None or changes is None:
            raise ChangeFailed("it has ended")

        async def run() -> Any:
            await asyncio.wait([starting])
            return await getattr(changes, change)(*arguments)

        task = self._commands[token] = asyncio.ensure_future(run())
        task.add_done_callback(lambda _: self._commands.pop(token, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
        raise ChangeFailed("it was cancelled, or the servers ended, because their last user has ended")

    async def cancel(self, token: str) -> None:
        """Cancel an update from memory: no further tensors come."""
        if token in self._commands:
            self._commands[token].cancel()

    async def leave(self, user: str) -> None:
        """End a use. The last one stops the servers, and returns when they have ended."""
        self._users.pop(user, None)
        self._change()
        if not self._users and self._pool is not None and self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(self._pool))
        if not self._users and self._stopping is not None:
            await asyncio.wait([self._stopping])

    async def _idle(self, state: ReplicaState) -> None:
        """Wait until no user has calls at a replica that is draining. Those that are gone are not waited for."""
        loop = asyncio.get_running_loop()
        while any(
            user.tickets.get(state.number, 0) < state.ticket and loop.time() - user.seen < _SILENT_S
            for user in self._users.values()
        ):
            with anyio.move_on_after(_LOOK_EVERY_S):
                await self._changed.wait()

    def _maker(self, spec: PoolSpec) -> Callable[[int], Server]:
        if spec.topology.assigned:
            from .ray_server import RayServer

            return lambda number: RayServer(spec, number)
        return lambda number: LocalServer(spec, number)

    async def _start(self, pool: Pool) -> None:
        try:
            await pool.start()
        except PoolFailed as error:
            self._failed = error
        except Exception as error:
            _log.exception("the pool cannot be started")
            self._failed = PoolFailed(f"the pool cannot be started ({type(error).__name__}: {error})")
        asyncio.get_running_loop().call_soon(self._change)  # when this task is done

    async def _stop(self, pool: Pool) -> None:
        for task in (self._starting, *self._commands.values()):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await pool.stop()
        self._pool = self._stopping = None

    def _change(self) -> None:
        self._version += 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
