"""The statistics of an accelerated function, and what its observers are told."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..observers import AttemptEnded, AttemptStarted, CallEnded, Observers
from ..observers.batch_report import percentile
from ..observers.events import AttemptResult
from ..samples.spent import NO_USAGE

if TYPE_CHECKING:
    from .call import Attempt

RECENT = 4096
"""Answered attempts whose latencies are kept."""


@dataclass(kw_only=True)
class FunctionStatistics:
    """One function so far, over all keys. Latencies are seconds of the last answered attempts; NaN before the first.

    `calls` = `answered` + the sum of `failed` + those `under_way`. A call that returned its default counts as failed.
    """

    name: str
    calls: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Failed calls by reason: `failed` (by its last error), `deadline`, `circuit_open`, `cancelled`, `closed`."""
    attempts: int = 0
    retries: int = 0
    hedges: int = 0
    in_flight: int = 0
    """Attempts that run now."""
    concurrency: int | None = None
    """Most attempts at once now, of all keys together; None: any number."""
    keys: int = 0
    latency_p50_s: float = math.nan
    latency_p95_s: float = math.nan

    @property
    def under_way(self) -> int:
        return self.calls - self.answered - self.failed.total()


class Tally:
    """Counts the calls and attempts of a function, and tells its observers of them."""

    def __init__(self, name: str, observers: Observers) -> None:
        self.so_far = FunctionStatistics(name=name)
        self._name, self._observers = name, observers
        self._latencies_s: deque[float] = deque(maxlen=RECENT)

    def attempt_started(self, attempt: Attempt, in_flight: int) -> None:
        """Count an attempt. `in_flight`: those that are under way at its key, with it."""
        self.so_far.attempts += 1
        self.so_far.hedges += attempt.hedge
        self.so_far.retries += attempt.number > 0 and not attempt.hedge
        if self._observers.watched:
            at, number, call, name = attempt.started_at, attempt.number, attempt.call.number, self._name
            started = AttemptStarted(at, call, number, name, name, attempt.hedge, in_flight)
            self._observers.emit(started)

    def attempt_ended(self, attempt: Attempt, result: AttemptResult, now: float, detail: str = "") -> None:
        """Count the end of an attempt. `detail`: what went wrong."""
        seconds, call = now - attempt.started_at, attempt.call
        if result == "answered":
            self._latencies_s.append(seconds)
        if self._observers.watched:
            ended = AttemptEnded(
                now, call.number, attempt.number, self._name, self._name, result, seconds, NO_USAGE, 0.0,
                attempt.timed_out, call.over, detail,
            )  # fmt: skip
            self._observers.emit(ended)

    def call_ended(self, call: int, reason: str, size: float, waited_s: float, attempts: int, now: float) -> None:
        """Count the end of a call. `reason`: why it failed; "": it did not."""
        if reason:
            self.so_far.failed[reason] += 1
        else:
            self.so_far.answered += 1
        if self._observers.watched:
            source = self._name if attempts else ""
            self._observers.emit(CallEnded(now, call, self._name, source, reason, int(size), waited_s, attempts))

    def statistics(self) -> FunctionStatistics:
        """The counts so far, without those of the limits."""
        p50_s, p95_s = (percentile(self._latencies_s, share) for share in (0.5, 0.95))
        return replace(self.so_far, failed=self.so_far.failed.copy(), latency_p50_s=p50_s, latency_p95_s=p95_s)
