"""The event loop in which sync functions are served: one thread for all of them, started by the first call.

So any number of threads and event loops share the limits of a function. The thread ends with the interpreter, and so
do worker processes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import EngineError
from .calls import FunctionCalls

T = TypeVar("T")


class LoopThread:
    """The thread of this process. A child that is forked after its start has none, and cannot call the functions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    def submit(self, calls: FunctionCalls, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine for `calls`, with the context variables of the caller. Cancelling the future cancels it."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._running(calls))
        except BaseException:
            work.close()
            raise

    def run(self, calls: FunctionCalls, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine for `calls`, and block the calling thread until it ends. An exception here (Ctrl-C) cancels
        it. Raises `EngineError` in the thread of the loop itself, which it would block for ever.
        """
        if self._loop is not None and asyncio._get_running_loop() is self._loop:
            work.close()
            raise EngineError(f"{calls.name} was called by a key or an observer, in the thread that serves it")
        future = self.submit(calls, work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, calls: FunctionCalls, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield the items of an asynchronous generator. Waiting for one blocks the calling thread."""
        try:
            while found := self.run(calls, _next(items)):
                yield found[0]
        finally:
            # At the end of the interpreter, the thread stands still; after a fork, it is the parent's.
            if not sys.is_finalizing() and self._pid == os.getpid():
                self.run(calls, items.aclose())

    def _running(self, calls: FunctionCalls) -> asyncio.AbstractEventLoop:
        if self._loop is not None and self._pid != os.getpid():
            raise EngineError(
                f"{calls.name} cannot be called here: this process was forked after the first call of an accelerated "
                'function; start processes with "spawn", or make the first call in the child'
            )
        with self._lock:
            if self._loop is None:
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name="accelerate", daemon=True).start()
        return self._loop


async def _next(items: AsyncGenerator[T, None]) -> tuple[T, ...]:
    async for item in items:
        return (item,)
    return ()


loop_thread = LoopThread()
