"""Learning that slime has aborted a rollout, so that rewards nobody needs any more do not hold the step.

When its batch is full slime sets `GenerateState.aborted` and then waits for every reward that is still pending
(slime/rollout/sglang_rollout.py, `abort`); nothing tells the reward function. So pending calls look at that flag, one
look for all calls of an event loop. A rollout function or trainer of one's own may say the same with a callable
`args.qreward_aborted`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

POLL_S = 0.1
"""Seconds between two looks at slime's flag."""

T = TypeVar("T")


def aborted(args: Any) -> bool:
    """Whether the rollout that `args` belongs to has been aborted."""
    told: Callable[[], bool] | None = getattr(args, "qreward_aborted", None)
    if callable(told):
        return bool(told())
    rollout, misc = sys.modules.get("slime.rollout.sglang_rollout"), sys.modules.get("slime.utils.misc")
    if rollout is None or misc is None:
        return False
    state = misc.SingletonMeta._instances.get(rollout.GenerateState)
    return bool(getattr(state, "aborted", False))


class Aborts:
    """Wakes the pending calls of every event loop when their rollout is aborted. It leaves nothing on a loop that has
    no pending call.
    """

    def __init__(self) -> None:
        self._watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()

    async def finished(self, args: Any, work: Future[T]) -> bool:
        """Wait until `work`, which runs in another thread, is done (True) or the rollout is aborted (False).

        Cancelling this call leaves `work` as it is.
        """
        loop = asyncio.get_running_loop()
        watch = self._watches.setdefault(loop, _Watch())
        arrived: asyncio.Future[bool] = loop.create_future()

        def tell(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(_resolve, arrived, True)

        work.add_done_callback(tell)
        with watch.watching(args, arrived):
            return await arrived


class _Watch:
    """The pending calls of one event loop, and the task that looks for them."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.Future[bool], Any] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self, args: Any, arrived: asyncio.Future[bool]) -> Iterator[None]:
        """Resolve `arrived` as False when the rollout of `args` is aborted while this context is open."""
        self._pending[arrived] = args
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look())
        try:
            yield
        finally:
            del self._pending[arrived]
            if not self._pending:
                self._task.cancel()
                self._task = None

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for arrived, args in list(self._pending.items()):
                if aborted(args):
                    _resolve(arrived, False)


def _resolve(arrived: asyncio.Future[bool], value: bool) -> None:
    if not arrived.done():
        arrived.set_result(value)
