"""The one background event loop on which slime awaits all rewards, of rollouts and of evaluations alike."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SlimeLoop:
    """A thread with an event loop, started when first needed."""

    def __init__(self) -> None:
        self._control = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None, waiting_for: Callable[[], str]) -> T:
        """Run it to its end and return its result, from any other thread.

        Raises what it raises; `TimeoutError` with the words of `waiting_for` if it takes longer than `timeout_s`
        seconds, and `RuntimeError` if the loop is closed. It is cancelled when the caller stops waiting.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        except BaseException:
            coroutine.close()
            raise
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            message = f"slime would wait for ever: after {timeout_s} s {waiting_for()}"
        finally:
            future.cancel()
        raise TimeoutError(message)

    def close(self) -> None:
        """Cancel what runs, stop the thread, close the loop. May be called more than once."""
        with self._control:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
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
        with self._control:
            if self._closed:
                raise RuntimeError("this FakeSlimeTrainer is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_forever, args=(self._loop,), name="fake-slime-rollout", daemon=True
                )
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
