"""Simulates one step in virtual time, with the production engine, the user's configuration and simulated servers.

The simulated step is one in the middle of a run. A few samples are scored first, so that the engine learns the latency
of its sources. The quota windows are empty when the step begins, because generation and training take longer than a
window.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from ..config import Config
from ..engine.engine import RewardEngine
from ..errors import ConfigurationError, EngineError, Mistake
from ..observers import SourceStatistics
from ..observers.batch_report import BatchReport
from ..quotas.shares import shares
from ..samples import Failed, Outcome, Sample
from ..scheduling.batches import WaitReason
from ..sharing.keeper import Keeper, KeeperLoop
from ..sharing.messages import Answer, Report
from ..simulation.clock import run
from ..simulation.draws import Luck
from ..simulation.servers import Server
from ..simulation.simulated_server import SimulatedServer
from ..simulation.trial_player import quiet
from ..system.processes import process_pool, terminate
from .picture import Bar, Timeline, most_in_window
from .played import PlayedSource
from .rollouts import Rollouts

Task: TypeAlias = "tuple[Rehearsal, int]"
"""The rehearsal, and its seed."""


class Runner:
    """Runs tasks. It is a context manager that ends its processes. Their number does not change a result."""

    def __init__(self, processes: int, progress: Callable[[int, int], None] | None = None) -> None:
        self._progress = progress
        self._done = self._total = 0
        self._pool = process_pool(processes) if processes > 1 else None

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
    rehearsal, seed = task
    return rehearsal.run(seed)


AMPLE_DEADLINE_S = 360_000.0
_WARM_UP = 64
_STRAGGLER_FACTOR = 10.0


@dataclass(frozen=True)
class Truth:
    """The assumed properties of a source that are not in its configuration. Times are seconds."""

    latency_s: float
    spread: float
    straggler_share: float
    error_share: float
    verdict_tokens: float
    slots: int | None = None
    """Calls that a function runs at once; None: any number."""


@dataclass(frozen=True)
class Use:
    """The use of one source in a step. Shares go from 0 to 1."""

    requests: int
    calls: int
    """Calls that these requests carried."""
    tokens: int
    """Tokens of the requests that were answered."""
    cost_usd: float
    peak_in_flight: int
    requests_used: float | None
    """The fullest window, as a part of the limit of requests; `tokens_used` the same of tokens. None: no limit."""
    tokens_used: float | None
    out_of_places: float
    """Part of the step in which all places were taken."""


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
    timeline: Timeline


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

    def check(self) -> None:
        """Build an engine. Raises `ConfigurationError` for the mistakes that a run would report."""
        RewardEngine(self._engine_config, sources=self._played(Luck(), []))

    def run(self, seed: int) -> Run:
        """Rehearse one step; the same seed gives the same step."""
        with quiet():
            return run(self._step(seed))

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

    async def _step(self, seed: int) -> Run:
        config = self._engine_config
        seeded = config.model_copy(update={"engine": config.engine.model_copy(update={"seed": seed})})
        samples = self.rollouts.samples(seed)
        first = self.rollouts.samples(seed, prefix="first ", count=min(len(samples), _WARM_UP))
        luck, kept = Luck(seed), list[Bar]()
        played = self._played(luck, kept)
        async with contextlib.AsyncExitStack() as opened:
            engines = [
                await opened.enter_async_context(RewardEngine(seeded, sources=played, channel=channel))
                for channel in self._channels()
            ]
            await _score(engines, first)
            await asyncio.sleep(2 * max(server.server.server.window_s for server in played.values()) + 1)
            before = [engine.statistics().sources for engine in engines]
            kept.clear()
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
                    server=source.server.server,
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
            timeline=timeline,
        )

    def _channels(self) -> Sequence[_Channel | None]:
        """The connections of the engines to the keeper that they share; None for one engine, which needs no keeper."""
        if self.workers == 1:
            return [None]
        keeper = KeeperLoop(Keeper(asyncio.get_running_loop().time(), boot="", first=True))
        return [_Channel(keeper, f"worker {number}") for number in range(self.workers)]

    def _played(self, luck: Luck, record: list[Bar]) -> dict[str, PlayedSource]:
        return {
            name: PlayedSource(
                SimulatedServer(server, luck),
                self.config,
                slots=self.truths[name].slots,
                verdict_tokens=self.truths[name].verdict_tokens,
                record=record,
            )
            for name, server in self.servers().items()
        }

    def _server(self, name: str) -> Server:
        source, truth = self.config.sources[name], self.truths[name]
        limits = source.limits
        parts = shares(limits, source=name, processes=1, slots=truth.slots)
        try:
            return Server(
                name,
                requests_per_minute=limits.requests_per_minute,
                tokens_per_minute=limits.tokens_per_minute,
                concurrency=parts.concurrency,
                window="bucket" if limits.window == "bucket" else "sliding",
                burst=limits.burst,
                window_s=parts.window_s,
                seconds_per_unit=truth.latency_s,
                overhead_s=0.0,
                noise=truth.spread,
                straggler_share=truth.straggler_share,
                straggler_factor=_STRAGGLER_FACTOR,
                error_share=truth.error_share,
                network_s=(0.0, 0.0),
            )
        except ValueError as error:
            raise ConfigurationError([Mistake(f"sources.{name}.limits", f"{error}.")]) from None

    def _timeline(
        self, record: Sequence[Bar], start_s: float, makespan_s: float, played: Mapping[str, PlayedSource]
    ) -> Timeline:
        bars = tuple(
            replace(bar, start_s=bar.start_s - start_s, end_s=min(bar.end_s - start_s, makespan_s)) for bar in record
        )
        return Timeline(tuple(played), bars, makespan_s, self.rollouts.count)


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
    server: Server,
    waits: Mapping[WaitReason, float],
) -> Use:
    def grown(count: Callable[[SourceStatistics], float]) -> Any:
        return sum(map(count, afters)) - sum(map(count, befores))

    bars = timeline.of(afters[0].name)
    changes = sorted([(bar.start_s, 1) for bar in bars] + [(bar.end_s, -1) for bar in bars])
    starts = [bar.start_s for bar in bars]

    def used(limit: int | None, weights: Sequence[float] | None = None) -> float | None:
        return None if limit is None else most_in_window(starts, server.window_s, weights) / max(limit, 1)

    return Use(
        requests=len(bars),
        calls=grown(lambda one: one.requests),
        tokens=grown(lambda one: one.prompt_tokens + one.completion_tokens),
        cost_usd=grown(lambda one: one.cost_usd),
        peak_in_flight=max(itertools.accumulate(change for _, change in changes), default=0),
        requests_used=used(server.requests_per_window),
        tokens_used=used(server.tokens_per_window, [bar.tokens for bar in bars]),
        out_of_places=waits.get("queue", 0.0) / (timeline.makespan_s or 1.0),
    )


def _late(outcome: Outcome, deadline_s: float) -> bool:
    if isinstance(outcome, Failed):
        return outcome.reason == "deadline"
    return outcome.verdict.latency_s > deadline_s
