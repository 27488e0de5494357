"""Scores a stream of samples in constant memory, and yields the outcomes in order."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from anyio import to_thread

from .threads import cancel_all

S = TypeVar("S")
R = TypeVar("R")

END_WITHIN_S = 5.0
"""Longest time in seconds that closing waits for a producer of samples that ignores its cancellation."""
MOST_HELD = 2048
"""Samples that a stream holds behind one that takes long: it must not keep the sources from those."""


class End(enum.Enum):
    """Marks the end of the samples.

    None cannot mark it, because a broken stream may yield None as a sample. Compare with `is`, because a broken sample
    may raise in `==` or `isinstance`.
    """

    OF_SAMPLES = enum.auto()


class Stream(Generic[S, R]):
    """Scores `samples` with `score`, at most `window` of them at once. Items and results may be of any type.

    Outcomes come in order. While the first one is missing, those behind it are held: at most `held` samples, or
    `window` if that is more. A slow consumer is waited for.

    A task of its own draws the samples, so a producer may wait for the outcome of one sample before it makes the next.
    """

    def __init__(
        self,
        samples: Iterable[S] | AsyncIterable[S],
        score: Callable[[S], Coroutine[Any, Any, R]],
        window: int,
        *,
        held: int = MOST_HELD,
    ) -> None:
        self._samples = samples
        self._score = score
        self._window = window
        self._most_held = max(window, held)
        self._held: deque[tuple[S, asyncio.Task[R]]] = deque()
        self._under_way = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    async def outcomes(self) -> AsyncGenerator[tuple[S, R], None]:
        """Yield each sample with its outcome, in order. Closing the generator cancels what is in flight.

        Raises the exceptions of the producer of the samples.
        """
        held = self._held
        feeder = asyncio.ensure_future(self._feed())
        feeder.add_done_callback(self._note)
        try:
            while True:
                self._changed.clear()
                if held and held[0][1].done():
                    sample, outcome = held[0]
                    yield sample, outcome.result()
                    held.popleft()
                    self._room.set()
                elif feeder.done() and (not held or feeder.cancelled() or feeder.exception() is not None):
                    feeder.result()
                    return
                else:
                    await self._changed.wait()
        finally:
            tasks = [feeder, *(task for _, task in held)]
            await cancel_all(tasks, within_s=END_WITHIN_S)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.exception()  # marks it as retrieved, so that asyncio does not log it after another exception

    async def _feed(self) -> None:
        samples = _aiter(self._samples)
        try:
            while True:
                while self._under_way >= self._window or len(self._held) >= self._most():
                    self._room.clear()
                    await self._room.wait()
                sample = await anext(samples, End.OF_SAMPLES)
                if sample is End.OF_SAMPLES:
                    return
                scoring = asyncio.ensure_future(self._score(sample))
                self._under_way += 1
                scoring.add_done_callback(self._scored)
                self._held.append((sample, scoring))
        finally:
            await samples.aclose()

    def _most(self) -> int:
        """The number of samples that it may hold now."""
        return self._window if not self._held or self._held[0][1].done() else self._most_held

    def _scored(self, task: asyncio.Future[Any]) -> None:
        self._under_way -= 1
        self._room.set()
        self._note(task)

    def _note(self, _: asyncio.Future[Any]) -> None:
        self._changed.set()


async def _aiter(samples: Iterable[S] | AsyncIterable[S]) -> AsyncGenerator[S, None]:
    if isinstance(samples, AsyncIterable):
        async for sample in samples:
            yield sample
    else:
        for sample in samples:
            yield sample
            # A plain iterable never awaits, so without this it would block the event loop.
            await asyncio.sleep(0)


async def drawn_in_threads(items: Iterable[S]) -> AsyncIterator[S]:
    """Yield the items, each drawn in a thread, because waiting for one must not block the thread of the event loop."""
    iterator = iter(items)
    end = End.OF_SAMPLES
    while (item := await to_thread.run_sync(next, iterator, end, abandon_on_cancel=True)) is not end:
        yield item
