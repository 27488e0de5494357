"""The statistics of an accelerated function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..observers import AttemptEnded, AttemptStarted, SourceGauges, Statistics
from ..scheduling import Upstream


@dataclass(frozen=True, kw_only=True)
class FunctionStatistics:
    """One function so far, over all keys. Latencies are seconds of the last answered attempts; NaN before the first.

    `calls` = `answered` + `failed_total` + those `under_way`. A call that failed and returned its default counts as
    failed, and among the `defaults`.
    """

    name: str
    calls: int
    answered: int
    failed: Mapping[str, int] = field(default_factory=dict)
    """Failed calls by reason: `failed` (by its last error), `deadline`, `circuit_open`, `cancelled`, `closed`."""
    defaults: int = 0
    under_way: int = 0
    attempts: int = 0
    retries: int = 0
    hedges: int = 0
    timeouts: int = 0
    in_flight: int = 0
    """Attempts that run now."""
    peak_in_flight: int = 0
    concurrency: int | None = None
    """Most attempts at once now, of all keys together; None: any number."""
    keys: int = 0
    open_circuits: int = 0
    """Keys whose circuit is open."""
    latency_p50_s: float
    latency_p95_s: float

    @property
    def failed_total(self) -> int:
        return sum(self.failed.values())

    @classmethod
    def of(
        cls,
        name: str,
        counted: AttemptStatistics,
        upstreams: Sequence[Upstream],
        *,
        now: float,
        calls: int,
        ends: Mapping[str, int],
        defaults: int,
    ) -> FunctionStatistics:
        """Make the statistics of a function from the counts of its attempts and calls."""
        idle = SourceGauges(state="up", in_flight=0, requests_share=None, tokens_share=None, paced=False)
        source = counted.snapshot({name: idle}, waiting=0).sources[name]
        failed = {reason: count for reason, count in ends.items() if reason}
        answered = ends.get("", 0)
        under_way = calls - answered - sum(failed.values())
        most = sum(upstream.quota.concurrency for upstream in upstreams)
        return cls(
            name=name,
            calls=calls,
            answered=answered,
            failed=failed,
            defaults=defaults,
            under_way=under_way,
            attempts=source.requests,
            retries=counted.retries,
            hedges=source.hedges,
            timeouts=source.timeouts,
            in_flight=sum(len(upstream.live) for upstream in upstreams),
            peak_in_flight=source.peak_in_flight,
            concurrency=most if most < 1_000_000 else None,
            keys=len(upstreams),
            open_circuits=sum(not upstream.breaker.closed for upstream in upstreams),
            latency_p50_s=source.latency_p50_s,
            latency_p95_s=source.latency_p95_s,
        )


class AttemptStatistics(Statistics):
    """Counts attempts, and those that followed a failed one (`retries`). It reads nothing about calls and batches: a
    report of each call that is made alone would cost as much as the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.retries = 0

    def reads(self) -> Mapping[type, Callable[[Any], None]]:
        """The handler of each type of event."""
        return {AttemptStarted: self._attempt_started, AttemptEnded: self._attempt_ended}

    def _attempt_started(self, event: AttemptStarted) -> None:
        super()._attempt_started(event)
        self.retries += event.attempt > 0 and not event.hedge
