"""The base class of ROLL's reward workers, the decorator of their methods, and actors that run them as Ray would.

A class with any async method serves calls at once on an event loop. Any other class serves one call after the other in
a thread. Arguments and results are copied, because actors share no memory. Cancelling a caller does not stop its call.
"""

from __future__ import annotations

import asyncio
import copy
import enum
import inspect
import logging
from collections.abc import Callable
from typing import Any

from ...system.threads import cancel_futures

_ASYNC_CALLS = 1000


class Dispatch(enum.Enum):
    """How a cluster's call is distributed over its workers."""

    ONE_TO_ALL = enum.auto()
    DP_MP_COMPUTE = enum.auto()
    DP_MP_DISPATCH_FIRST = enum.auto()


def register(dispatch_mode: Any, **_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a method that a cluster calls, as ROLL's decorator does."""
    assert isinstance(dispatch_mode, (Dispatch, dict)), f"dispatch_mode is not a Dispatch: {dispatch_mode!r}"
    return lambda method: method


class Worker:
    """The part of ROLL's `Worker` that reward workers use. `FakeRollTrainer` makes and calls it. `cluster_name` and
    `rank` are known from `initialize` on.
    """

    cluster_name: str | None = None
    rank = 0

    def __init__(self, worker_config: Any) -> None:
        self.worker_config = worker_config
        self.pipeline_config: Any = None
        self.logger = logging.getLogger("qreward_plugins.testing.roll")

    def initialize(self, pipeline_config: Any, *args: Any, **kwargs: Any) -> None:
        self.pipeline_config = pipeline_config

    def load_states(self, *args: Any, **kwargs: Any) -> None:
        """Called before the rollouts of a step."""

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Called after the rollouts of a step."""


class RollActor:
    """One worker in an actor."""

    def __init__(self, kind: type, config: Any, cluster: str, rank: int) -> None:
        if not issubclass(kind, Worker):
            raise TypeError(
                f"{kind.__qualname__} is not made on the Worker of roll_stand_in(): enter it before the class is "
                "imported, and where ROLL is installed with over_installed=True, for ROLL's own Worker needs Ray"
            )
        self._is_async = any(inspect.iscoroutinefunction(member) for _, member in inspect.getmembers(kind))
        self._kind, self._config = kind, copy.deepcopy(config)
        self._cluster, self._rank = cluster, rank
        self._slots = asyncio.Semaphore(_ASYNC_CALLS if self._is_async else 1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._initialized = False
        self.worker: Any = None

    async def start(self, pipeline_config: Any) -> None:
        """Make and initialise the worker."""
        self.worker = await self._run(self._kind, self._config)
        self.worker.cluster_name, self.worker.rank = self._cluster, self._rank
        await self.call("initialize", pipeline_config)
        self._initialized = True

    def call(self, name: str, *args: Any) -> asyncio.Future[Any]:
        """Call a method and raise its errors. The call continues if the caller is cancelled."""
        task = asyncio.ensure_future(self._call(name, copy.deepcopy(args)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Marks the error as retrieved; its caller has got it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.shield(task)

    async def _call(self, name: str, args: tuple[Any, ...] = ()) -> Any:
        async with self._slots:
            return copy.deepcopy(await self._run(getattr(self.worker, name), *args))

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self._is_async:
            return await asyncio.get_running_loop().run_in_executor(None, function, *args)
        result = function(*args)
        return await result if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """End all calls, then call `close` of an initialised worker, sync or async, if it has one; raise its errors."""
        await cancel_futures(list(self._tasks))
        if self._initialized and hasattr(self.worker, "close"):
            await self._call("close")
