"""The background event loop of a fake trainer, which runs what a real trainer runs in actors and schedulers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """A thread with an event loop, started on first use. It runs until it is closed, also between calls, because
    trainers sample ahead while they train.

    `name` is the name of the thread; `owner` names the closed object in errors.
    """

    def __init__(self, name: str, owner: str) -> None:
        self._name = name
        self._owner = owner
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop. Raises `RuntimeError` if it is closed."""
        with self._lock:
            return self._running()

    def run(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None, why: Callable[[], str] | None = None
    ) -> T:
        """Run it to its end and return its result; call this from another thread. If the caller stops waiting, it is
        cancelled.

        Raises its errors, `RuntimeError` if the loop is closed, and `TimeoutError` after `timeout_s` seconds, with the
        message that `why` returns.
        """
        try:
            # Under the lock, because a stopped loop would never run the coroutine.
            with self._lock:
                future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            # Before the cancellation, which changes what the message counts.
            message = why() if why is not None else f"no result within {timeout_s} s"
        finally:
            future.cancel()
        raise TimeoutError(message)

    def close(self) -> None:
        """Cancel what runs, stop the thread, close the loop. May be called more than once."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            self._closed = True
        if loop is None or thread is None:
            return
        if thread is threading.current_thread():  # a garbage collection may come at any time
            loop.stop()
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise RuntimeError(f"this {self._owner} is closed")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run_forever, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


async def _cancel_others() -> None:
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()
