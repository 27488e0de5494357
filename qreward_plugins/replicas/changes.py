"""Defines `Changes`: the updates, sleeps and wake-ups of one pool, one at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from .control import ControlFailed
from .launch import ServerFailed
from .operations import ServerOperations
from .pool import ChangeFailed, Pool
from .pool_sleep import PoolSleep
from .weight_update import WeightUpdate
from .weights import Drain, Update, Weights


class Changes:
    """Updates, puts to sleep and wakes one pool. A second change waits for the first.

    `token` makes the identity of weights from memory if the server has no checksum.
    """

    def __init__(self, pool: Pool, *, token: Callable[[], str] = lambda: secrets.token_hex(16)) -> None:
        self._pool = pool
        self._token = token
        self._lock = asyncio.Lock()
        self._sleep = PoolSleep(pool)

    async def update(self, update: Update, on_receiving: Callable[[list[int]], None] = lambda numbers: None) -> Weights:
        """Update the weights of all replicas; see `WeightUpdate.run`. A pool that sleeps loads a checkpoint when it
        wakes.
        """
        async with self._lock:
            new = await self._checked(update)
            if self._sleep.asleep and update.path:
                # Another program uses the devices now. `wake` loads the weights.
                self._pool.weights = new
                return new
            return await WeightUpdate(self._pool, self._sleep, update, new, on_receiving).run()

    async def sleep(self, *, level: int = 1, drain: Drain = "wait", within_s: float = 600.0) -> None:
        """Free the devices of all replicas; see `PoolSleep.sleep`."""
        async with self._lock:
            await self._sleep.sleep(level=level, drain=drain, within_s=within_s)

    async def wake(self) -> None:
        """Let all replicas take calls again; see `PoolSleep.wake`."""
        async with self._lock:
            await self._sleep.wake()

    async def _checked(self, update: Update) -> Weights:
        """Return the new weights, after all checks that need no replica to stop."""
        pool, spec = self._pool, self._pool.spec
        revision = pool.weights.revision + 1
        if not update.path:
            if not spec.in_place:
                problem = "weights from memory need servers that load them while they run"
                raise ChangeFailed(f"{problem}; set `weight_updates: in_place`")
            if update.begin and len(update.begin) != spec.topology.data_parallel:
                problem = f"`begin` has {len(update.begin)} bodies for {spec.topology.data_parallel} replicas"
                raise ChangeFailed(problem)
            return Weights(update.version, self._token(), in_place=True, revision=revision)
        found: dict[str, int] = {}
        for state in (state for state in pool.states if state.url):
            try:
                checked = await pool.servers[state.number].call("check", path=update.path)
            except ServerFailed as error:
                problem = f"replica {state.number}: {error.problem}; nothing was changed"
                raise ChangeFailed(problem, replicas=[state.number]) from None
            found.setdefault(checked["files"], state.number)
        if not found:  # no server runs
            try:
                found[(await ServerOperations(spec, None, "").check(update.path))["files"]] = 0
            except ControlFailed as error:
                raise ChangeFailed(f"{error}; nothing was changed") from None
        if len(found) > 1:
            first, second = sorted(found.values())[:2]
            problem = f"replicas {first} and {second} find different files at {update.path}; nothing was changed"
            raise ChangeFailed(problem, replicas=sorted(found.values()))
        (files,) = found
        return Weights(update.version or files[:12], files, update.path, files, spec.in_place, revision)
