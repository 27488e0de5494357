"""The background event loop of a fake trainer: what lives in actors and schedulers there lives on it here."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """A thread with an event loop. It runs until it is closed, as sampling ahead goes on while a trainer trains.

    `name` is that of the thread, `owner` who is closed with it.
    """

    def __init__(self, name: str, owner: str) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    def run(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None, why: Callable[[], str] | None = None
    ) -> T:
        """Run it to its end and return its result, from any other thread. If the caller stops waiting, it is cancelled.

        Raises what it raises, `RuntimeError` if the loop is closed, and `TimeoutError` with the words of `why` after
        `timeout_s` seconds.
        """
        if self._closed:
            coroutine.close()
            raise RuntimeError(f"this {self._owner} is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
        finally:
            future.cancel()
        raise TimeoutError(why() if why is not None else f"nothing came for {timeout_s} s")

    def close(self) -> None:
        """Cancel what runs, stop the thread, close the loop. May be called more than once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread is threading.current_thread():  # a garbage collection may come at any time
            self.loop.stop()
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


async def _cancel_others() -> None:
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()
