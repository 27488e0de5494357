"""Detects that slime has aborted a rollout, so that rewards nobody needs any more do not delay the step.

When its batch is full, slime sets `GenerateState.aborted` and then waits for every pending reward
(slime/rollout/sglang_rollout.py, `abort`). It does not notify the reward function. So one task in each event loop polls
that flag for all pending calls. A custom rollout function or trainer may provide a callable `args.qreward_aborted`
instead.
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
"""Seconds between two reads of slime's flag."""

T = TypeVar("T")


def aborted(args: Any) -> bool:
    """Whether the rollout that `args` belongs to has been aborted."""
    custom: Callable[[], bool] | None = getattr(args, "qreward_aborted", None)
    if callable(custom):
        return bool(custom())
    rollout, misc = sys.modules.get("slime.rollout.sglang_rollout"), sys.modules.get("slime.utils.misc")
    if rollout is None or misc is None:
        return False
    state = misc.SingletonMeta._instances.get(rollout.GenerateState)
    return bool(getattr(state, "aborted", False))


class Aborts:
    """Wakes the pending calls of every event loop when their rollout is aborted. A loop without pending calls has no
    task of it.
    """

    def __init__(self) -> None:
        self._pollers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Poller] = WeakKeyDictionary()

    async def finished(self, args: Any, work: Future[T]) -> bool:
        """Wait until `work`, which runs in another thread, is done (True) or the rollout is aborted (False).

        Cancelling this call does not cancel `work`.
        """
        loop = asyncio.get_running_loop()
        poller = self._pollers.setdefault(loop, _Poller())
        finished: asyncio.Future[bool] = loop.create_future()

        def resolve(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(_resolve, finished, True)

        work.add_done_callback(resolve)
        with poller.watching(args, finished):
            return await finished


class _Poller:
    """The pending calls of one event loop, and the task that polls for them."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.Future[bool], Any] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self, args: Any, finished: asyncio.Future[bool]) -> Iterator[None]:
        """Set `finished` to False if the rollout of `args` is aborted while this context is open."""
        self._pending[finished] = args
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll())
        try:
            yield
        finally:
            del self._pending[finished]
            if not self._pending:
                self._task.cancel()
                self._task = None

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for finished, args in list(self._pending.items()):
                if aborted(args):
                    _resolve(finished, False)


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
