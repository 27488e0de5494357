"""Defines `Commands`: carries out the updates, sleeps and wake-ups that processes ask a pool for, and tells its status.

A user is a process that uses the pool. A guest (`pool_process.py`) gives commands, too. A command goes on when whoever
gave it stops waiting or ends, so that no pool stays half changed. Only an update from the memory of a trainer ends with
its user, because no further tensors would come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from .changes import Changes
from .pool import ChangeFailed, Pool
from .pool_status import PoolStatus, Reports
from .replica_state import ReplicaState
from .weights import Update

_OVER = "the servers end, because their last user has ended"

Send = Callable[[Any, dict[str, Any]], None]
"""Sends a message to a user."""


class Commands:
    """Carries out the commands of the users of one pool. `users` returns those that use it now, and `send` sends a
    message to one of them.
    """

    def __init__(self, users: Callable[[], Collection[Hashable]], send: Send) -> None:
        self._users = users
        self._send = send
        self._reports = Reports(send)
        self._changes: Changes | None = None
        self._pool: Pool | None = None
        self._starting: asyncio.Future[None] | None = None
        self._tickets: dict[Hashable, dict[int, int]] = {}
        """By user and replica: the last ticket (`ReplicaState`) for which the user has reported no calls."""
        self._changed = asyncio.Event()
        self._closing = False
        self._tasks: dict[asyncio.Task[None], tuple[Hashable, int, bool]] = {}
        """The commands under way: user, number, and whether the command ends with its user."""

    def serve(self, pool: Pool, starting: asyncio.Future[None]) -> None:
        """Carry out commands at `pool` from now on, once `starting` is done."""
        self._pool, self._starting = pool, starting
        self._changes = Changes(pool)

    async def idle(self, state: ReplicaState) -> None:
        """Wait until no user has calls at a replica that is draining."""
        while any(self._tickets.get(user, {}).get(state.number, 0) < state.ticket for user in self._users()):
            await self._changed.wait()

    def receive(self, user: Hashable, message: Mapping[str, Any]) -> None:
        """Handle a message of a user; see `pool_process.py`."""
        if "loads" in message:
            self._reports.receive(user, message["loads"])
        elif "idle" in message:
            tickets = self._tickets.setdefault(user, {})
            tickets.update((number, ticket) for number, ticket in message["idle"])
            self._change()
        elif "cancel" in message:
            for task, (who, number, _) in self._tasks.items():
                if who == user and number == message["cancel"]:
                    task.cancel()
        elif "command" in message:
            name, number, arguments = message["command"], message["id"], message["arguments"]
            if self._closing:
                self._send(user, _failed(number, _OVER))
                return
            task = asyncio.ensure_future(self._carry_out(user, name, number, arguments))
            self._tasks[task] = (user, number, name == "update" and not arguments["path"])
            task.add_done_callback(lambda task: self._tasks.pop(task, None))

    def left(self, user: Hashable) -> None:
        """Forget a user that has ended its use, and cancel the commands that end with it."""
        self._tickets.pop(user, None)
        self._reports.left(user)
        for task, (who, _, ends_with_user) in self._tasks.items():
            if who == user and ends_with_user:
                task.cancel()
        self._change()

    async def aclose(self) -> None:
        """Cancel all commands, and wait until they have ended."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, user: Hashable, name: str, number: int, arguments: dict[str, Any]) -> None:
        def send(message: dict[str, Any]) -> None:
            self._send(user, message)

        try:
            if name == "status":
                send({"id": number, "result": (await self._status(user)).as_mapping()})
                return
            assert self._starting is not None
            await asyncio.wait([self._starting])
            result = await self._run(name, arguments, lambda some: send({"id": number, "receiving": some}))
            send({"id": number, "result": result})
        except ChangeFailed as error:
            send(_failed(number, error.problem, list(error.replicas), error.log))
        except asyncio.CancelledError:
            send(_failed(number, _OVER if self._closing else "it was cancelled"))
            raise
        except Exception as error:
            send(_failed(number, f"unexpected {type(error).__name__}: {error}"))

    async def _run(
        self, name: str, arguments: dict[str, Any], on_receiving: Callable[[list[int]], None]
    ) -> dict[str, Any]:
        assert self._changes is not None
        if name == "update":
            return (await self._changes.update(Update.of(arguments), on_receiving)).as_mapping()
        if name == "sleep":
            await self._changes.sleep(**arguments)
        elif name == "wake":
            await self._changes.wake()
        else:
            raise ChangeFailed(f"unknown command {name!r}, perhaps of a later version of qreward-plugins")
        return {}

    async def _status(self, asking: Hashable) -> PoolStatus:
        """Return the status for a user that sends no requests itself."""
        others = [user for user in self._users() if user != asking]
        loads, silent = await self._reports.ask(others)
        assert self._pool is not None
        return PoolStatus(self._pool.states, self._pool.weights, len(others), silent, loads)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _failed(number: int, problem: str, replicas: Sequence[int] = (), log: str = "") -> dict[str, Any]:
    return {"id": number, "error": {"problem": problem, "replicas": replicas, "log": log}}
