"""Defines `Commands`: carries out the updates, sleeps and wake-ups that processes ask a pool for.

A user is a process that uses the pool. A command goes on when its user stops waiting or ends, so that no pool stays
half changed. Only an update from the memory of a trainer ends with its user, because no further tensors would come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from .changes import Changes
from .pool import ChangeFailed, Pool
from .replica_state import ReplicaState
from .weights import Update

Send = Callable[[dict[str, Any]], None]
"""Sends a message to a user."""


class Commands:
    """Carries out the commands of the users of one pool. `users` returns those that use it now."""

    def __init__(self, users: Callable[[], Collection[Hashable]]) -> None:
        self._users = users
        self._changes: Changes | None = None
        self._pool: Pool | None = None
        self._starting: asyncio.Future[None] | None = None
        self._tickets: dict[Hashable, dict[int, int]] = {}
        """By user and replica: the last ticket (`ReplicaState`) for which the user has reported no calls."""
        self._changed = asyncio.Event()
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

    def receive(self, user: Hashable, message: Mapping[str, Any], send: Send) -> None:
        """Handle a message of a user; see `pool_process.py`. `send` sends it the replies."""
        if "idle" in message:
            tickets = self._tickets.setdefault(user, {})
            tickets.update((number, ticket) for number, ticket in message["idle"])
            self._change()
        elif "cancel" in message:
            for task, (who, number, _) in self._tasks.items():
                if who == user and number == message["cancel"]:
                    task.cancel()
        elif "command" in message:
            name, number, arguments = message["command"], message["id"], message["arguments"]
            task = asyncio.ensure_future(self._carry_out(name, number, arguments, send))
            self._tasks[task] = (user, number, name == "update" and not arguments["path"])
            task.add_done_callback(lambda task: self._tasks.pop(task, None))

    def left(self, user: Hashable) -> None:
        """Forget a user that has ended its use, and cancel the commands that end with it."""
        self._tickets.pop(user, None)
        for task, (who, _, ends_with_user) in self._tasks.items():
            if who == user and ends_with_user:
                task.cancel()
        self._change()

    async def aclose(self) -> None:
        """Cancel all commands, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, name: str, number: int, arguments: dict[str, Any], send: Send) -> None:
        try:
            assert self._starting is not None
            await asyncio.wait([self._starting])
            result = await self._run(name, arguments, lambda some: send({"id": number, "receiving": some}))
            send({"id": number, "result": result})
        except ChangeFailed as error:
            failed = {"problem": error.problem, "replicas": list(error.replicas), "log": error.log}
            send({"id": number, "error": failed})
        except asyncio.CancelledError:
            send({"id": number, "error": {"problem": "it was cancelled", "replicas": [], "log": ""}})
            raise
        except Exception as error:
            problem = f"unexpected {type(error).__name__}: {error}"
            send({"id": number, "error": {"problem": problem, "replicas": [], "log": ""}})

    async def _run(
        self, name: str, arguments: dict[str, Any], on_receiving: Callable[[list[int]], None]
    ) -> dict[str, Any]:
        assert self._changes is not None
        if name == "update":
            return (await self._changes.update(Update.of(arguments), on_receiving)).as_mapping()
        if name == "sleep":
            await self._changes.sleep(**arguments)
        else:
            await self._changes.wake()
        return {}

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
