"""Where a pool lives: an actor of the Ray job if Ray is up, and a thread of this process otherwise.

Both carry a `PoolActor`. A call gives a `concurrent.futures.Future`, for which a thread and any event loop can wait.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol

from ..system.ray_actors import ray_is_up
from .pool_actor import PoolActor
from .server_kinds import PoolSpec

_END_WITHIN_S = 10.0


class PoolOwner(Protocol):
    """The owner of a pool. `where` names it, for people; `lost` are the errors of a call whose owner has ended."""

    where: str
    lost: tuple[type[Exception], ...]

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the `PoolActor`. The future has its result, or what it raises. Any thread may call this."""
        ...

    def release(self) -> None:
        """End the use of this owner, after `PoolActor.leave`."""


class ProcessOwner:
    """A pool of this process, in a thread with an event loop of its own: an engine may move from one loop to another
    while its servers go on. Engines with equal pools share it.
    """

    where: str = "its pool in this process"
    lost: tuple[type[Exception], ...] = ()
    _all: ClassVar[dict[tuple[int, str], ProcessOwner]] = {}
    """By process, because a forked child has no threads, and by `PoolSpec.key`."""
    _lock: ClassVar = threading.Lock()

    def __init__(self, key: tuple[int, str]) -> None:
        self._key = key
        self._uses = 0
        self._actor = PoolActor()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="qreward-pool-owner", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, spec: PoolSpec) -> ProcessOwner:
        """Return the owner of a pool, which is made for the first use."""
        key = (os.getpid(), spec.key)
        with cls._lock:
            owner = cls._all.get(key)
            if owner is None:
                owner = cls._all[key] = cls(key)
            owner._uses += 1
            return owner

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        run: Callable[..., Any] = getattr(self._actor, method)
        return asyncio.run_coroutine_threadsafe(run(*arguments), self._loop)

    def release(self) -> None:
        with self._lock:
            self._uses -= 1
            if self._uses:
                return
            del self._all[self._key]
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(_END_WITHIN_S)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # calls that are about to end
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


def owner_of(spec: PoolSpec) -> PoolOwner:
    """Return the owner of a pool. It blocks until Ray has answered, if Ray is up."""
    if not ray_is_up():
        return ProcessOwner.of(spec)
    from .ray_server import RayOwner

    return RayOwner(spec, PoolActor)
