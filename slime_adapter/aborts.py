"""Detects that slime has aborted a rollout, so that rewards nobody needs any more do not delay the step.

When its batch is full, slime sets `GenerateState.aborted` and then waits for every pending reward
(slime/rollout/sglang_rollout.py, `abort`). It does not notify the reward function. So one timer in each event loop
polls that flag for all pending calls. A custom rollout function or trainer may provide a callable
`args.qreward_aborted` instead.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

POLL_S = 0.1
"""Seconds between two reads of slime's flag."""


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


async def finished(args: Any, work: Future[Any]) -> bool:
    """Wait until `work`, which runs in another thread, is done (True) or the rollout is aborted (False).

    Cancelling this call does not cancel `work`.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[bool] = loop.create_future()

    def resolve(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(_resolve, result, True)

    work.add_done_callback(resolve)
    if loop not in _pending:
        _pending[loop] = {}
        loop.call_soon(_poll, loop)
    _pending[loop][result] = args
    try:
        return await result
    finally:
        del _pending[loop][result]


_pending: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[asyncio.Future[bool], Any]] = WeakKeyDictionary()
"""The pending calls of each event loop that polls, with slime's arguments."""


def _poll(loop: asyncio.AbstractEventLoop) -> None:
    """Look at the flag for all pending calls, again and again until there is none."""
    for result, args in _pending[loop].items():
        if aborted(args):
            _resolve(result, False)
    if _pending[loop]:
        loop.call_later(POLL_S, _poll, loop)
    else:
        del _pending[loop]


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
