"""Defines `RewardEngine`, the entry point of the core: it takes samples and returns outcomes.

The engine connects routes, judges, journal, scheduling and sources, and adds no rule of its own. The first call creates
everything that belongs to an event loop, in the loop of that call. It is dropped when that loop is found closed. Quotas
and learned estimates of the sources are kept, because the provider goes on counting.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from os import PathLike
from typing import TYPE_CHECKING, Any

from .cancelling import abandon, cancel_all
from .config import Config, Limits, configured_name, load_config
from .config.several_keys import without_keys
from .errors import ConfigurationError, EngineError, Mistake
from .journal import Journal
from .judges import JudgeRouter, Leaf
from .observers import (
    BatchLog,
    EngineStatistics,
    FailureLog,
    Observer,
    Observers,
    Statistics,
    load_observers,
    with_names,
)
from .sample_check import named, read_sample
from .samples import Message, Outcome, Sample
from .scheduling import Cutoff, Dispatcher, Upstream, open_upstreams
from .scoring import Scoring
from .sharing import Channel, Membership, open_channel, source_keys
from .sources import Source
from .start_probe import StartProbe
from .streaming import Stream
from .telemetry import BatchReport, Facts
from .text_streams import Streamed, TextCalls, TextStream

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from .portal import EnginePortal

_log = logging.getLogger("qreward_plugins.engine")

CLOSE_WITHIN_S = 10.0
"""Most seconds for closing the scheduler, and again for closing all sources together."""
END_WITHIN_S = 2.0
"""Most seconds to wait for a part that did not close in time and was cancelled."""


class RewardEngine:
    """Scores samples over the sources of one configuration.

    Args:
        config: a path to a YAML file, the same tree as a mapping or DictConfig, or a `Config`.
        processes: the number of processes that share the limits without a keeper; each keeps to an equal part.
        sources: opened sources by name, used instead of those of the configuration, with one quota each.
        channel: the connection to a keeper, instead of the one that `engine.shared` selects.
        observers: called with every event, after those that the configuration names; see `observers`.

    Raises `ConfigurationError` with all mistakes in the configuration, and `ValueError` for an impossible number of
    processes.

    Use it as an async context manager, or call `aclose`. It serves one event loop at a time: the loop of the first
    call, and when that loop is closed, the loop of the next call. Sync code uses `portal`.
    """

    def __init__(
        self,
        config: str | PathLike[str] | Mapping[str, Any] | DictConfig | Config,
        *,
        processes: int = 1,
        sources: Mapping[str, Source] | None = None,
        channel: Channel | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        if not isinstance(processes, int) or processes < 1:
            raise ValueError(f"processes must be a whole number from 1 on, not {processes!r}")
        self.config = without_keys(load_config(config), sources or {})
        self._statistics = Statistics()
        given = with_names(observers)
        self._observers = Observers(
            (self._statistics, FailureLog(), BatchLog()), [*load_observers(self.config.observers), *given]
        )
        settings = self.config.engine
        channel = channel or open_channel(settings.shared)
        processes = 1 if settings.shared == "off" else processes
        self._upstreams = open_upstreams(self.config, sources or {}, processes=processes, shared=channel is not None)
        keys = source_keys(self.config)
        self._membership = (
            Membership({keys[name]: upstream for name, upstream in self._upstreams.items()}, channel)
            if channel
            else None
        )
        self._rng = random.Random(settings.seed)
        key = secrets.token_bytes(32) if settings.seed is None else hashlib.sha256(str(settings.seed).encode()).digest()
        self._router = JudgeRouter(self.config, key=key)
        _check_fit(self._router.leaves, self._upstreams, given=sources or {})
        self._start_probe = StartProbe(self._router.leaves.values(), given=sources or {})
        self._journal = Journal(settings.journal.path) if settings.journal else None
        self._reuse = bool(settings.journal and settings.journal.reuse)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scoring: Scoring | None = None
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._closed_parts: set[str] = set()
        self._ended = False
        self._pid = os.getpid()

    async def score(self, sample: Sample, *, deadline_s: float | None = None, priority: int = 0) -> Outcome:
        """Score one sample.

        Returns its outcome within `deadline_s` seconds (default: `engine.deadline_s` of the configuration). It never
        raises because of the sample. Samples of a higher `priority` go first. Cancelling the call cancels its attempts
        and frees their permits. Raises `EngineError` if the engine is closed or serves another event loop, `ValueError`
        for an impossible deadline or priority, and `ConfigurationError` if a reward model gives different texts the
        same numbers (`start_probe`).
        """
        _check_times(deadline_s, priority)
        scoring = self._bind()
        due_at = scoring.now() + self._deadline_s(deadline_s)
        if not self._start_probe.over:
            await self._start_probe.passed(scoring, due_at)
        return await scoring.submit(read_sample(sample), scoring.batches.of_singles(priority), due_at)

    async def score_all(
        self,
        samples: Iterable[Sample],
        *,
        deadline_s: float | None = None,
        priority: int = 0,
        cutoff: Cutoff | None = None,
    ) -> list[Outcome]:
        """Score a batch; outcome i belongs to sample i.

        The whole batch is submitted at once, so that the scheduler can order it; the deadline of every sample runs from
        then on. Of two batches under way, the one of higher `priority` goes first; of equal ones, the earlier. Mixed,
        the first would end later and the second no sooner. `cutoff`: when to stop waiting for the last samples.

        Raises what `score` raises, and `TypeError` for a single sample.
        """
        if isinstance(samples, Sample):
            raise TypeError("score_all takes several samples; call score for one")
        _check_times(deadline_s, priority)
        batch = [read_sample(sample) for sample in samples]
        self._warn_if_too_many([sample for sample in batch if isinstance(sample, Sample)], deadline_s)
        scoring = self._bind()
        due_at = scoring.now() + self._deadline_s(deadline_s)
        if not self._start_probe.over:
            await self._start_probe.passed(scoring, due_at)
        groups = [named(sample).group_id for sample in batch]
        together = scoring.batches.new(groups, priority=priority, cutoff=cutoff)
        outcomes: list[asyncio.Future[Outcome]] = []
        try:
            outcomes += (scoring.submit(sample, together, due_at) for sample in batch)
            return [await outcome for outcome in outcomes]
        except BaseException:
            await _cancel(outcomes)
            raise
        finally:
            scoring.batches.seal(together)

    async def score_stream(
        self, samples: Iterable[Sample] | AsyncIterable[Sample], *, window: int | None = None
    ) -> AsyncGenerator[tuple[Sample, Outcome], None]:
        """Score any number of samples in constant memory; yields each sample with its outcome, in order.

        At most `window` samples are in memory at once, submitted or waiting to be yielded (default: enough to keep all
        sources busy). A sample's deadline runs from its submission. An outcome is yielded as soon as it and all before
        it are known, even while `samples` is waiting. An error of `samples` passes through. Closing the generator
        cancels the samples in flight and closes `samples`.
        """
        async with aclosing(
            Stream(samples, self.score, max(1, window or self._stream_window())).outcomes()
        ) as outcomes:
            async for scored in outcomes:
                yield scored

    def stream_text(
        self,
        sources: str | Sequence[str],
        messages: Sequence[Message],
        *,
        parameters: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> TextStream:
        """Ask a chat source for a text, and return the pieces of the text as they come. No judge reads it.

        `sources` are the names of one or several sources that may answer. `parameters` are further keys of the body, as
        those of a judge (default: `max_tokens` of 1,024). The call begins at once, goes by the limits, priorities and
        retries of all calls, and ends within `deadline_s` seconds (default: `engine.deadline_s`). See `TextStream` for
        its end. The journal neither answers nor records it.

        Call it from the engine's event loop. Raises `EngineError` if the engine is closed, serves another event loop,
        or has no such chat source, and `ValueError` for impossible parameters, deadline or priority. Messages that
        cannot be sent are an error of the stream (`input`).
        """
        calls, due_at = self._text_calls(sources, parameters, deadline_s, priority)
        return calls.open(messages, due_at)

    async def stream_texts(
        self,
        sources: str | Sequence[str],
        conversations: Iterable[Sequence[Message]],
        *,
        parameters: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[tuple[int, Streamed], None]:
        """Stream the texts for several conversations at once; yields (index of the conversation, piece) as they come.

        The last item of each stream is its `TextAnswer`, or the `TextStreamFailed` that ended it; neither touches the
        other streams. Closing the generator ends all streams. Otherwise as `stream_text`.
        """
        calls, due_at = self._text_calls(sources, parameters, deadline_s, priority)
        async with aclosing(calls.merged(list(conversations), due_at)) as streams:
            async for item in streams:
                yield item

    def _text_calls(
        self,
        sources: str | Sequence[str],
        parameters: Mapping[str, Any] | None,
        deadline_s: float | None,
        priority: int,
    ) -> tuple[TextCalls, float]:
        _check_times(deadline_s, priority)
        scoring = self._bind()
        calls = TextCalls(scoring.dispatcher, self._upstreams, sources, parameters or {}, priority=priority)
        return calls, scoring.now() + self._deadline_s(deadline_s)

    @property
    def judges(self) -> Mapping[str, Leaf]:
        """The judges that ask sources themselves, by name."""
        return self._router.leaves

    @property
    def upstreams(self) -> Mapping[str, Upstream]:
        """The sources by name, with their quotas and learned estimates."""
        return self._upstreams

    def retune(self, source: str, limits: Limits) -> None:
        """Change the limits of a source while the engine runs, for example when the provider changes them. Requests and
        tokens that were spent still count. Of a source with several keys, the name of the configuration changes the
        limits of each key, and `NAME#1` those of one. Call it from the engine's event loop.

        Raises `EngineError` for an unknown source. Raises `ConfigurationError`, and changes nothing, for limits that
        the processes cannot share.
        """
        meant = [each for name, each in self._upstreams.items() if source in (name, configured_name(name))]
        if not meant:
            raise EngineError(f"unknown source {source!r}; sources: {', '.join(self._upstreams)}")
        scoring = self._bind()
        for upstream in meant:
            upstream.quota.retune(limits, scoring.now())
        scoring.dispatcher.look_again()

    def last_batch(self) -> BatchReport | None:
        """Return the report of the batch that ended last; None if no batch has ended yet.

        Samples that are scored one by one belong to one batch, which ends when none of them is under way any more.
        """
        return self._statistics.last_batch

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of all counters. Call it from the engine's event loop, or through the portal."""
        dispatcher = self._dispatcher
        now = dispatcher.now() if dispatcher else 0.0
        gauges = {name: upstream.gauges(now) for name, upstream in self._upstreams.items()}
        return self._statistics.snapshot(gauges, waiting=dispatcher.waiting if dispatcher else 0)

    def facts(self) -> Facts:
        """Return the converter of this engine's outcomes to mappings with the same keys for every sample."""
        return Facts(self._router.component_names(), defines_correct=self._router.defines_correct)

    def portal(self) -> AbstractContextManager[EnginePortal]:
        """Return a context manager that runs the engine in its own thread and yields a sync, thread-safe facade."""
        from .portal import open_portal

        return open_portal(self)

    async def aclose(self) -> None:
        """Fail all waiting samples (`infra/closed`), end every attempt, and close sources and journal. Idempotent.

        If a part fails to close, the error is logged and the other parts are closed. A part that does not close within
        `CLOSE_WITHIN_S` seconds is cancelled; if it still does not end, it is abandoned with a warning. Cancelling this
        call ends only the wait: closing goes on, and another call waits for its end.

        Raises `JournalError` if verdicts could not be written. All other parts are closed then, too.
        """
        self._closed = True
        loop = asyncio.get_running_loop()
        # After a fork, everything that is open belongs to the parent.
        while not self._ended and self._pid == os.getpid():
            closing = self._closing
            if closing is None or closing.done() or closing.get_loop() is not loop:
                closing = self._closing = loop.create_task(self._close())
            # A cancelled caller stops waiting here; the task goes on closing.
            await asyncio.wait([closing])
            if not closing.cancelled():
                closing.result()
                return

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        interrupted: asyncio.CancelledError | None = None
        steps: list[dict[str, Callable[[], Awaitable[None]]]] = []
        if self._scoring is not None and self._loop is loop:
            steps.append({"the start probe": self._start_probe.aclose})
            steps.append({"the scheduler": self._scoring.aclose})
            if self._membership is not None:
                steps.append({"the connection to the quota keeper": self._membership.aclose})
        steps.append({f"source {name}": upstream.source.aclose for name, upstream in self._upstreams.items()})
        for step in steps:
            try:
                await self._close_all(step)
            except asyncio.CancelledError as cancelled:
                interrupted = cancelled
        if interrupted is None:
            self._observers.close(loop.time())
        if self._journal is not None:
            try:
                await self._journal.aclose()
            except Exception:
                self._ended = interrupted is None
                raise
        if interrupted is not None:
            raise interrupted
        self._ended = True

    async def _close_all(self, parts: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        """Close those of `parts` that are still open, at the same time. A failure of one does not stop the others."""
        left = {what: aclose for what, aclose in parts.items() if what not in self._closed_parts}
        tasks = {asyncio.ensure_future(_call(aclose)): what for what, aclose in left.items()}
        if not tasks:
            return
        try:
            await asyncio.wait(tasks, timeout=CLOSE_WITHIN_S)
        finally:
            # Also after a cancellation, so that parts that are closing have time to end.
            for task in await cancel_all(tasks, within_s=END_WITHIN_S):
                abandon(task)
                _log.warning("%s could not be closed within %g s, and is abandoned", tasks[task], CLOSE_WITHIN_S)
            for task, what in tasks.items():
                failed = task.exception() if task.done() and not task.cancelled() else None
                if failed is not None:
                    _log.warning("%s could not be closed", what, exc_info=failed)
                elif task.done() and not task.cancelled():
                    self._closed_parts.add(what)

    async def __aenter__(self) -> RewardEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def _dispatcher(self) -> Dispatcher | None:
        return self._scoring.dispatcher if self._scoring is not None else None

    def _bind(self) -> Scoring:
        """Return the scoring of the running event loop; create it on the first call."""
        if self._closed:
            raise EngineError("this RewardEngine is closed; make a new one")
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._pid != os.getpid():
            raise EngineError("this RewardEngine was used before a fork; make a new one in this process")
        if self._scoring is not None and self._loop is loop:
            return self._scoring
        if self._loop is not None and not self._loop.is_closed():
            raise EngineError(
                "this RewardEngine serves another event loop that is still open; "
                "make one engine per loop, or share one through RewardEngine.portal()"
            )
        for upstream in self._upstreams.values():
            upstream.abandon_attempts(loop.time())
        self._loop, self._pid = loop, os.getpid()
        scoring = self._scoring = Scoring(
            self._router,
            sources={name: upstream.source for name, upstream in self._upstreams.items()},
            journal=self._journal,
            reuse=self._reuse,
            observers=self._observers,
        )
        scoring.dispatcher = Dispatcher(
            self._upstreams,
            rng=self._rng,
            max_attempts=self.config.engine.max_attempts,
            settings=self.config.engine.scheduling,
            keeps_late=self._journal is not None,
            on_cutoff=scoring.cut_off,
            on_pumped=self._membership.look if self._membership is not None else None,
            observers=self._observers,
        )
        if self._membership is not None:
            self._membership.start(scoring.dispatcher)
        return scoring

    def _deadline_s(self, deadline_s: float | None) -> float:
        return self.config.engine.deadline_s if deadline_s is None else deadline_s

    @property
    def _rate_per_s(self) -> float:
        """Calls per second that the declared limits allow in this process; infinity without limits."""
        return sum(upstream.calls_per_s for upstream in self._upstreams.values())

    def _warn_if_too_many(self, batch: Sequence[Sample], deadline_s: float | None) -> None:
        deadline_s = self._deadline_s(deadline_s)
        rate = self._rate_per_s
        requests = self._router.calls_of(batch) if math.isfinite(rate) else 0
        if requests > rate * deadline_s + sum(
            upstream.most_calls * upstream.quota.burst for upstream in self._upstreams.values()
        ):
            _log.warning(
                "%d samples take about %.0f s at the %.0f requests/min that the sources allow; the deadline is %.0f s: "
                "samples will fail. Raise engine.deadline_s, or add sources.",
                len(batch),
                requests / rate,
                60 * rate,
                deadline_s,
            )

    def _stream_window(self) -> int:
        """Return enough samples to keep every source busy, but at most what the limits allow in half a deadline."""
        busy = 4 * sum(upstream.most_calls * upstream.quota.concurrency for upstream in self._upstreams.values())
        allowed = self._rate_per_s * self.config.engine.deadline_s / 2
        return max(1, int(min(busy, allowed / self._router.most_calls)))


def _check_fit(judges: Mapping[str, Leaf], upstreams: Mapping[str, Upstream], *, given: Collection[str]) -> None:
    """Raise `ConfigurationError` for judges that do not suit their sources. Sources that the caller has `given` may
    stand in for others, as in a rehearsal.
    """
    mistakes: list[Mistake] = []
    for judge in judges.values():
        mistakes += judge.mistakes({name: upstreams[name].source for name in judge.sources if name not in given})
    if mistakes:
        raise ConfigurationError(mistakes)


def _check_times(deadline_s: float | None, priority: int) -> None:
    # The scheduler computes with both; there a wrong type would fail every sample of the batch.
    if deadline_s is not None and not (isinstance(deadline_s, (int, float)) and deadline_s >= 0):
        raise ValueError(f"deadline_s must be a number of seconds, at least 0, not {deadline_s!r}")
    if not isinstance(priority, int):
        raise ValueError(f"priority must be a whole number, not {priority!r}")


async def _cancel(futures: Sequence[asyncio.Future[Outcome]]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


async def _call(aclose: Callable[[], Awaitable[None]]) -> None:
    # A task needs a coroutine. A foreign source may return another awaitable, or raise when called.
    await aclose()
