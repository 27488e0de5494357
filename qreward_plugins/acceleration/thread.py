"""The event loop in which sync functions are served: one thread for all of them, started by the first call.

So any number of threads and event loops share the limits of a function. The thread ends with the interpreter.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ..errors import EngineError
from .calls import FunctionCalls

T = TypeVar("T")

CLOSE_WITHIN_S = 5.0
"""Most seconds for ending all calls at the end of the interpreter."""


class LoopThread:
    """The thread of this process. A child that is forked after its start has none, and cannot call the functions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resources = ExitStack()
        self._portal: BlockingPortal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._served: weakref.WeakSet[FunctionCalls] = weakref.WeakSet()
        self._open: set[AsyncGenerator[Any, None]] = set()
        self._ended = False
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
        it. Raises `EngineError` in this thread itself, which it would block for ever.
        """
        if self._loop is not None and asyncio._get_running_loop() is self._loop:
            work.close()
            raise EngineError(
                f"{calls.name} was called in the thread that serves it (by a key, size or observer), and would block it"
            )
        future = self.submit(calls, work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, calls: FunctionCalls, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield the items of an asynchronous generator. Waiting for one blocks the calling thread."""
        self._open.add(items)
        try:
            while found := self.run(calls, _next(items)):
                yield found[0]
        finally:
            # At the end of the interpreter, `_close` has closed it; after a fork, it is the parent's.
            if items in self._open and self._pid == os.getpid():
                self._open.discard(items)
                self.run(calls, items.aclose())

    def _running(self, calls: FunctionCalls) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            with self._lock:
                if self._ended:
                    raise EngineError(f"{calls.name} was called while the interpreter ends")
                if self._loop is None:
                    self._portal = self._resources.enter_context(start_blocking_portal("asyncio"))
                    self._loop, self._pid = self._portal.call(asyncio.get_running_loop), os.getpid()
                    atexit.register(self._close)
        if self._pid != os.getpid():
            raise EngineError(
                f"{calls.name} cannot be called here: this process was forked after the first call of an accelerated "
                'function; start processes with "spawn", or make the first call in the child'
            )
        self._served.add(calls)
        return self._loop

    def _close(self) -> None:
        with self._lock:
            self._ended = True
            if self._portal is not None and self._pid == os.getpid():
                served = [calls for calls in self._served if not calls.closed]
                try:
                    self._portal.call(_close_all, served, self._open)
                finally:
                    self._portal = self._loop = None
                    self._resources.close()


async def _next(items: AsyncGenerator[T, None]) -> tuple[T, ...]:
    async for item in items:
        return (item,)
    return ()


async def _close_all(served: list[FunctionCalls], generators: set[AsyncGenerator[Any, None]]) -> None:
    while generators:
        with contextlib.suppress(Exception):
            with anyio.fail_after(CLOSE_WITHIN_S):
                await generators.pop().aclose()
    closing = [asyncio.ensure_future(calls.aclose()) for calls in served]
    if closing:
        await asyncio.wait(closing, timeout=CLOSE_WITHIN_S)


loop_thread = LoopThread()
