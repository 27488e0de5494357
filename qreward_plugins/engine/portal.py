"""A synchronous interface to an engine, for code without an event loop, with many threads, or with short-lived loops.

The engine runs in its own thread and event loop (anyio's blocking portal), so that any number of threads and event
loops share its queue and its quotas. Calls block only the calling thread. `submit` and `submit_all` return futures,
which an event loop awaits with `asyncio.wrap_future`.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from anyio.from_thread import BlockingPortal, start_blocking_portal

from ..config import Config
from ..errors import EngineError
from ..journal import TrainingLog
from ..observers import EngineStatistics
from ..observers.batch_report import BatchReport
from ..observers.facts import Facts
from ..samples import Outcome, Sample
from ..scheduling.batches import Cutoff
from ..system.streams import drawn_in_threads

if TYPE_CHECKING:
    from .engine import RewardEngine


T = TypeVar("T")


class EnginePortal:
    """The methods of a `RewardEngine` as plain functions that any thread may call.

    They raise `EngineError` once the portal is closed, in the engine's own thread, which they would block, and in a
    forked child of the process that opened the portal.
    """

    def __init__(self, engine: RewardEngine, portal: BlockingPortal) -> None:
        self._engine = engine
        self._portal = portal
        self._pid = os.getpid()
        self._thread = portal.call(threading.current_thread)

    def score(self, sample: Sample, *, deadline_s: float | None = None, priority: int | None = None) -> Outcome:
        """Score a sample as `RewardEngine.score` does. Blocks the calling thread until the outcome."""
        return self.submit(sample, deadline_s=deadline_s, priority=priority).result()

    def score_all(
        self,
        samples: Iterable[Sample],
        *,
        deadline_s: float | None = None,
        priority: int | None = None,
        cutoff: Cutoff | None = None,
    ) -> list[Outcome]:
        """Score samples as `RewardEngine.score_all` does. Blocks the calling thread until the last outcome."""
        score_all = partial(self._engine.score_all, deadline_s=deadline_s, priority=priority, cutoff=cutoff)
        outcomes: list[Outcome] = self._call(score_all, list(samples))
        return outcomes

    def submit(
        self, sample: Sample, *, deadline_s: float | None = None, priority: int | None = None
    ) -> Future[Outcome]:
        """Score a sample as `RewardEngine.score` does, without waiting. Cancelling the future cancels the attempts."""
        score = partial(self._engine.score, sample, deadline_s=deadline_s, priority=priority)
        return self._start(score)

    def submit_all(
        self, samples: Iterable[Sample], *, deadline_s: float | None = None, priority: int | None = None
    ) -> Future[list[Outcome]]:
        """Score samples as `RewardEngine.score_all` does, without waiting. Cancelling the future cancels them."""
        score_all = partial(self._engine.score_all, list(samples), deadline_s=deadline_s, priority=priority)
        return self._start(score_all)

    def score_stream(self, samples: Iterable[Sample], *, window: int | None = None) -> Iterator[tuple[Sample, Outcome]]:
        """Score a stream as `RewardEngine.score_stream` does, as a plain iterator.

        Another thread draws the samples, so their iterator may block, even on an earlier outcome. If it blocks when the
        stream is closed, that thread runs on until the iterator returns.
        """
        stream = self._engine.score_stream(drawn_in_threads(samples), window=window)
        try:
            while (scored := self._call(_next, stream)) is not None:
                yield scored
        finally:
            if self._pid == os.getpid():
                with suppress(EngineError):  # a closed engine has ended the stream
                    self._call(stream.aclose)

    @overload
    def run(self, function: Callable[[RewardEngine], Coroutine[Any, Any, T]]) -> T: ...

    @overload
    def run(self, function: Callable[[RewardEngine], T]) -> T: ...

    def run(self, function: Callable[[RewardEngine], Any]) -> Any:
        """Call a function, plain or async, with the engine in the engine's event loop. Blocks the calling thread.

        So every method of the engine can be called: `portal.run(lambda engine: engine.sleep("judge"))`. If the calling
        thread is interrupted (Ctrl-C), the function is cancelled. Raises `TypeError` for an asynchronous generator.
        """
        future: Future[Any] = self._start(function, self._engine)
        try:
            result = future.result()
        except BaseException:
            future.cancel()
            raise
        if inspect.isasyncgen(result):
            raise TypeError("portal.run takes a function that returns one value, not an asynchronous generator")
        return result

    @property
    def config(self) -> Config:
        """The engine's configuration."""
        return self._engine.config

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the engine's thread, and await what it returns."""
        return self._start(function, *args).result()

    def _start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._pid != os.getpid():  # a forked child lacks the engine's thread
            raise EngineError(
                "this portal was opened before a fork; open one in this process (process_portal, RewardEngine.portal)"
            )
        if threading.current_thread() is self._thread:
            raise EngineError("the engine's own thread cannot wait for itself; await the methods of the engine")
        try:
            return self._portal.start_task_soon(function, *args)
        except RuntimeError:
            raise EngineError(
                "this portal is closed: its `with` block has ended, or what RewardEngine.portal() returned was entered "
                "by hand and then garbage collected; keep it, or use process_portal"
            ) from None

    @property
    def colocated(self) -> tuple[str, ...]:
        """What `RewardEngine.colocated` is."""
        return self._engine.colocated

    def begin_rewards(self) -> Future[None]:
        """Wake servers as `RewardEngine.begin_rewards` does, without waiting."""
        return self._start(self._engine.begin_rewards)

    def end_rewards(self) -> None:
        """Put servers to sleep as `RewardEngine.end_rewards` does. Blocks the calling thread."""
        self._call(self._engine.end_rewards)

    def facts(self) -> Facts:
        """Return what `RewardEngine.facts` returns."""
        return self._engine.facts()

    def training_log(self) -> TrainingLog | None:
        """Return what `RewardEngine.training_log` returns."""
        return self._engine.training_log()

    def last_batch(self) -> BatchReport | None:
        """Return what `RewardEngine.last_batch` returns."""
        report: BatchReport | None = self._call(self._engine.last_batch)
        return report

    def statistics(self) -> EngineStatistics:
        """Return what `RewardEngine.statistics` returns."""
        statistics: EngineStatistics = self._call(self._engine.statistics)
        return statistics


async def _next(stream: AsyncGenerator[tuple[Sample, Outcome], None]) -> tuple[Sample, Outcome] | None:
    return await anext(stream, None)


@contextmanager
def open_portal(engine: RewardEngine) -> Iterator[EnginePortal]:
    """Run `engine` in its own thread. Leaving the context closes it, except in a child that was forked meanwhile."""
    pid = os.getpid()
    with ExitStack() as stack:
        blocking = stack.enter_context(start_blocking_portal("asyncio"))
        portal = EnginePortal(engine, blocking)
        stack.callback(blocking.call, engine.aclose)
        try:
            yield portal
        finally:
            if os.getpid() != pid:
                OF_PARENTS.append(stack.pop_all())


OF_PARENTS: list[ExitStack] = []
"""Portals of a parent process. A forked child can neither close them nor drop them, because garbage collection would
close them."""
