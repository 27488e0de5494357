"""Defines `RayPoolActor`: the pool of a Ray job, a named actor that starts each replica as an actor of its own.

The first process of a job that needs the pool starts the actor, the others find it by its name (`RayPoolUse`). It stops
the servers when its last user leaves, and ends with the job. A replica whose actor or node is lost is placed and
started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import anyio

from .commands import Commands
from .pool import Pool, PoolFailed
from .pool_search import describe
from .ray_server import RayServer
from .spec import PoolSpec
from .weights import Weights

_log = logging.getLogger("qreward_plugins.replicas")

_POLL_S = 30.0
_SILENT_S = 60.0
"""Seconds without a poll after which nobody waits for a user: Ray does not report that a process ended."""


class RayPoolActor:
    """The pool of a job; started by `get_or_start`. Users join it with its spec, and poll for changes."""

    def __init__(self) -> None:
        self._users: set[str] = set()
        self._guests: set[str] = set()
        """Those that only look at the pool and change it. They send no requests: so no pool goes on for them, and no
        change waits for them.
        """
        self._silent: set[str] = set()
        """Users that have not polled for a while."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._pool: Pool | None = None
        self._commands = Commands(self._present, self._send)
        self._replies: dict[str, list[dict[str, Any]]] = {}
        """By user: the answers to its commands that it has not fetched yet."""
        self._version = 0
        self._ready = False
        self._failed: PoolFailed | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def join(self, user: str, spec: bytes, weights: Mapping[str, Any], asleep: bool, starts: bool = True) -> bool:
        """Begin a use of the pool. The first one starts it, with the `weights` that an earlier pool of its user had.
        Without `starts` it is a guest, for which no pool is started. Return whether one runs.
        """
        while self._stopping is not None:
            await asyncio.wait([self._stopping])
        if self._pool is None and not starts:
            return False
        (self._users if starts else self._guests).add(user)
        if self._pool is None:
            known = PoolSpec.from_json(spec)
            self._ready, self._failed = False, None
            commands = self._commands = Commands(self._present, self._send)
            self._pool = Pool(
                known,
                lambda number: RayServer(known, number),
                on_change=self._change,
                idle=commands.idle,
                weights=Weights(**weights),
                asleep=asleep,
            )
            self._starting = asyncio.ensure_future(self._start(self._pool))
            commands.serve(self._pool, self._starting)
        else:
            self._pool.learn(Weights(**weights))
        return True

    async def describe(self) -> dict[str, Any]:
        """Return what others may know of the pool (`pool_search.describe`); nothing if none runs."""
        return {} if self._pool is None else describe(self._pool.spec)

    async def receive(self, user: str, message: Mapping[str, Any]) -> None:
        """Handle a message of a user; see `Commands.receive`."""
        if self._has_joined(user):
            self._commands.receive(user, message)

    def _send(self, user: str, message: dict[str, Any]) -> None:
        self._replies.setdefault(user, []).append(message)
        self._change()

    def _has_joined(self, user: str) -> bool:
        return user in self._users or user in self._guests

    def _present(self) -> set[str]:
        return self._users - self._silent

    def _note_alive(self, user: str) -> None:
        """Note that a user lives."""
        self._silent.discard(user)
        if (timer := self._timers.pop(user, None)) is not None:
            timer.cancel()

    def _note_silent(self, user: str) -> None:
        self._timers.pop(user, None)
        if user in self._guests:
            self._guests.discard(user)
            self._replies.pop(user, None)
        else:
            self._silent.add(user)
        self._commands.left(user)

    async def poll(self, user: str, version: int) -> dict[str, Any] | None:
        """Wait for a change after `version`, at most `_POLL_S` seconds; return the state of the pool, and the replies
        to the user's commands. None for a user that has not joined, or has left.
        """
        self._note_alive(user)
        if self._has_joined(user) and version == self._version:
            with anyio.move_on_after(_POLL_S):
                await self._changed.wait()
        self._note_alive(user)
        if self._has_joined(user):
            self._timers[user] = asyncio.get_running_loop().call_later(_SILENT_S, self._note_silent, user)
        if not self._has_joined(user) or self._pool is None:
            return None
        if self._failed is not None:
            return {"failed": self._failed.problem, "log": self._failed.log}
        states = [state.as_mapping() for state in self._pool.states]
        return {
            "version": self._version,
            "replicas": states,
            "weights": self._pool.weights.as_mapping(),
            "ready": self._ready,
            "replies": self._replies.pop(user, []),
        }

    async def leave(self, user: str) -> None:
        """End a use. The last one stops the servers, and returns when they have ended."""
        was_guest = user in self._guests
        self._users.discard(user)
        self._guests.discard(user)
        self._note_alive(user)
        self._replies.pop(user, None)
        self._commands.left(user)
        if not self._users and self._pool is not None and self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(self._pool))
        if self._stopping is not None and not self._users and not was_guest:
            await asyncio.wait([self._stopping])
        self._change()

    async def _start(self, pool: Pool) -> None:
        try:
            await pool.start()
            self._ready = True
        except PoolFailed as error:
            self._failed = error
        except Exception as error:
            _log.exception("the pool cannot be started")
            self._failed = PoolFailed(f"the pool cannot be started ({type(error).__name__}: {error})")
        self._change()

    async def _stop(self, pool: Pool) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._commands.aclose()
        await pool.stop()
        self._pool, self._stopping = None, None

    def _change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
