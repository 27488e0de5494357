"""`RewardEngine`: the one front door. Samples go in, outcomes come out, whatever happens behind it.

The engine joins the rooms (routes, judges, journal, scheduling, sources) and adds no rule of its own. Everything that
belongs to an event loop is made when the first call comes, in the loop of that call, and is dropped when that loop is
found closed; quotas and what was learned of the sources live on, because the provider does not forget either.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from .config import Config, Limits, judge_for, load_config, sources_of
from .errors import EngineError
from .journal import Journal, sample_key
from .judges import Judge, build_judge
from .samples import Cause, Failed, Outcome, Sample, Scored, Verdict
from .scheduling import Batch, Cutoff, Dispatcher, Lane, open_lanes
from .sources import Source
from .telemetry import BatchReport, EngineCounters, EngineStatistics, Facts

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from .portal import EnginePortal

_log = logging.getLogger("qreward_plugins.engine")


class RewardEngine:
    """Scores samples over the sources of one configuration.

    Args:
        config: what `load_config` takes: a path to a YAML file, the same tree as a mapping or DictConfig, or a
        `Config`. processes: how many processes share the sources' limits; this engine keeps to an equal part of each.
        sources: opened sources by name, which take the place of those that the configuration would open.

    Raises `ConfigurationError` with every mistake of the configuration.

    Use it as an async context manager, or call `aclose`. It serves one event loop at a time: the one that calls it
    first, and after that one is closed the next that calls. Sync code uses `portal`.
    """

    def __init__(
        self,
        config: str | PathLike[str] | Mapping[str, Any] | DictConfig | Config,
        *,
        processes: int = 1,
        sources: Mapping[str, Source] | None = None,
    ) -> None:
        self.config = load_config(config)
        settings = self.config.engine
        self._lanes = open_lanes(self.config, sources or {}, processes=processes)
        self._rng = random.Random(settings.seed)
        key = secrets.token_bytes(32) if settings.seed is None else hashlib.sha256(str(settings.seed).encode()).digest()
        self._judges: dict[str, Judge] = {}
        for name, judge in self.config.judges.items():
            names = sources_of(self.config, name)
            models = [self._lanes[source].source.model for source in names]
            self._judges[name] = build_judge(name, judge, sources=names, models=models, key=key)
        self._journal = Journal(settings.journal.path) if settings.journal else None
        self._reuse = bool(settings.journal and settings.journal.reuse)
        self._counters = EngineCounters()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatcher: Dispatcher | None = None
        self._closed = False

    async def score(self, sample: Sample, *, deadline_s: float | None = None, priority: int = 0) -> Outcome:
        """Score one sample.

        Returns its outcome within `deadline_s` seconds (default: `engine.deadline_s` of the configuration), and raises
        nothing on account of the sample. Samples of a higher `priority` go first. Cancelling the call cancels its
        attempts and gives back what they held. Raises `EngineError` when the engine is closed or serves another event
        loop.
        """
        dispatcher = self._bind()
        if self._journal is None:
            return await self._submit(sample, dispatcher.batches.trickle(priority), deadline_s)
        due_at = dispatcher.now() + self._deadline_s(deadline_s)
        record = await self._recorded(self._journal, sample, due_at)
        return await self._score_with(self._journal, sample, record, dispatcher.batches.trickle(priority), due_at)

    def _submit(self, sample: Sample, batch: Batch, deadline_s: float | None) -> asyncio.Future[Outcome]:
        """Hand a sample to the scheduler, and count its outcome when it comes."""
        dispatcher = self._bind()
        self._counters.submitted += 1
        judge = self._judge_of(sample)
        if judge is None:
            outcome = self._count(sample, _no_route(sample))
            dispatcher.batches.settled(batch, sample, outcome)
            return _done(outcome)
        future = dispatcher.submit(sample, judge, deadline_s=self._deadline_s(deadline_s), batch=batch)
        future.add_done_callback(lambda done: None if done.cancelled() else self._count(sample, done.result()))
        return future

    async def _recorded(self, journal: Journal, sample: Sample, due_at: float) -> _Record:
        """What the journal knows of a sample; what a slow disk does not tell by `due_at` is not known."""
        judge = self._judge_of(sample)
        key = sample_key(sample, judge.fingerprint) if judge is not None else None
        verdict = None
        if key is not None and self._reuse:
            with anyio.move_on_after(max(0.0, due_at - self._bind().now())):
                verdict = await journal.get(key)
        return _Record(key, verdict)

    async def _score_with(
        self, journal: Journal, sample: Sample, record: _Record, batch: Batch, due_at: float
    ) -> Outcome:
        """Score a sample unless its verdict is on record, and record the outcome."""
        dispatcher = self._bind()
        if record.verdict is not None:
            self._counters.submitted += 1
            outcome = self._count(sample, Scored(record.verdict))
            dispatcher.batches.settled(batch, sample, outcome)
            return outcome
        outcome = await self._submit(sample, batch, max(0.0, due_at - dispatcher.now()))
        if record.key is not None:
            # The entry is in before `put` waits; what it waits for is a slow disk, and the deadline does not.
            with anyio.move_on_after(max(0.0, due_at - dispatcher.now())):
                await journal.put(record.key, sample, outcome)
        return outcome

    def _judge_of(self, sample: Sample) -> Judge | None:
        name = judge_for(self.config, sample.data_source)
        return None if name is None else self._judges[name]

    def _deadline_s(self, deadline_s: float | None) -> float:
        return self.config.engine.deadline_s if deadline_s is None else deadline_s

    async def score_all(
        self,
        samples: Iterable[Sample],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        cutoff: Cutoff | None = None,
    ) -> list[Outcome]:
        """Score a batch; outcome i belongs to sample i.

        The whole batch is handed in at once, so that the scheduler can order it; every sample's deadline runs from then
        on. Of two batches under way, the one of higher `priority` goes first, and then the one that came first: that
        ends both earlier than mixing them does. `cutoff`: when to stop waiting for the last samples.
        """
        batch = list(samples)
        self._warn_if_too_many(batch, deadline_s)
        dispatcher = self._bind()
        due_at = dispatcher.now() + self._deadline_s(deadline_s)
        together = dispatcher.batches.new(batch, priority=priority, cutoff=cutoff)
        scoring: list[asyncio.Future[Outcome]] = []
        try:
            if self._journal is None:
                scoring += (self._submit(sample, together, deadline_s) for sample in batch)
            else:
                # All of the journal first: what is left of the batch is ordered as a whole.
                journal = self._journal
                records = await asyncio.gather(*(self._recorded(journal, sample, due_at) for sample in batch))
                scoring += (
                    asyncio.ensure_future(self._score_with(journal, sample, record, together, due_at))
                    for sample, record in zip(batch, records, strict=True)
                )
            return [await future for future in scoring]
        except BaseException:
            await _cancel(scoring)
            raise
        finally:
            dispatcher.batches.seal(together)

    async def score_stream(
        self, samples: Iterable[Sample] | AsyncIterable[Sample], *, window: int | None = None
    ) -> AsyncGenerator[tuple[Sample, Outcome], None]:
        """Score any number of samples in constant memory; yields each sample with its outcome, in order.

        At most `window` samples are held at once, handed in or waiting to be yielded (default: enough to keep all
        sources busy). A sample's deadline runs from when it is handed in. Closing the generator cancels what is under
        way.
        """
        window = window or self._stream_window()
        pending: deque[tuple[Sample, asyncio.Future[Outcome]]] = deque()
        try:
            async for sample in _aiter(samples):
                pending.append((sample, asyncio.ensure_future(self.score(sample))))
                while len(pending) >= window or (pending and pending[0][1].done()):
                    first, outcome = pending[0]
                    yield first, await outcome
                    pending.popleft()
            while pending:
                first, outcome = pending[0]
                yield first, await outcome
                pending.popleft()
        finally:
            await _cancel([task for _, task in pending])

    @property
    def judges(self) -> Mapping[str, Judge]:
        """The judges by name."""
        return self._judges

    @property
    def lanes(self) -> Mapping[str, Lane]:
        """The sources by name, with their quotas and what was learned of them."""
        return self._lanes

    def retune(self, source: str, limits: Limits) -> None:
        """Change what a source allows while the engine runs, for whoever is told by the provider; what was spent stays
        spent. Call it from the engine's event loop.

        Raises `EngineError` for a source that there is not, and `ConfigurationError`, changing nothing, for limits that
        the processes cannot share.
        """
        if source not in self._lanes:
            raise EngineError(f"there is no source {source!r}; there are {', '.join(self._lanes)}")
        dispatcher = self._bind()
        self._lanes[source].quota.retune(limits, dispatcher.now())
        dispatcher.look_again()

    def last_batch(self) -> BatchReport | None:
        """The batch that ended last and what it waited for; None: none has ended yet.

        Samples that are scored one by one belong to one batch for as long as any of them is under way.
        """
        return self._dispatcher.batches.last if self._dispatcher is not None else None

    def statistics(self) -> EngineStatistics:
        """A snapshot of what happened so far. Call it from the engine's event loop, or through the portal."""
        counters = self._counters
        now = self._dispatcher.now() if self._dispatcher else 0.0
        return EngineStatistics(
            submitted=counters.submitted,
            scored=counters.scored,
            failed=dict(counters.failed),
            cached=counters.cached,
            attempts=counters.attempts,
            waiting=self._dispatcher.waiting if self._dispatcher else 0,
            sources={name: lane.statistics(now) for name, lane in self._lanes.items()},
        )

    def facts(self) -> Facts:
        """What turns this engine's outcomes into mappings whose keys are the same for every sample."""
        return Facts(
            (name for judge in self._judges.values() for name in judge.component_names()),
            defines_correct=any(judge.correct_at is not None for judge in self.config.judges.values()),
        )

    def portal(self) -> AbstractContextManager[EnginePortal]:
        """A context manager that runs the engine in a thread of its own and gives a sync, thread-safe facade of it."""
        from .portal import open_portal

        return open_portal(self)

    async def aclose(self) -> None:
        """Fail what is still waiting (`infra/closed`), end every attempt, and close sources and journal. Idempotent.

        Raises `JournalError` when verdicts could not be written; everything is closed then, too.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._dispatcher is not None and self._loop is asyncio.get_running_loop():
                await self._dispatcher.aclose()
            for lane in self._lanes.values():
                await lane.source.aclose()
        finally:
            if self._journal is not None:
                await self._journal.aclose()

    async def __aenter__(self) -> RewardEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _bind(self) -> Dispatcher:
        """The dispatcher of the running event loop."""
        if self._closed:
            raise EngineError("this RewardEngine is closed; make a new one")
        loop = asyncio.get_running_loop()
        if self._dispatcher is not None and self._loop is loop:
            return self._dispatcher
        if self._loop is not None and not self._loop.is_closed():
            raise EngineError(
                "this RewardEngine serves another event loop that is still open; "
                "make one engine per loop, or share one through RewardEngine.portal()"
            )
        for lane in self._lanes.values():
            lane.abandon_attempts(loop.time())
        self._loop = loop
        self._dispatcher = Dispatcher(
            self._lanes,
            rng=self._rng,
            max_attempts=self.config.engine.max_attempts,
            settings=self.config.engine.scheduling,
            on_late=self._late if self._journal is not None else None,
        )
        return self._dispatcher

    def _late(self, sample: Sample, judge: Judge, verdict: Verdict) -> None:
        """Record a verdict that came after its sample's outcome: it is paid for, and may be asked for again."""
        if self._journal is not None:
            self._journal.note(sample_key(sample, judge.fingerprint), sample, Scored(verdict))

    def _count(self, sample: Sample, outcome: Outcome) -> Outcome:
        self._counters.count(outcome)
        if isinstance(outcome, Failed):
            total = sum(self._counters.failed.values())
            # One line for the 1st, 2nd, 4th, 8th ... failure: a dead judge must be seen, and must not fill the disk.
            if total & (total - 1) == 0:
                name = (
                    f"{sample.id or 'sample'} ({sample.data_source})" if sample.data_source else sample.id or "sample"
                )
                _log.warning("%s: %s (failure no. %d)", name, outcome.describe(), total)
        return outcome

    def _rate_per_s(self, names: Sequence[str]) -> float:
        """Requests per second that the declared limits of these sources allow in this process; infinity: no limit."""
        return sum(self._lanes[name].quota.rate_per_s for name in names)

    def _warn_if_too_many(self, batch: Sequence[Sample], deadline_s: float | None) -> None:
        deadline_s = self.config.engine.deadline_s if deadline_s is None else deadline_s
        rate = self._rate_per_s(list(self._lanes))
        if len(batch) > rate * deadline_s + sum(lane.quota.burst for lane in self._lanes.values()):
            _log.warning(
                "%d samples take about %.0f s at the %.0f requests/min that the sources allow; the deadline is %.0f s: "
                "samples will fail. Raise engine.deadline_s, or add sources.",
                len(batch),
                len(batch) / rate,
                60 * rate,
                deadline_s,
            )

    def _stream_window(self) -> int:
        """Enough samples to keep every source busy, and no more than half a deadline's worth of what the limits
        allow.
        """
        busy = 4 * sum(lane.quota.concurrency for lane in self._lanes.values())
        allowed = self._rate_per_s(list(self._lanes)) * self.config.engine.deadline_s / 2
        return max(1, int(min(busy, allowed)))


class _Record(NamedTuple):
    """What the journal knows of a sample: its key (None: it has none), and its verdict (None: none is on record)."""

    key: str | None
    verdict: Verdict | None


def _no_route(sample: Sample) -> Failed:
    detail = f'no route matches the data source {sample.data_source!r}; add it to `routes`, or a last route "*"'
    return Failed(Cause.INFRA, "no_route", detail)


def _done(outcome: Outcome) -> asyncio.Future[Outcome]:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    future.set_result(outcome)
    return future


async def _cancel(tasks: Sequence[asyncio.Future[Outcome]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _aiter(samples: Iterable[Sample] | AsyncIterable[Sample]) -> AsyncIterator[Sample]:
    if isinstance(samples, AsyncIterable):
        async for sample in samples:
            yield sample
    else:
        for sample in samples:
            yield sample
            # A long run of plain samples must let the event loop work in between.
            await asyncio.sleep(0)


__all__ = ["RewardEngine"]
