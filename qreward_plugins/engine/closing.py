"""Closes the parts of an engine, each within a time limit."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping

from ..system.cancellation import abandon, cancel_all
from .binding import LoopBinding
from .reloader import Reloader
from .wiring import Wiring

_log = logging.getLogger("qreward_plugins.engine")

CLOSE_WITHIN_S = 10.0
"""Most seconds for closing the scheduler, and again for closing all sources together."""
END_WITHIN_S = 2.0
"""Most seconds to wait for a part that did not close in time and was cancelled."""


class Closing:
    """Closes scheduler, keeper connection, sources, observers and journal of one engine; see `RewardEngine.aclose`."""

    def __init__(self, wiring: Wiring, binding: LoopBinding, reloader: Reloader) -> None:
        self._wiring = wiring
        self._binding = binding
        self._reloader = reloader
        self.begun = False
        """Whether the engine takes no more samples."""
        self._task: asyncio.Task[None] | None = None
        self._closed: set[str] = set()
        """The parts that have closed."""
        self._ended = False

    async def aclose(self) -> None:
        """Close all parts. May be called again; a cancelled caller ends only its own wait."""
        self.begun = True
        loop = asyncio.get_running_loop()
        # After a fork, everything that is open belongs to the parent.
        while not self._ended and self._binding.pid == os.getpid():
            task = self._task
            if task is None or task.done() or task.get_loop() is not loop:
                task = self._task = loop.create_task(self._close())
            # A cancelled caller stops waiting here; the task goes on closing.
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
                return

    async def _close(self) -> None:
        loop, wiring, scoring = asyncio.get_running_loop(), self._wiring, self._binding.scoring
        wiring.source_starts.close()
        interrupted: asyncio.CancelledError | None = None
        steps: list[dict[str, Callable[[], Awaitable[None]]]] = []
        if scoring is not None and self._binding.loop is loop:
            steps.append({"the start probe": wiring.start_probe.aclose, **self._reloader.stops()})
            steps.append({"the scheduler": scoring.aclose})
            if wiring.membership is not None:
                steps.append({"the connection to the quota keeper": wiring.membership.aclose})
        if wiring.opened_channel is not None:
            steps.append({"the channel to the quota keeper": wiring.opened_channel.aclose})
        for step in steps:
            try:
                await self._close_all(step)
            except asyncio.CancelledError as cancelled:
                interrupted = cancelled
        # Attempts at sources that were removed have ended, and some of these may be closing by now.
        sources = {f"source {name}": upstream.source.aclose for name, upstream in wiring.upstreams.items()}
        try:
            await self._close_all({**sources, **self._reloader.left_open()})
        except asyncio.CancelledError as cancelled:
            interrupted = cancelled
        if interrupted is None:
            wiring.observers.close(loop.time())
        if wiring.journal is not None:
            try:
                await wiring.journal.aclose()
            except Exception:
                self._ended = interrupted is None
                raise
        if interrupted is not None:
            raise interrupted
        self._ended = True

    async def _close_all(self, parts: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        """Close those of `parts` that are still open, at the same time. A failure of one does not stop the others."""
        left = {what: aclose for what, aclose in parts.items() if what not in self._closed}
        tasks = {asyncio.ensure_future(_call(aclose)): what for what, aclose in left.items()}
        if not tasks:
            return
        try:
            await asyncio.wait(tasks, timeout=CLOSE_WITHIN_S)
        finally:
            # Also after a cancellation, so that parts that are closing have time to end.
            for task in await cancel_all(tasks, within_s=END_WITHIN_S):
                abandon(task)
                _log.warning("%s could not be closed within %g s, and is abandoned", tasks[task], CLOSE_WITHIN_S)
            for task, what in tasks.items():
                failed = task.exception() if task.done() and not task.cancelled() else None
                if failed is not None:
                    _log.warning("%s could not be closed", what, exc_info=failed)
                elif task.done() and not task.cancelled():
                    self._closed.add(what)


async def _call(aclose: Callable[[], Awaitable[None]]) -> None:
    # A task needs a coroutine. A foreign source may return another awaitable, or raise when called.
    await aclose()
