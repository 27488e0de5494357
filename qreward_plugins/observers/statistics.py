"""Statistics: an observer that counts events, and frozen snapshots of its counts.

A new number is a field of a snapshot and a line of `Statistics` here, and nothing elsewhere, as long as the events
tell it. Snapshots are plain dataclasses of numbers and names, so that they can be printed, logged, compared and turned
to JSON without holding on to anything alive. Latencies are kept for the last `RECENT` answers of a source only: memory
must not grow with the length of a run.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..samples import Scored
from ..telemetry import BatchReport, WaitBySize, Waits, percentile
from .events import (
    AttemptEnded,
    AttemptStarted,
    BatchEnded,
    CallEnded,
    SampleEnded,
    SampleSubmitted,
)

RECENT = 4096


@dataclass(frozen=True)
class SourceStatistics:
    """One source so far. Latencies are seconds of answered attempts, the last `RECENT` of them; NaN before the
    first. `retries`: those that its failures caused, `retries_put_off` the part of them that had to wait for the retry
    budget. `learned`: what was found out about its limits beyond what was declared, in words; empty: nothing.
    """

    name: str
    state: str
    requests: int
    answered: int
    throttled: int
    transient: int
    timeouts: int
    permanent: int
    invalid: int
    hedges: int
    cancelled: int
    in_flight: int
    peak_in_flight: int
    latency_p50_s: float
    latency_p95_s: float
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    requests_share: float | None
    tokens_share: float | None
    paced: bool
    retries: int = 0
    retries_put_off: int = 0
    learned: str = ""


@dataclass(frozen=True)
class EngineStatistics:
    """The engine so far. `failed` counts samples without a number by cause and reason ("infra/deadline"); `floors`
    counts scored ones whose score is a floor, by what it stands in for ("policy/empty").
    """

    submitted: int
    scored: int
    failed: Mapping[str, int]
    cached: int
    attempts: int
    waiting: int
    sources: Mapping[str, SourceStatistics]
    floors: Mapping[str, int] = field(default_factory=dict)
    waits: WaitBySize | None = None
    """How long short and long samples waited for a source; None: they are too few, or all alike."""

    @property
    def failed_total(self) -> int:
        return sum(self.failed.values())


@dataclass(frozen=True)
class SourceGauges:
    """How a source stands now, as the scheduler sees it; see `SourceStatistics`."""

    state: str
    in_flight: int
    requests_share: float | None
    tokens_share: float | None
    paced: bool
    retries: int
    retries_put_off: int
    learned: str


class _Source:
    """What is counted of one source."""

    __slots__ = (
        "answered",
        "cancelled",
        "completion_tokens",
        "cost_usd",
        "hedges",
        "invalid",
        "latencies_s",
        "peak_in_flight",
        "permanent",
        "prompt_tokens",
        "requests",
        "throttled",
        "timeouts",
        "transient",
    )

    def __init__(self) -> None:
        self.requests = self.answered = self.throttled = self.transient = self.timeouts = self.permanent = 0
        self.invalid = self.hedges = self.cancelled = self.peak_in_flight = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.cost_usd = 0.0
        self.latencies_s: deque[float] = deque(maxlen=RECENT)

    def snapshot(self, name: str, gauges: SourceGauges) -> SourceStatistics:
        return SourceStatistics(
            name=name,
            state=gauges.state,
            requests=self.requests,
            answered=self.answered,
            throttled=self.throttled,
            transient=self.transient,
            timeouts=self.timeouts,
            permanent=self.permanent,
            invalid=self.invalid,
            hedges=self.hedges,
            cancelled=self.cancelled,
            in_flight=gauges.in_flight,
            peak_in_flight=self.peak_in_flight,
            latency_p50_s=percentile(self.latencies_s, 0.5),
            latency_p95_s=percentile(self.latencies_s, 0.95),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cost_usd=self.cost_usd,
            requests_share=gauges.requests_share,
            tokens_share=gauges.tokens_share,
            paced=gauges.paced,
            retries=gauges.retries,
            retries_put_off=gauges.retries_put_off,
            learned=gauges.learned,
        )


class Statistics:
    """Counts what happens."""

    def __init__(self) -> None:
        self.last_batch: BatchReport | None = None
        """The batch that ended last; None: none has."""
        self._submitted = self._scored = self._cached = self._attempts = 0
        self._failed: Counter[str] = Counter()
        self._floors: Counter[str] = Counter()
        self._waits = Waits()
        self._sources: defaultdict[str, _Source] = defaultdict(_Source)

    def reads(self) -> Mapping[type, Callable[[Any], None]]:
        """How it counts each type of event."""
        return {
            SampleSubmitted: self._sample_submitted,
            SampleEnded: self._sample_ended,
            CallEnded: self._call_ended,
            AttemptStarted: self._attempt_started,
            AttemptEnded: self._attempt_ended,
            BatchEnded: self._batch_ended,
        }

    def snapshot(self, gauges: Mapping[str, SourceGauges], *, waiting: int) -> EngineStatistics:
        """What was counted so far. `gauges` tell how the sources stand, `waiting` how many calls have no attempt under
        way.
        """
        return EngineStatistics(
            submitted=self._submitted,
            scored=self._scored,
            failed=dict(self._failed),
            floors=dict(self._floors),
            cached=self._cached,
            attempts=self._attempts,
            waiting=waiting,
            sources={name: self._sources[name].snapshot(name, now) for name, now in gauges.items()},
            waits=self._waits.by_size(),
        )

    def _sample_submitted(self, _: SampleSubmitted) -> None:
        self._submitted += 1

    def _sample_ended(self, event: SampleEnded) -> None:
        outcome = event.outcome
        if isinstance(outcome, Scored):
            verdict = outcome.verdict
            self._scored += 1
            self._cached += verdict.cached
            self._attempts += verdict.spent.attempts
            if verdict.failure is not None:
                self._floors[verdict.failure.label] += 1
        else:
            self._failed[outcome.label] += 1
            self._attempts += outcome.spent.attempts

    def _call_ended(self, event: CallEnded) -> None:
        if event.reason != "dropped":
            self._waits.add(event.size, event.waited_s)

    def _attempt_started(self, event: AttemptStarted) -> None:
        source = self._sources[event.source]
        source.requests += 1
        source.hedges += event.hedge
        if event.in_flight > source.peak_in_flight:
            source.peak_in_flight = event.in_flight

    def _attempt_ended(self, event: AttemptEnded) -> None:
        source, result = self._sources[event.source], event.result
        if result == "answered" or result == "invalid":
            source.answered += 1
            source.invalid += result == "invalid"
            source.latencies_s.append(event.seconds)
            source.prompt_tokens += event.usage.prompt_tokens
            source.completion_tokens += event.usage.completion_tokens
            source.cost_usd += event.cost_usd
        elif result == "cancelled":
            source.cancelled += 1
        elif result == "throttled":
            source.throttled += 1
        elif result == "refused":
            source.permanent += 1
        else:
            source.transient += 1
            source.timeouts += event.timed_out

    def _batch_ended(self, event: BatchEnded) -> None:
        self.last_batch = event.report
