"""Simulates one step in virtual time, with the production engine, the user's configuration and simulated servers.

The simulated step is one in the middle of a run. A few samples are scored first, so that the engine learns the latency
of its sources. The quota windows are empty when the step begins, because generation and training take longer than a
window.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..config import Config, judge_for
from ..engine.engine import RewardEngine
from ..errors import ConfigurationError, Mistake, SampleRefused
from ..judges import kind_of as judge_kind_of
from ..observers.batch_report import BatchReport
from ..quotas.shares import shares
from ..samples import Failed, Outcome, Sample
from ..samples.spent import Usage
from ..sharing.keeper import Keeper
from ..sharing.messages import Answer, Report
from ..simulation.clock import run
from ..simulation.draws import Luck, prompt_tokens, score_of
from ..simulation.servers import Server
from ..simulation.simulated_server import Asked, Ending, Sent, Served, SimulatedServer, most_at_once
from ..simulation.trial_player import quiet
from ..sources import Reply, Request, kind_of
from .picture import Bar, BarEnd, Timeline, most_in_window
from .rollouts import Rollouts

AMPLE_DEADLINE_S = 360_000.0
FIXED = 0.5
"""The part of the time of a request of one call that does not grow with the number of its calls."""
_WARM_UP = 64


@dataclass(frozen=True)
class Truth:
    """The assumed properties of a source that are not in its configuration."""

    server: Server
    """Its speed and its faults, without its limits."""
    latency_from: str
    """Who says so: "assumed", "given", "journal"."""
    verdict_tokens: float
    slots: int | None = None
    """Calls that a function runs at once; None: any number."""

    @property
    def latency_s(self) -> float:
        """Seconds of an average request of one call."""
        return self.server.seconds_per_unit


@dataclass(frozen=True)
class SourceUse:
    """The use of one source in a step, or its mean over several. Shares go from 0 to 1."""

    name: str
    requests: float
    calls_per_request: float
    """Mean calls of a request. 1 for a source without `batch`."""
    tokens: float
    """Tokens of its answered requests."""
    latency_s: float
    """The latency that the plan assumes, of a request of one call."""
    latency_from: str
    """Who says so: "assumed", "given", "journal"."""
    requests_used: float | None
    """The fullest window, as a part of the limit of requests; `tokens_used` the same of tokens. None: no limit."""
    tokens_used: float | None
    concurrency: int | None
    """Requests it works on at once; None: not declared, so any number."""
    peak_in_flight: int
    out_of_places: float
    """Part of the step in which all places were taken."""
    cost_usd: float | None
    """None: it has no price."""


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
    uses: Mapping[str, SourceUse]
    timeline: Timeline


@dataclass(frozen=True)
class Rehearsal:
    """A configuration, the assumed properties of its sources, and the rollouts of a step. Picklable."""

    config: Config
    truths: Mapping[str, Truth]
    rollouts: Rollouts
    workers: int = 1
    """Engines that divide the samples, and share the limits through one keeper."""

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
        luck, sent = Luck(seed), list[Sent]()
        played = self._played(luck, sent)
        async with contextlib.AsyncExitStack() as opened:
            engines = [
                await opened.enter_async_context(RewardEngine(seeded, sources=played, channel=channel))
                for channel in self._channels()
            ]
            await _score(engines, first)
            await asyncio.sleep(2 * max(server.server.window_s for server in played.values()) + 1)
            before = _spent(engines)
            sent.clear()
            start_s = asyncio.get_running_loop().time()
            outcomes = await _score(engines, samples)
            # The engine that ends last says what the step waited for.
            last = max(engines, key=lambda engine: report.makespan_s if (report := engine.last_batch()) else 0.0)
            report, spent = last.last_batch(), _spent(engines)
            # Cancelled attempts end, and are recorded, when their tasks next run.
            await asyncio.sleep(1e-3)
            makespan_s = report.makespan_s if report else 0.0
            timeline = Timeline(tuple(played), _bars(sent, start_s, makespan_s), makespan_s, self.rollouts.count)
            waits = {name: last.upstreams[name].wait_reasons.seconds(start_s, start_s + makespan_s) for name in played}
        uses = {
            name: self._use(
                [one for one in sent if one.source == name],
                source.server,
                out_of_places=waits[name].get("queue", 0.0) / (makespan_s or 1.0),
                cost_usd=spent[name] - before[name],
            )
            for name, source in played.items()
        }
        unjudged = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        failures = [failed for failed in unjudged if failed.reason != "deadline"]
        return Run(
            seed=seed,
            makespan_s=makespan_s,
            cost_usd=sum(use.cost_usd or 0.0 for use in uses.values()),
            scored=len(outcomes) - len(unjudged),
            late=sum(_late(outcome, self.config.engine.deadline_s) for outcome in outcomes),
            failed=Counter(failed.label for failed in failures),
            example=failures[0].describe() if failures else "",
            attempts=sum(round(use.requests * use.calls_per_request) for use in uses.values()),
            report=report,
            uses=uses,
            timeline=timeline,
        )

    def _channels(self) -> Sequence[_Channel | None]:
        """The connections of the engines to the keeper that they share; None for one engine, which needs no keeper."""
        if self.workers == 1:
            return [None]
        keeper = Keeper(first=True)
        return [_Channel(keeper, f"worker {number}") for number in range(self.workers)]

    def _played(self, luck: Luck, record: list[Sent]) -> dict[str, PlayedSource]:
        return {
            name: PlayedSource(self._server(name), luck, self.config, self.truths[name], record)
            for name in self.config.sources
        }

    def _server(self, name: str) -> Server:
        """Return a simulated server with the declared limits; what is not declared is unlimited. Raises
        `ConfigurationError` for limits that cannot be kept.
        """
        source, truth = self.config.sources[name], self.truths[name]
        limits = source.limits
        parts = shares(limits, source=name, processes=1, slots=truth.slots)
        try:
            return replace(
                truth.server,
                name=name,
                requests_per_minute=limits.requests_per_minute,
                tokens_per_minute=limits.tokens_per_minute,
                concurrency=parts.concurrency,
                window="bucket" if limits.window == "bucket" else "sliding",
                burst=limits.burst,
                window_s=parts.window_s,
                batch=getattr(source, "batch", None),
            )
        except ValueError as error:
            raise ConfigurationError([Mistake(f"sources.{name}.limits", f"{error}.")]) from None

    def _use(self, sent: Sequence[Sent], server: Server, *, out_of_places: float, cost_usd: float) -> SourceUse:
        truth, starts = self.truths[server.name], [one.started_at for one in sent]
        requests = sum(one.leads for one in sent)

        def used(limit: int | None, weights: Sequence[float]) -> float | None:
            return None if limit is None else most_in_window(starts, server.window_s, weights) / max(limit, 1)

        return SourceUse(
            name=server.name,
            requests=requests,
            calls_per_request=len(sent) / requests if requests else 1.0,
            tokens=sum(one.tokens for one in sent if one.ending == "valid"),
            latency_s=truth.latency_s,
            latency_from=truth.latency_from,
            requests_used=used(server.requests_per_window, [one.leads for one in sent]),
            tokens_used=used(server.tokens_per_window, [one.tokens for one in sent]),
            concurrency=server.concurrency,
            peak_in_flight=most_at_once(sent),
            out_of_places=out_of_places,
            cost_usd=None if self.config.sources[server.name].price.is_zero else cost_usd,
        )


class PlayedSource(SimulatedServer):
    """A simulated server that answers in the form that the sample's judge reads, for all judges of the configuration
    (language models, services and functions). So the engine reads verdicts as strictly as in a real run. If the
    configured source has a `batch`, a request takes several calls; its work is `FIXED`, plus the rest for each of them.
    """

    further_call = 1 - FIXED

    def __init__(self, server: Server, luck: Luck, config: Config, truth: Truth, record: list[Sent]) -> None:
        super().__init__(server, luck, record)
        self.slots = truth.slots
        self._config = config
        self._verdict_tokens = round(truth.verdict_tokens)

    def asked(self, request: Request) -> Asked:
        """A call of work 1, named for the sample; for a part of a sum also for the judge: its luck is independent."""
        sample = request.sample
        whole = judge_for(self._config, sample.data_source) == request.judge
        name = sample.id or "" if whole else f"{sample.id} {request.judge}"
        if kind_of(self._config.sources[self.name]).local:
            return Asked(name, None, 1.0, 0, 0)
        # Only a language model writes tokens.
        completion = self._verdict_tokens if request.messages else 0
        most = request.max_completion_tokens or completion
        return Asked(name, None, 1.0, prompt_tokens(request.size), min(completion, most))

    def replied(self, request: Request, call: Asked, served: Served, *, valid: bool) -> Reply:
        """A valid verdict."""
        judge = self._config.judges.get(request.judge)
        if judge is None:
            raise SampleRefused("the request has no name of a judge (Request.judge), so its reply cannot be simulated")
        reply = judge_kind_of(judge).rehearsed(judge, request, score_of(request.sample.id or "") / 10)
        usage = Usage(call.prompt_tokens, call.completion_tokens) if call.prompt_tokens else None
        return replace(reply, usage=usage, model="simulated")


class _Channel:
    """The `Channel` of one engine to a keeper in the same event loop."""

    def __init__(self, keeper: Keeper, worker: str) -> None:
        self._keeper = keeper
        self._worker = worker

    async def exchange(self, report: Report) -> Answer | None:
        # A random name would give another schedule in each run.
        return await self._keeper.exchange(report._replace(worker=self._worker))

    async def end_keeper(self) -> None:
        return None


_ENDS: Mapping[Ending, BarEnd] = {"valid": "answered", "throttled": "failed", "failed": "failed"}


def _bars(sent: Sequence[Sent], start_s: float, makespan_s: float) -> tuple[Bar, ...]:
    """The requests of a step as bars."""
    return tuple(
        Bar(
            one.source,
            _ENDS.get(one.ending, "cancelled"),
            one.started_at - start_s,
            min(one.ended_at - start_s, makespan_s),
            one.tokens,
        )
        for one in sent
        if one.leads
    )


def _spent(engines: Sequence[RewardEngine]) -> Counter[str]:
    """The dollars that the engines have spent, by source."""
    spent = Counter[str]()
    for engine in engines:
        spent.update({name: source.cost_usd for name, source in engine.statistics().sources.items()})
    return spent


async def _score(engines: Sequence[RewardEngine], samples: Sequence[Sample]) -> list[Outcome]:
    """Deal the samples out to the engines, and return all outcomes."""
    parts = [samples[number :: len(engines)] for number in range(len(engines))]
    scored = await asyncio.gather(*map(RewardEngine.score_all, engines, parts))
    return [outcome for outcomes in scored for outcome in outcomes]


def _late(outcome: Outcome, deadline_s: float) -> bool:
    if isinstance(outcome, Failed):
        return outcome.reason == "deadline"
    return outcome.verdict.latency_s > deadline_s
