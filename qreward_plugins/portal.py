"""The sync facade of an engine: for code that has no event loop, or several threads.

The engine runs in one thread with a loop of its own (anyio's blocking portal), so that any number of threads share its
queue and its quotas. Calls block their thread only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from anyio.from_thread import BlockingPortal, start_blocking_portal

from .samples import Outcome, Sample
from .scheduling import Cutoff
from .telemetry import BatchReport, EngineStatistics

if TYPE_CHECKING:
    from .engine import RewardEngine


class EnginePortal:
    """What a `RewardEngine` does, as plain functions that any thread may call."""

    def __init__(self, engine: RewardEngine, portal: BlockingPortal) -> None:
        self._engine = engine
        self._portal = portal

    def score(self, sample: Sample, *, deadline_s: float | None = None, priority: int = 0) -> Outcome:
        """As `RewardEngine.score`; blocks the calling thread until the outcome is there."""
        return self._portal.call(partial(self._engine.score, sample, deadline_s=deadline_s, priority=priority))

    def score_all(
        self,
        samples: Iterable[Sample],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        cutoff: Cutoff | None = None,
    ) -> list[Outcome]:
        """As `RewardEngine.score_all`."""
        score_all = partial(self._engine.score_all, deadline_s=deadline_s, priority=priority, cutoff=cutoff)
        return self._portal.call(score_all, list(samples))

    def score_stream(self, samples: Iterable[Sample], *, window: int | None = None) -> Iterator[tuple[Sample, Outcome]]:
        """As `RewardEngine.score_stream`. The samples are drawn in the engine's thread: keep their iterator quick."""
        stream = self._engine.score_stream(samples, window=window)
        try:
            while (scored := self._portal.call(_next, stream)) is not None:
                yield scored
        finally:
            self._portal.call(_close, stream)

    def last_batch(self) -> BatchReport | None:
        """As `RewardEngine.last_batch`."""
        return self._portal.call(self._engine.last_batch)

    def statistics(self) -> EngineStatistics:
        """As `RewardEngine.statistics`."""
        return self._portal.call(self._engine.statistics)


async def _next(stream: AsyncGenerator[tuple[Sample, Outcome], None]) -> tuple[Sample, Outcome] | None:
    return await anext(stream, None)


async def _close(stream: AsyncGenerator[tuple[Sample, Outcome], None]) -> None:
    await stream.aclose()


@contextmanager
def open_portal(engine: RewardEngine) -> Iterator[EnginePortal]:
    """Run `engine` in a thread of its own; leaving the context closes it."""
    with start_blocking_portal("asyncio") as portal:
        try:
            yield EnginePortal(engine, portal)
        finally:
            portal.call(engine.aclose)
