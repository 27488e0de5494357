"""Defines `RewardEngine`, the entry point of the core: it takes samples and returns outcomes.

The engine adds no rule of its own. `Lifetime` opens its parts, binds them to the event loop of the first call, and
closes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..config import Config, load_config
from ..config.load import located
from ..errors import ConfigurationError, EngineError
from ..journal import TrainingLog
from ..judges import Leaf
from ..observers import EngineStatistics, Observer, Statistics
from ..observers.batch_report import BatchReport
from ..observers.facts import Facts
from ..samples import Outcome, Sample
from ..samples.check import read_sample
from ..scheduling.batches import Cutoff, check_times
from ..scheduling.dispatcher import Dispatcher
from ..scheduling.upstream import Upstream
from ..sharing.membership import Channel
from ..sources import Source
from ..system.streams import MOST_HELD, Stream
from ..system.threads import cancel_futures
from .difference import Difference
from .held_sources import HeldSources, RewardPhases
from .lifetime import Lifetime
from .reloader import Reloader
from .scoring import Scoring
from .texts import TextMethods

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ..replicas.pool import Mode, Weights
    from ..sources.replica_set import WeightTransfer
    from .portal import EnginePortal


class RewardEngine(TextMethods):
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
        self._statistics = Statistics()
        settings, found = load_config(config), None
        try:
            self._lifetime = Lifetime(
                settings,
                processes=processes,
                sources=sources or {},
                channel=channel,
                observers=observers,
                statistics=self._statistics,
            )
        except ConfigurationError as error:
            found = located(error, settings)
        if found is not None:
            raise found
        self._held_sources = HeldSources(self._lifetime, self.statistics)
        self._reloader = Reloader(self._lifetime, on_applied=self._held_sources.apply)
        self._phases = RewardPhases(self._lifetime)

    @property
    def config(self) -> Config:
        """The configuration that the engine works by."""
        return self._lifetime.config

    async def score(self, sample: Sample, *, deadline_s: float | None = None, priority: int | None = None) -> Outcome:
        """Score one sample.

        Returns its outcome within `deadline_s` seconds (default: `engine.deadline_s` of the configuration). It never
        raises because of the sample. Samples of a higher `priority` go first (default: as the configuration says for
        their route, judge or split). Cancelling the call cancels its attempts and frees their permits. Raises
        `EngineError` if the engine is closed or serves another event loop, `BudgetSpent` if a budget with
        `on_spent: raise` is spent, `ValueError` for an impossible deadline or priority, `ConfigurationError` if a
        reward model gives different texts the same numbers or a function with `devices` cannot be loaded, and
        `ReplicasNotStarted` if the servers of a source of kind `replicas` do not start. The first call starts these
        servers, and the workers on devices; its deadline runs from when they are ready.
        """
        check_times(deadline_s, priority)
        scoring, due_at = await self._ready(deadline_s)
        return await scoring.submit(read_sample(sample), None, due_at, priority=priority)

    async def score_all(
        self,
        samples: Iterable[Sample],
        *,
        deadline_s: float | None = None,
        priority: int | None = None,
        cutoff: Cutoff | None = None,
    ) -> list[Outcome]:
        """Score a batch; outcome i belongs to sample i.

        The whole batch is submitted at once, so that the scheduler can order it; the deadline of every sample runs from
        then on. Samples of a higher `priority` go first (default: as the configuration says for each). Of two batches
        under way with the same one, the earlier goes first. Mixed, it would end later and the other no sooner.
        `cutoff`: when to stop waiting for the last samples.

        Raises what `score` raises, and `TypeError` for a single sample.
        """
        outcomes = await self.score_each(samples, deadline_s=deadline_s, priority=priority, cutoff=cutoff)
        try:
            return [await outcome for outcome in outcomes]
        except BaseException:
            await cancel_futures(outcomes)
            raise

    async def score_each(
        self,
        samples: Iterable[Sample],
        *,
        deadline_s: float | None = None,
        priority: int | None = None,
        cutoff: Cutoff | None = None,
    ) -> list[asyncio.Future[Outcome]]:
        """Submit a batch as `score_all` does; return a future for each sample, which has its outcome as soon as it is
        known. Cancelling a future cancels that sample. Raises what `score_all` raises.
        """
        if isinstance(samples, Sample):
            raise TypeError("score_all takes several samples; call score for one")
        check_times(deadline_s, priority, cutoff)
        batch = [read_sample(sample) for sample in samples]
        readable = [sample for sample in batch if isinstance(sample, Sample)]
        self._lifetime.warn_if_too_many(readable, self._deadline_s(deadline_s))
        scoring, due_at = await self._ready(deadline_s)
        return await scoring.submit_all(batch, due_at, priority=priority, cutoff=cutoff)

    async def score_stream(
        self, samples: Iterable[Sample] | AsyncIterable[Sample], *, window: int | None = None
    ) -> AsyncGenerator[tuple[Sample, Outcome], None]:
        """Score any number of samples in constant memory; yields each sample with its outcome, in order.

        At most `window` samples are in memory at once, submitted or waiting to be yielded. By default enough are
        submitted to keep all sources busy, and up to 2,048 wait for one that takes long. A sample's deadline runs from
        its submission. An outcome is yielded as soon as it and all before it are known, even while `samples` is
        waiting. An error of `samples` passes through. Closing the generator cancels the samples in flight and closes
        `samples`.
        """
        stream = Stream(samples, self.score, max(1, window or self.stream_window), held=window or MOST_HELD)
        async with aclosing(stream.outcomes()) as outcomes:
            async for scored in outcomes:
                yield scored

    def dispatcher(self) -> Dispatcher:
        """Return the scheduler of the running event loop, for calls that are no samples.

        Raises `EngineError` if the engine is closed, or serves another event loop.
        """
        return self._bind().dispatcher

    @property
    def judges(self) -> Mapping[str, Leaf]:
        """The judges that ask sources themselves, by name."""
        return self._lifetime.router.leaves

    def seen_by(self, judge: str, sample: Sample) -> Sequence[Sample]:
        """What one of `judges` sees of a sample: the sample, or each turn of it."""
        return self._lifetime.router.seen_by(judge, sample)

    def compares(self, sample: Sample) -> bool:
        """Whether a sample goes to a judge that compares it with its siblings, so that these should be in its batch.
        One that cannot be read does not.
        """
        read = read_sample(sample)
        return isinstance(read, Sample) and self._lifetime.compares(read)

    @property
    def upstreams(self) -> Mapping[str, Upstream]:
        """The sources by name, with their quotas and learned estimates."""
        return self._lifetime.upstreams

    async def update_weights(
        self,
        source: str,
        *,
        path: str | PathLike[str] | None = None,
        transfer: WeightTransfer | None = None,
        version: str = "",
        mode: Mode = "rolling",
        within_s: float = 600.0,
    ) -> Weights:
        """Update the weights of a source of kind `replicas`, for all processes that share its servers. Return the new
        weights.

        `path` is a checkpoint; `transfer` are weights from the memory of this process. `version` is the name that
        verdicts carry; weights of a `path` have one by default. `mode`: "rolling" updates one replica after the other,
        while the others answer; "together" updates all at once, and calls wait, so that there is one version at a time.
        Calls under way at a replica have `within_s` seconds to end; then they are cancelled and sent again. Of two
        updates at the same time, the second waits for the first.

        Raises `ReplicasNotChanged` with the replicas at fault and the cause, `EngineError` for a source without servers
        of its own, `ReplicasNotStarted`, and `ValueError` for impossible arguments. A replica that failed takes no
        calls until it has been started again, with the weights of the others. Cancelling ends only the wait for an
        update from a `path`; it ends a `transfer`, and the replicas that were receiving are started again.
        """
        updated: Weights = await self._server_source(source).update_weights(
            path, transfer=transfer, version=version, mode=mode, within_s=within_s
        )
        return updated

    async def sleep(self, source: str, *, within_s: float = 600.0) -> None:
        """Free the devices of the servers of a source of kind `replicas`, until `wake_up`, for all processes that share
        them. Calls wait meanwhile, and fail at their deadlines (`deadline`). Servers that sleep get no other weights.
        Idempotent.

        `within_s` as for `update_weights`, and so are the errors. Cancelling ends only the wait.
        """
        await self._server_source(source).sleep(within_s=within_s)

    async def wake_up(self, source: str) -> None:
        """End the sleep of a source. Idempotent. Raises as `update_weights` does; cancelling ends only the wait."""
        await self._server_source(source).wake_up()

    @property
    def colocated(self) -> tuple[str, ...]:
        """The names of the sources with `colocated: true`. Without any, the three calls below do nothing."""
        return tuple(str(source.name) for source in self._phases.sources)

    async def begin_rewards(self) -> None:
        """Wake the sources with `colocated: true`, for all processes that share their servers, and wait until they take
        calls. The first call starts the servers. Idempotent.

        An adapter calls it before its trainer asks for rewards, so that no sample's deadline runs meanwhile. If only
        some replicas of a source wake up, that is logged, and the others take the calls. Raises `ReplicasNotStarted`,
        and `ReplicasNotChanged` if no replica of a source wakes up. Cancelling ends only the wait.
        """
        if self.colocated:
            self._bind()
            await self._phases.begin()

    async def settle_rewards(self) -> None:
        """Wait until the samples that are under way in this engine have their outcomes, which they have by their
        deadlines. If several processes share the servers, all settle before the first one ends the phase.
        """
        if self.colocated:
            await self._bind().settled()

    async def end_rewards(self) -> None:
        """Put the sources with `colocated: true` to sleep, and wait until their devices are free. Idempotent.

        Samples under way get their outcomes first, unless another process has put the servers to sleep. Calls that are
        still under way then, and those that come later, wait for the next phase; their deadlines go on. Servers that
        were not started are left alone; a start that is under way is waited for. Raises `ReplicasNotChanged` if the
        devices may not be free: the trainer must not go on then. Cancelling ends only the wait.
        """
        if self.colocated:
            self._bind()
            await self._phases.end()

    async def reload(
        self, config: str | PathLike[str] | Mapping[str, Any] | DictConfig | Config | None = None
    ) -> Difference:
        """Apply another configuration: `config`, or by default the content of the engine's file. Return what differs.

        It is checked as a whole and applied in one step of the event loop, or refused as a whole. Samples under way
        keep their judges. Attempts at a removed source end there, and no new ones start. docs/limits.md lists what can
        change. `engine.reload` goes on watching the same file.

        Call it from the engine's event loop. Raises `ConfigurationError` for mistakes and for changes that need a
        restart, and `EngineError` if the engine is closed or serves another event loop. Nothing has changed then.
        """
        if self._lifetime.is_closing:
            raise EngineError("this RewardEngine is closed; make a new one")
        return self._reloader.reload(config)

    def hold(self, source: str) -> None:
        """Give a source no further calls until `release`: they go elsewhere, or wait. Raises `EngineError`."""
        self._held_sources.hold(source, held=True)

    def release(self, source: str) -> None:
        """Let a source take calls again. Raises `EngineError` for an unknown one."""
        self._held_sources.hold(source, held=False)

    def last_batch(self) -> BatchReport | None:
        """Return the report of the batch that ended last; None if no batch has ended yet.

        Samples that are scored one by one belong to one batch, which ends when none of them is under way any more.
        """
        return self._statistics.last_batch

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of all counters. Call it from the engine's event loop, or through the portal."""
        dispatcher = self._lifetime.dispatcher
        now = dispatcher.now() if dispatcher else 0.0
        gauges = {name: upstream.gauges(now) for name, upstream in self._lifetime.upstreams.items()}
        channel = self._lifetime.opened_channel
        kept_by = "" if channel is None else channel.kept_by
        waiting = dispatcher.waiting if dispatcher else 0
        return self._statistics.snapshot(gauges, waiting=waiting, limits_kept_by=kept_by)

    @property
    def stream_window(self) -> int:
        """The number of samples that `score_stream` keeps in memory by default."""
        return self._lifetime.stream_window

    def facts(self) -> Facts:
        """Return the converter of this engine's outcomes to mappings with the same keys for every sample."""
        server = self._lifetime.server
        if server is not None:
            return Facts(server.facts.components, defines_correct=server.facts.defines_correct)
        return Facts(self._lifetime.router.component_names(), defines_correct=self._lifetime.router.defines_correct)

    def training_log(self) -> TrainingLog | None:
        """Return what records in this engine's journal what a trainer makes of rewards; None without a journal."""
        journal = self._lifetime.journal
        return None if journal is None else TrainingLog(journal.path, run_id=journal.run_id)

    def portal(self) -> AbstractContextManager[EnginePortal]:
        """Return a context manager that runs the engine in its own thread and yields a sync, thread-safe facade."""
        from .portal import open_portal

        return open_portal(self)

    async def aclose(self) -> None:
        """Fail all waiting samples (`infra/closed`), end every attempt, and close sources and journal. Idempotent.

        If a part fails to close, the error is logged and the other parts are closed. A part that does not close within
        `lifetime.CLOSE_WITHIN_S` seconds is cancelled; if it still does not end, it is abandoned with a warning.
        Cancelling this call ends only the wait: closing goes on, and another call waits for its end.

        Raises `JournalError` if verdicts could not be written. All other parts are closed then, too.
        """
        await self._lifetime.aclose()

    async def __aenter__(self) -> RewardEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _bind(self) -> Scoring:
        """Return the scoring of the running event loop; create it on the first call."""
        return self._lifetime.bind()

    async def _ready(self, deadline_s: float | None) -> tuple[Scoring, float]:
        """Wait until the sources can be asked. Return the scoring of the running event loop, and the deadline as a time
        of its clock.
        """
        scoring, starts, probe = self._bind(), self._lifetime.source_starts, self._lifetime.start_probe
        if starts.over and probe.over:
            return scoring, scoring.now() + self._deadline_s(deadline_s)
        with scoring.arriving():
            try:
                await starts.done()
            except ConfigurationError as error:
                raise located(error, self.config) from None
            due_at = scoring.now() + self._deadline_s(deadline_s)
            if not probe.over:
                await probe.passed(scoring, due_at)
        return scoring, due_at

    def _server_source(self, source: str) -> Any:
        self._bind()
        return self._lifetime.server_source(source)

    def _deadline_s(self, deadline_s: float | None) -> float:
        return self.config.engine.deadline_s if deadline_s is None else deadline_s
