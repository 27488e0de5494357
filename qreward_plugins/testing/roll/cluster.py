"""The reward workers of a domain, as Ray would run them: where each call runs, how many at once, and what is copied.

A class with any async method serves up to a thousand calls at once on an event loop; a class without serves one after
the other, in a thread of its own. What goes in and comes out is copied, because actors share no memory. A caller that
is cancelled does not stop the call.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from .protocol import RollDataProto
from .workers import Worker

_ASYNC_CALLS = 1000


class RollActor:
    """One worker."""

    def __init__(self, kind: type, config: Any, cluster: str, rank: int) -> None:
        if not issubclass(kind, Worker):
            raise TypeError(
                f"{kind.__qualname__} is not made on the Worker of roll_stand_in(): enter it before the class is "
                "imported, and where ROLL is installed with over_installed=True, for ROLL's own Worker needs Ray"
            )
        members = inspect.getmembers(kind, inspect.isfunction)
        self.is_async = any(inspect.iscoroutinefunction(member) for _, member in members)
        if not self.is_async and config.max_concurrency != 1:
            raise ValueError(f"{cluster}: a worker without async methods has max_concurrency 1")
        self._kind = kind
        self._config = copy.deepcopy(config)
        self._environment = {
            "WORLD_SIZE": str(config.world_size),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "CLUSTER_NAME": cluster,
            "WORKER_NAME": f"{cluster}-{rank}",
            **config.system_envs,
        }
        self._slots = asyncio.Semaphore(config.max_concurrency if config.max_concurrency > 1 else _ASYNC_CALLS)
        self._thread = None if self.is_async else ThreadPoolExecutor(1, thread_name_prefix=f"fake-roll-{cluster}")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._initialized = False
        self.worker: Any = None

    async def start(self) -> None:
        """Make the worker. Like `initialize`, in the environment that its actor would have."""
        with _environment(self._environment):
            if self._thread is None:
                self.worker = self._kind(worker_config=self._config)
            else:
                make = self._kind
                self.worker = await asyncio.get_running_loop().run_in_executor(
                    self._thread, lambda: make(worker_config=self._config)
                )

    async def initialize(self, pipeline_config: Any) -> None:
        with _environment(self._environment):
            await self.call("initialize", copy.deepcopy(pipeline_config))
        self._initialized = True

    def call(self, name: str, *args: Any) -> asyncio.Future[Any]:
        """Call a method. Raises what it raises; the call goes on if the caller is cancelled."""
        task = asyncio.ensure_future(self._call(name, copy.deepcopy(args)))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return asyncio.shield(task)

    async def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        async with self._slots:
            method = getattr(self.worker, name)
            if self._thread is not None:
                result = await asyncio.get_running_loop().run_in_executor(self._thread, method, *args)
            else:
                result = method(*args)
                if inspect.isawaitable(result):
                    result = await result
        return copy.deepcopy(result)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited for it has been told, and nobody else needs to be

    async def close(self) -> None:
        """End what still runs. The `close` of an initialised worker, sync or async, is called if it has one.

        Raises what that raises, when everything is ended.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            if self._initialized and hasattr(self.worker, "close"):
                await self._call("close", ())
        finally:
            if self.worker is not None:
                self.worker.thread_executor.shutdown(wait=False, cancel_futures=True)
            if self._thread is not None:
                # A sync call cannot be ended: whoever closes waits for it.
                await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)


class RollCluster:
    """The workers of one domain."""

    def __init__(self, domain: str, kind: type, config: Any) -> None:
        self.domain = domain
        self.actors = [RollActor(kind, config, f"reward-{domain}", rank) for rank in range(config.world_size)]

    async def start(self) -> None:
        for actor in self.actors:
            await actor.start()

    async def call_all(self, name: str, *args: Any) -> None:
        """Call a method of every worker."""
        await asyncio.gather(*(actor.call(name, *args) for actor in self.actors))

    async def compute_rewards(self, data: RollDataProto) -> list[RollDataProto]:
        """One part of the batch for every worker (`Dispatch.DP_MP_COMPUTE`). Raises `AssertionError` if there are more
        workers than rows.
        """
        parts = data.chunk(len(self.actors))
        calls = [actor.call("compute_rewards", part) for actor, part in zip(self.actors, parts, strict=True)]
        return list(await asyncio.gather(*calls))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
