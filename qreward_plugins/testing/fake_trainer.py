"""What the fake trainers of the three frameworks share: their event loop, held generations, and how they are closed."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .background_loop import BackgroundLoop
from .held import HeldGenerations

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
DraftT = TypeVar("DraftT")


class FakeTrainer(ABC, Generic[DraftT]):
    """The base of the fake trainers. `loop` and `driver` name the threads of the event loop and of started steps.
    `timeout_s` bounds what `_run` runs.

    Leaving the context closes it. Methods are for one thread, except `release` and `wait_until_held`.
    """

    def __init__(self, loop: str, driver: str, held: HeldGenerations[Any], timeout_s: float | None) -> None:
        self._driver = driver
        self._held = held
        self._timeout_s = timeout_s
        self._background: ThreadPoolExecutor | None = None
        self._loop = BackgroundLoop(loop, type(self).__name__)
        self._finalizer = weakref.finalize(self, self._loop.close)

    def release(self, which: Callable[[DraftT], bool] | None = None) -> int:
        """Release held generations for which `which` is true; return their number. From any thread or hook."""
        return self._held.release(which)

    def wait_until_held(self, count: int, timeout_s: float = 20.0) -> None:
        """Block until `count` generations are held; for tests that start a step. Raises `TimeoutError`."""
        self._held.wait_until(count, timeout_s)

    def close(self) -> None:
        """End what still runs, and stop the threads. May be called more than once."""
        try:
            if self._finalizer.alive:
                self._end()
        finally:
            self._finalizer()
            if self._background is not None:
                self._background.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        """End what the framework's own classes run, before the loop is closed."""

    def _in_background(self, step: Callable[..., T], *args: object) -> Future[T]:
        """Run a step in a thread of its own, for tests that act while it runs. Raises `RuntimeError` if closed."""
        if not self._finalizer.alive:
            raise RuntimeError(f"this {type(self).__name__} is closed")
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix=self._driver)
        return self._background.submit(step, *args)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(coroutine, self._timeout_s, self._waiting_for)

    @abstractmethod
    def _waiting_for(self) -> str:
        """The message after `timeout_s` seconds: what the framework would wait for."""
