"""Runs the reward workers of a domain as Ray would.

A class with any async method serves up to a thousand calls at once on an event loop. Any other class serves one call
after the other in its own thread. Arguments and results are copied, because actors share no memory. Cancelling a caller
does not stop its call.
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
        """Make the worker, in the environment that its actor would have, as for `initialize`."""
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
        """Call a method and raise its errors. The call continues if the caller is cancelled."""
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
            task.exception()  # marks the error as retrieved; its caller has got it

    async def close(self) -> None:
        """End all calls, then call `close` of an initialised worker, sync or async, if it has one; raise its errors."""
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
                # A sync call cannot be cancelled, so closing waits for it.
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
        """Give every worker one part of the batch (`Dispatch.DP_MP_COMPUTE`). Raises `AssertionError` if there are more
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
