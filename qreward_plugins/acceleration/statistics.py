"""The statistics of an accelerated function, and what its observers are told."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..observers import AttemptEnded, AttemptStarted, CallEnded, Observers
from ..observers.batch_report import percentile
from ..observers.events import AttemptResult
from ..samples.spent import NO_USAGE
from .limiter import ANY_NUMBER, Limiter

if TYPE_CHECKING:
    from .call import Attempt

RECENT = 4096
"""Answered attempts whose latencies are kept."""


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


class Tally:
    """Counts the calls and attempts of a function, and tells its observers of them."""

    def __init__(self, name: str, observers: Observers) -> None:
        self.name = name
        self._observers = observers
        self.calls = self.defaults = 0
        self.ends: Counter[str] = Counter()
        """Ended calls by the reason why they failed; "": answered."""
        self._attempts = self._retries = self._hedges = self._timeouts = self._peak = 0
        self._latencies_s: deque[float] = deque(maxlen=RECENT)

    def attempt_started(self, call: int, attempt: int, *, hedge: bool, now: float, in_flight: int) -> None:
        """Count an attempt, with which `in_flight` are under way at its key."""
        self._attempts += 1
        self._hedges += hedge
        self._retries += attempt > 0 and not hedge
        self._peak = max(self._peak, in_flight)
        if self._observers.watched:
            self._observers.emit(AttemptStarted(now, call, attempt, self.name, self.name, hedge, in_flight))

    def attempt_ended(self, call: int, attempt: Attempt, result: AttemptResult, now: float, detail: str = "") -> None:
        """Count the end of an attempt. `detail`: what went wrong."""
        seconds = now - attempt.started_at
        self._timeouts += attempt.timed_out
        if result == "answered":
            self._latencies_s.append(seconds)
        if self._observers.watched:
            ended = AttemptEnded(
                now, call, attempt.number, self.name, self.name, result, seconds, NO_USAGE, 0.0, attempt.timed_out,
                attempt.call.over, detail,
            )  # fmt: skip
            self._observers.emit(ended)

    def call_ended(self, call: int, reason: str, size: float, waited_s: float, attempts: int, now: float) -> None:
        """Count the end of a call."""
        self.ends[reason] += 1
        if self._observers.watched:
            source = self.name if attempts else ""
            self._observers.emit(CallEnded(now, call, self.name, source, reason, int(size), waited_s, attempts))

    def statistics(self, limiters: Sequence[Limiter]) -> FunctionStatistics:
        """The counts so far. `limiters`: those of its keys."""
        failed = {reason: count for reason, count in self.ends.items() if reason}
        most = sum(limiter.quota.concurrency for limiter in limiters)
        return FunctionStatistics(
            name=self.name,
            calls=self.calls,
            answered=self.ends[""],
            failed=failed,
            defaults=self.defaults,
            under_way=self.calls - self.ends.total(),
            attempts=self._attempts,
            retries=self._retries,
            hedges=self._hedges,
            timeouts=self._timeouts,
            in_flight=sum(len(limiter.live) for limiter in limiters),
            peak_in_flight=self._peak,
            concurrency=most if most < ANY_NUMBER else None,
            keys=len(limiters),
            open_circuits=sum(not limiter.breaker.closed for limiter in limiters),
            latency_p50_s=percentile(self._latencies_s, 0.5),
            latency_p95_s=percentile(self._latencies_s, 0.95),
        )
