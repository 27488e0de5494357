"""Sync functions in threads, one new daemon thread for each call.

A thread cannot be killed. Were the calls to share a pool, one that hangs would take its thread away from the rest for
ever; so a call that is given up gives its slot back at once and goes on in a thread that nobody waits for. Being
daemons, such threads do not keep the process from ending, and there is a limit to how many are tolerated.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_log = logging.getLogger(__name__)

_MOST_ABANDONED = 256
"""Calls that may still run after they were given up, before no new call begins (at least as many as slots). A call that
only waits costs little more than its stack."""
_FAREWELL_S = 1.0


class TooManyAbandoned(Exception):
    """So many calls were given up and still go on that no more are started."""


class ThreadSlots:
    """Runs at most `slots` calls at once, not counting those given up. Serves one event loop at a time."""

    def __init__(self, name: str, slots: int) -> None:
        self._name = name
        self._slots = slots
        self._free = asyncio.Semaphore(slots)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._abandoned: set[_Call] = set()
        self._lock = threading.Lock()
        self._warned = False

    async def run(self, function: Callable[[], Any], *, on_start: Callable[[], None]) -> Any:
        """Call `function` in a thread of its own, and return what it returns or raise what it raises.

        Cancelling gives the slot back at once; the call goes on, and its result is dropped. Raises TooManyAbandoned.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._free = loop, asyncio.Semaphore(self._slots)
        async with self._free:
            if self.abandoned >= max(self._slots, _MOST_ABANDONED):
                raise TooManyAbandoned(f"{self.abandoned} calls that were given up still go on")
            done: asyncio.Future[Any] = loop.create_future()
            call = _Call(function, loop, done)
            thread = threading.Thread(target=self._run, args=(call,), name=f"qreward-{self._name}", daemon=True)
            on_start()
            thread.start()
            try:
                return await done
            except asyncio.CancelledError:
                self._abandon(call)
                raise

    @property
    def abandoned(self) -> int:
        """Calls that were given up and still go on."""
        with self._lock:
            return len(self._abandoned)

    async def aclose(self) -> None:
        """Wait a second for the calls that were given up, and then leave them to themselves."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _FAREWELL_S
        while self.abandoned and loop.time() < give_up_at:  # noqa: ASYNC110 - threads set no event of the loop's
            await asyncio.sleep(0.01)
        if self.abandoned:
            _log.warning("source %r is closed while %d of its calls still run in threads", self._name, self.abandoned)

    def _abandon(self, call: _Call) -> None:
        with self._lock:
            if not call.over:
                self._abandoned.add(call)
            count = len(self._abandoned)
        if count > self._slots and not self._warned:
            self._warned = True
            _log.warning(
                "source %r: %d calls that were given up still run in threads, which cannot be killed; "
                "mode: process kills calls that hang",
                self._name,
                count,
            )

    def _run(self, call: _Call) -> None:
        value, error = call.run()
        with self._lock:
            call.over = True
            self._abandoned.discard(call)
        call.report(value, error)


class _Call:
    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any]) -> None:
        self._function = function
        self._loop = loop
        self._done = done
        self._context = contextvars.copy_context()
        self.over = False

    def run(self) -> tuple[Any, BaseException | None]:
        try:
            return self._context.run(self._function), None
        except BaseException as error:
            return None, error

    def report(self, value: Any, error: BaseException | None) -> None:
        # The loop of a call that was given up may be closed by now.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self._done.done():
            return
        if error is None:
            self._done.set_result(value)
        else:
            # Wrapped, because a future takes no StopIteration, and SystemExit would end the event loop.
            self._done.set_exception(FunctionRaised(error))


class FunctionRaised(Exception):
    """Carries what a function raised out of its thread, as `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error
