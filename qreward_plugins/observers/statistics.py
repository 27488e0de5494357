"""Statistics: the counts of an engine, and snapshots of them.

For a new number, add a field to a snapshot and a line to `Statistics`. Snapshots are plain
dataclasses of numbers and names, to be printed, logged, compared and turned into JSON. Only the last `RECENT` latencies
of a source are kept, because memory must not grow with the length of a run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

from ..samples import Outcome, Scored
from ..samples.spent import NO_USAGE, Usage
from .batch_report import BatchReport, percentile
from .events import AttemptResult

RECENT = 4096

Health = Literal["up", "half_open", "backing_off", "draining", "down"]
"""`up`: it answers. `backing_off`: it failed, and is avoided for a while. `half_open`: that time is over, and one call
finds out. `draining`: it finishes its calls and gets no more. `down`: it is not there."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStatistics:
    """One replica of a source so far."""

    base_url: str
    health: Health
    in_flight: int
    """Requests under way."""
    pending_tokens: int
    """Tokens of the requests under way, prompt and completion, as estimated when they were sent."""
    requests: int
    """Requests that were sent to it."""
    failures: int
    """Those of them that it did not answer, or answered with a status from 500 on, a refusal that may concern all
    requests (401, 404, a redirect ...), what cannot be read, or a refusal (400, 413, 422) of what another one
    answered."""
    prompt_tokens: int
    """Prompt tokens of its replies, as it stated them."""
    cached_tokens: int
    """The part of them that it read from its prefix cache, if it says so."""
    prefix_hit_rate: float
    """Share of the prompt tokens that came from the prefix cache; NaN for a server that does not state it."""
    cache_use: float | None
    """Share of the server's KV cache that is in use, from 0 to 1; None if it is not known (see the strategy
    `kv_cache`)."""
    version: str = ""
    """The version of its weights; "" for those of the configuration."""


@dataclass(frozen=True, kw_only=True)
class SourceGauges:
    """The present state of a source in the scheduler. `retries` are the retries that its failures caused.
    `learned` describes learned limits; empty if there are
    none. `budget_left_usd` is what it may still spend; None without a budget. `replicas` are its servers, if it has
    several.
    """

    state: str
    in_flight: int
    requests_share: float | None
    tokens_share: float | None
    paced: bool
    retries: int = 0
    learned: str = ""
    budget_left_usd: float | None = None
    replicas: tuple[ReplicaStatistics, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SourceStatistics(SourceGauges):
    """One source so far. Latencies are seconds of the last `RECENT` answered attempts; NaN before the first."""

    name: str
    requests: int
    answered: int
    throttled: int
    transient: int
    timeouts: int
    permanent: int
    invalid: int
    hedges: int
    cancelled: int
    peak_in_flight: int
    latency_p50_s: float
    latency_p95_s: float
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    batches: int = 0
    """Requests that could carry several calls (`batch` of the source). `requests` counts every call."""
    batched: int = 0
    """Calls that these requests carried."""

    first_token_p50_s: float = math.nan
    """Seconds from sending to the first token, of the last `RECENT` streamed replies; NaN before the first."""
    cached_tokens: int = 0
    """The part of `prompt_tokens` that the server read from its cache, as far as it says so."""
    thinking_tokens: int = 0
    """The part of `completion_tokens` that the model spent on thoughts, as far as the server says so."""


@dataclass(frozen=True)
class EngineStatistics:
    """The engine so far. `failed` counts failed samples by cause and reason ("infra/deadline"). `floors` counts scored
    samples whose score is a floor, by the failure that it replaces ("policy/empty").
    """

    submitted: int
    scored: int
    failed: Mapping[str, int]
    cached: int
    attempts: int
    waiting: int
    sources: Mapping[str, SourceStatistics]
    floors: Mapping[str, int] = field(default_factory=dict)
    merged: int = 0
    """Calls that an equal one, which was under way, has answered (`engine.ask_once`)."""
    limits_kept_by: str = ""
    """Who shares the limits between processes: "this process", "process 12 of this machine", "an actor of the Ray job"
    or a reward server; empty if nobody does, or nobody has answered yet."""

    @property
    def failed_total(self) -> int:
        return sum(self.failed.values())


class _Source:
    """The counters of one source, by the names of `SourceStatistics`, and its recent latencies."""

    __slots__ = ("counts", "first_tokens_s", "latencies_s")

    def __init__(self) -> None:
        self.counts: dict[str, float] = dict.fromkeys(COUNTED, 0)
        self.latencies_s: deque[float] = deque(maxlen=RECENT)
        self.first_tokens_s: deque[float] = deque(maxlen=RECENT)

    def snapshot(self, name: str, gauges: SourceGauges) -> SourceStatistics:
        return SourceStatistics(
            name=name,
            latency_p50_s=percentile(self.latencies_s, 0.5),
            latency_p95_s=percentile(self.latencies_s, 0.95),
            first_token_p50_s=percentile(self.first_tokens_s, 0.5),
            **cast(Any, self.counts),
            # Not `asdict`, which would turn the replicas into mappings.
            **{each.name: getattr(gauges, each.name) for each in fields(gauges)},
        )


COUNTED = [
    each.name
    for each in fields(SourceStatistics)
    if each.name not in {"name", *(gauge.name for gauge in fields(SourceGauges))} and not each.name.endswith("_s")
]
_COUNTED_AS = {"cancelled": "cancelled", "throttled": "throttled", "refused": "permanent"}


class Statistics:
    """Counts what happens, where it happens: events take several times as long."""

    def __init__(self) -> None:
        self.last_batch: BatchReport | None = None
        """The batch that ended last; None if none has ended."""
        self._submitted = self._scored = self._cached = self._attempts = self._merged = 0
        self._failed: Counter[str] = Counter()
        self._floors: Counter[str] = Counter()
        self._sources: defaultdict[str, _Source] = defaultdict(_Source)

    def snapshot(
        self, gauges: Mapping[str, SourceGauges], *, waiting: int, limits_kept_by: str = ""
    ) -> EngineStatistics:
        """The counts so far. `gauges` are the present states of the sources; `waiting` is the number of calls without a
        running attempt; `limits_kept_by` is who shares the limits between processes.
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
            merged=self._merged,
            limits_kept_by=limits_kept_by,
        )

    def sample_submitted(self) -> None:
        """Count a sample."""
        self._submitted += 1

    def sample_ended(self, outcome: Outcome) -> None:
        """Count the outcome of a sample."""
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

    def call_merged(self) -> None:
        """Count a call that an equal one has answered."""
        self._merged += 1

    def attempt_started(self, source: str, *, hedge: bool, in_flight: int) -> None:
        """Count an attempt. `in_flight`: those at its source, this one included."""
        counts = self._sources[source].counts
        counts["requests"] += 1
        counts["hedges"] += hedge
        if in_flight > counts["peak_in_flight"]:
            counts["peak_in_flight"] = in_flight

    def request_batch_sent(self, source: str, calls: int) -> None:
        """Count a request that carries several calls."""
        counts = self._sources[source].counts
        counts["batches"] += 1
        counts["batched"] += calls

    def attempt_ended(
        self,
        source: str,
        result: AttemptResult,
        seconds: float,
        usage: Usage,
        cost_usd: float,
        timed_out: bool,
        first_token_s: float | None,
    ) -> None:
        """Count the end of an attempt; the arguments are fields of `AttemptEnded`."""
        its = self._sources[source]
        counts = its.counts
        if result not in ("answered", "invalid"):
            counts[_COUNTED_AS.get(result, "transient")] += 1
            counts["timeouts"] += timed_out and result == "failed"
            return
        counts["answered"] += 1
        counts["invalid"] += result == "invalid"
        counts["cost_usd"] += cost_usd
        its.latencies_s.append(seconds)
        if first_token_s is not None:
            its.first_tokens_s.append(first_token_s)
        if usage is not NO_USAGE:
            counts["prompt_tokens"] += usage.prompt_tokens
            counts["completion_tokens"] += usage.completion_tokens
            counts["cached_tokens"] += usage.cached_tokens
            counts["thinking_tokens"] += usage.thinking_tokens
