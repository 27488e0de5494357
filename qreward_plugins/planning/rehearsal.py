"""Simulates one step in virtual time, with the production engine, the user's configuration and simulated servers.

The simulated step is one in the middle of a run. A few samples are scored first, so that the engine learns the latency
of its sources. The quota windows are empty when the step begins, because generation and training take longer than a
window.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from ..config import Config
from ..engine import RewardEngine
from ..errors import ConfigurationError, EngineError, Mistake
from ..observers import SourceStatistics
from ..observers.batch_report import BatchReport
from ..quotas.shares import shares
from ..samples import Failed, Outcome, Sample
from ..scheduling.batches import WaitReason
from ..sharing.keeper import Keeper, KeeperLoop
from ..sharing.messages import Answer, Report
from ..simulation import Luck, Server, SimulatedServer, run
from ..sources import kind_of
from ..system.processes import process_pool, terminate
from .picture import Timeline, most_in_window
from .played import PlayedSource, Record
from .rollouts import Rollouts

Task: TypeAlias = "tuple[Rehearsal, int, bool]"
"""The rehearsal, its seed, and whether to keep the timeline."""


class Runner:
    """Runs tasks. It is a context manager that ends its processes. Their number does not change a result."""

    def __init__(self, processes: int, progress: Callable[[int, int], None] | None = None) -> None:
        self._progress = progress
        self._done = self._total = 0
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            self._pool = process_pool(processes)

    def run(self, tasks: Sequence[Task]) -> list[Run]:
        """Run all tasks and return their results in order.

        An error of `progress` passes through, and ends every process at once. Raises `EngineError` if a process dies.
        """
        self._total += len(tasks)
        self._tell(0)
        found = []
        try:
            for result in map(_rehearse, tasks) if self._pool is None else self._pool.map(_rehearse, tasks):
                found.append(result)
                self._tell(1)
        except BrokenProcessPool:
            raise EngineError("a rehearsal process died, maybe for lack of memory; plan fewer samples") from None
        return found

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._pool is not None:
            if kind is not None:
                terminate(self._pool)
            self._pool.shutdown(cancel_futures=True)

    def _tell(self, done: int) -> None:
        self._done += done
        if self._progress is not None:
            self._progress(self._done, self._total)


def _rehearse(task: Task) -> Run:
    rehearsal, seed, record = task
    return rehearsal.run(seed, record=record)


AMPLE_DEADLINE_S = 360_000.0
_WARM_UP = 64
_OVERHEAD_S = 0.05
_STRAGGLER_FACTOR = 10.0


@dataclass(frozen=True)
class Truth:
    """The assumed properties of a source that are not in its configuration. Times are seconds."""

    latency_s: float
    spread: float
    straggler_share: float
    error_share: float
    verdict_tokens: float
    fixed_s: float = 0.0
    """The part of `latency_s` that a request takes once, if the source takes several calls in one request."""
    slots: int | None = None
    """Calls that a function runs at once; None: any number."""


@dataclass(frozen=True)
class Use:
    """The use of one source in a step: its requests, the requests in flight, and the most requests and tokens that were
    sent in any window.
    """

    requests: int
    calls: int
    """Calls that these requests carried."""
    answered: int
    """Calls that were answered."""
    tokens: int
    """Tokens of the requests that were answered."""
    cost_usd: float
    peak_in_flight: int
    most_requests: float
    most_tokens: float
    held_s: Mapping[str, float]
    """Seconds in which it accepted no request, by reason: `queue` (no concurrency left), `quota`, `pause`."""


@dataclass(frozen=True)
class Run:
    """The result of one rehearsal."""

    seed: int
    makespan_s: float
    cost_usd: float
    scored: int
    late: int
    """Samples whose outcome came after the configured deadline, or that failed because of it."""
    failed: Mapping[str, int]
    """Samples that no source has judged for other reasons, by cause and reason: they failed, or got a floor."""
    example: str
    """A description of the first of these failures."""
    attempts: int
    report: BatchReport | None
    uses: Mapping[str, Use]
    timeline: Timeline | None


@dataclass(frozen=True)
class Rehearsal:
    """A configuration, the assumed properties of its sources, and the rollouts of a step. Picklable."""

    config: Config
    truths: Mapping[str, Truth]
    rollouts: Rollouts
    workers: int = 1
    """Engines that divide the samples, and share the limits through one keeper."""

    def servers(self) -> dict[str, Server]:
        """Return the simulated servers by name. They have the declared limits; what is not declared is unlimited.

        Raises `ConfigurationError` for limits that cannot be kept.
        """
        return {name: self._server(name) for name in self.config.sources}

    def stand_ins(self, servers: Mapping[str, Server]) -> dict[str, PlayedSource]:
        """Return sources with which an engine can be built. They must not be asked."""
        return self._played(servers, Luck(), Record())

    def run(self, seed: int, *, record: bool = False) -> Run:
        """Rehearse one step; the same seed gives the same step. `record`: keep its timeline."""
        with _quiet():
            return run(self._step(seed, record))

    @cached_property
    def _engine_config(self) -> Config:
        engine = self.config.engine
        changes: dict[str, object] = {"journal": None}
        if engine.scheduling.prefer == "speed":
            # A step that exceeds its deadline is simulated to its end, so that its duration is known. With
            # `prefer: cost`, the engine schedules by the deadline, so the deadline must stay.
            changes["deadline_s"] = max(engine.deadline_s, AMPLE_DEADLINE_S)
        # Nothing of a rehearsal happens, so that observers of the user have no part in it.
        return self.config.model_copy(update={"engine": engine.model_copy(update=changes), "observers": ()})

    async def _step(self, seed: int, record: bool) -> Run:
        config = self._engine_config
        seeded = config.model_copy(update={"engine": config.engine.model_copy(update={"seed": seed})})
        samples = self.rollouts.samples(seed)
        first = self.rollouts.samples(seed, prefix="first ", count=min(len(samples), _WARM_UP))
        luck, kept = Luck(seed), Record()
        played = self._played(self.servers(), luck, kept)
        async with contextlib.AsyncExitStack() as opened:
            engines = [
                await opened.enter_async_context(RewardEngine(seeded, sources=played, channel=channel))
                for channel in self._channels()
            ]
            await _score(engines, first)
            await asyncio.sleep(2 * max(server.server.server.window_s for server in played.values()) + 1)
            before = [engine.statistics().sources for engine in engines]
            kept.bars.clear()
            start_s = asyncio.get_running_loop().time()
            outcomes = await _score(engines, samples)
            # The engine that ends last says what the step waited for.
            last = max(engines, key=lambda engine: report.makespan_s if (report := engine.last_batch()) else 0.0)
            report, after = last.last_batch(), [engine.statistics().sources for engine in engines]
            # Cancelled attempts end, and are recorded, when their tasks next run.
            await asyncio.sleep(1e-3)
            makespan_s = report.makespan_s if report else 0.0
            timeline = self._timeline(kept, start_s, makespan_s, played)
            uses = {
                name: _use(
                    [sources[name] for sources in before],
                    [sources[name] for sources in after],
                    timeline,
                    window_s=source.server.server.window_s,
                    waits=last.upstreams[name].wait_reasons.seconds(start_s, start_s + makespan_s),
                )
                for name, source in played.items()
            }
        unjudged = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        failures = [failed for failed in unjudged if failed.reason != "deadline"]
        return Run(
            seed=seed,
            makespan_s=makespan_s,
            cost_usd=sum(use.cost_usd for use in uses.values()),
            scored=len(outcomes) - len(unjudged),
            late=sum(_late(outcome, self.config.engine.deadline_s) for outcome in outcomes),
            failed=Counter(failed.label for failed in failures),
            example=failures[0].describe() if failures else "",
            attempts=sum(use.calls for use in uses.values()),
            report=report,
            uses=uses,
            timeline=timeline if record else None,
        )

    def _channels(self) -> Sequence[_Channel | None]:
        """The connections of the engines to the keeper that they share; None for one engine, which needs no keeper."""
        if self.workers == 1:
            return [None]
        keeper = KeeperLoop(Keeper(asyncio.get_running_loop().time(), boot="", first=True))
        return [_Channel(keeper, f"worker {number}") for number in range(self.workers)]

    def _played(self, servers: Mapping[str, Server], luck: Luck, record: Record) -> dict[str, PlayedSource]:
        return {
            name: PlayedSource(
                SimulatedServer(server, luck),
                self.config,
                slots=self.truths[name].slots,
                verdict_tokens=self.truths[name].verdict_tokens,
                record=record,
                fixed_work=self._fixed_work(name, server),
            )
            for name, server in servers.items()
        }

    def _fixed_work(self, name: str, server: Server) -> float:
        """The work of a request without any call: what its fixed time has besides the overhead."""
        return max(0.0, self.truths[name].fixed_s - server.overhead_s) / server.seconds_per_unit

    def _server(self, name: str) -> Server:
        source, truth = self.config.sources[name], self.truths[name]
        limits = source.limits
        parts = shares(limits, source=name, processes=1, slots=truth.slots)
        local = kind_of(source).local
        overhead_s = 0.0 if local else min(_OVERHEAD_S, truth.latency_s / 4)
        if getattr(source, "batch", None) is not None:
            # The overhead is a part of what a request takes once.
            overhead_s = min(overhead_s, truth.fixed_s)
        network_s = overhead_s / 2
        try:
            return Server(
                name,
                requests_per_minute=limits.requests_per_minute,
                tokens_per_minute=limits.tokens_per_minute,
                concurrency=parts.concurrency,
                window="bucket" if limits.window == "bucket" else "sliding",
                burst=limits.burst,
                window_s=parts.window_s,
                seconds_per_unit=truth.latency_s - overhead_s,
                overhead_s=overhead_s,
                noise=truth.spread,
                straggler_share=truth.straggler_share,
                straggler_factor=_STRAGGLER_FACTOR,
                error_share=truth.error_share,
                # Without jitter: its effect on a bucket with one request is not part of a plan.
                network_s=(network_s, network_s),
            )
        except ValueError as error:
            raise ConfigurationError([Mistake(f"sources.{name}.limits", f"{error}.")]) from None

    def _timeline(
        self, record: Record, start_s: float, makespan_s: float, played: Mapping[str, PlayedSource]
    ) -> Timeline:
        bars = tuple(
            replace(bar, start_s=bar.start_s - start_s, end_s=min(bar.end_s - start_s, makespan_s))
            for bar in record.bars
        )
        servers = {name: source.server.server for name, source in played.items()}
        requests = {name: server.requests_per_window for name, server in servers.items()}
        tokens = {name: server.tokens_per_window for name, server in servers.items()}
        return Timeline(
            sources=tuple(played),
            bars=bars,
            makespan_s=makespan_s,
            samples=self.rollouts.count,
            windows_s={name: server.window_s for name, server in servers.items() if requests[name] or tokens[name]},
        )


class _Channel:
    """The `Channel` of one engine to a keeper in the same event loop."""

    def __init__(self, keeper: KeeperLoop, worker: str) -> None:
        self._keeper = keeper
        self._worker = worker

    async def exchange(self, report: Report) -> Answer | None:
        # A random name would give another schedule in each run.
        return await self._keeper.exchange(report._replace(worker=self._worker))

    async def end_keeper(self) -> None:
        return None


async def _score(engines: Sequence[RewardEngine], samples: Sequence[Sample]) -> list[Outcome]:
    """Deal the samples out to the engines, and return all outcomes."""
    parts = [samples[number :: len(engines)] for number in range(len(engines))]
    scored = await asyncio.gather(*map(RewardEngine.score_all, engines, parts))
    return [outcome for outcomes in scored for outcome in outcomes]


def _use(
    befores: Sequence[SourceStatistics],
    afters: Sequence[SourceStatistics],
    timeline: Timeline,
    *,
    window_s: float,
    waits: Mapping[WaitReason, float],
) -> Use:
    def grown(count: Callable[[SourceStatistics], float]) -> Any:
        return sum(map(count, afters)) - sum(map(count, befores))

    bars = timeline.of(afters[0].name)
    changes = sorted([(bar.start_s, 1) for bar in bars] + [(bar.end_s, -1) for bar in bars])
    starts = [bar.start_s for bar in bars]
    attempts = grown(lambda one: one.requests)
    return Use(
        # The engine counts attempts, and one request of this source carries several of them.
        requests=len(bars) if grown(lambda one: one.batches) else attempts,
        calls=attempts,
        answered=grown(lambda one: one.answered),
        tokens=grown(lambda one: one.prompt_tokens + one.completion_tokens),
        cost_usd=grown(lambda one: one.cost_usd),
        peak_in_flight=max(itertools.accumulate(change for _, change in changes), default=0),
        most_requests=most_in_window(starts, window_s),
        most_tokens=most_in_window(starts, window_s, [bar.tokens for bar in bars]),
        held_s={str(reason): held_s for reason, held_s in waits.items()},
    )


def _late(outcome: Outcome, deadline_s: float) -> bool:
    if isinstance(outcome, Failed):
        return outcome.reason == "deadline"
    return outcome.verdict.latency_s > deadline_s


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop the log records of this thread, because the events of a rehearsal are simulated."""
    here = threading.get_ident()

    def of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != here

    with contextlib.ExitStack() as after:
        for name in ("qreward_plugins.engine", "qreward_plugins.scheduling"):
            logging.getLogger(name).addFilter(of_another_thread)
            after.callback(logging.getLogger(name).removeFilter, of_another_thread)
        yield
