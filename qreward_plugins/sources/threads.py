"""Runs sync functions in threads, one new daemon thread for each call.

A thread cannot be killed, so in a pool a call that hangs would occupy a thread for ever. Here an abandoned call frees
its slot at once, and its thread goes on in the background. The threads are daemons, so they do not keep the process
alive. The number of abandoned calls is limited.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any

from ..system.threads import in_thread

_log = logging.getLogger(__name__)

_MOST_ABANDONED = 256
"""No new call starts while this many abandoned calls (or `slots`, if that is more) still run. A call that only waits
costs little more than its stack."""
_CLOSE_WITHIN_S = 1.0


class TooManyAbandoned(Exception):
    """Too many abandoned calls still run, so no new one starts."""


class ThreadSlots:
    """Runs at most `slots` calls at once, without the abandoned ones. Serves one event loop at a time."""

    def __init__(self, name: str, slots: int) -> None:
        self._name = name
        self._slots = slots
        self._free = asyncio.Semaphore(slots)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._abandoned: set[threading.Event] = set()
        """By abandoned call: an event that its end sets."""
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], Any], *, on_start: Callable[[], None]) -> Any:
        """Call `function` in a thread of its own, and return its value.

        Cancelling frees the slot at once; the call goes on, and its result is dropped. Raises FunctionRaised with the
        function's exception, and TooManyAbandoned.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._free = loop, asyncio.Semaphore(self._slots)
        async with self._free:
            if self.abandoned >= max(self._slots, _MOST_ABANDONED):
                raise TooManyAbandoned(f"{self.abandoned} abandoned calls still run")
            over, context = threading.Event(), contextvars.copy_context()

            def run() -> tuple[Any, BaseException | None]:
                try:
                    return context.run(function), None
                except BaseException as error:
                    return None, error
                finally:
                    with self._lock:
                        over.set()
                        self._abandoned.discard(over)

            on_start()
            try:
                value, error = await in_thread(run)
            except asyncio.CancelledError:
                self._abandon(over)
                raise
        if error is not None:
            # Wrapped: a coroutine cannot raise StopIteration, and SystemExit would stop the event loop.
            raise FunctionRaised(error)
        return value

    @property
    def abandoned(self) -> int:
        """Number of abandoned calls that still run."""
        with self._lock:
            return len(self._abandoned)

    async def aclose(self) -> None:
        """Wait up to one second for the abandoned calls to end."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _CLOSE_WITHIN_S
        while self.abandoned and loop.time() < give_up_at:  # noqa: ASYNC110 - threads set no asyncio.Event
            await asyncio.sleep(0.01)
        if self.abandoned:
            _log.warning("source %r is closed while %d of its calls still run in threads", self._name, self.abandoned)

    def _abandon(self, over: threading.Event) -> None:
        with self._lock:
            if not over.is_set():
                self._abandoned.add(over)


class FunctionRaised(Exception):
    """The function raised `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error
