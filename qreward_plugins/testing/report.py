"""Counts what a judge server sees.

Tests assert on these numbers (above all: no violation), so each has one exact meaning, and the ends of the requests
add up: when nothing is in flight, `requests == answered + violations_total + refused + abandoned + scorer_errors_total
+ sum(faults.values())`. The server's thread writes the tally and any thread reads it, so it has a lock. Its memory is
bounded.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..observers.batch_report import percentile
from ..simulation.strict_limits import LimitKind

KEPT_VIOLATIONS = 1_000
KEPT_LATENCIES = 10_000
KEPT_SCORER_ERRORS = 20
_MAX_ERROR_CHARS = 300
_COUNTED = (
    *("requests", "answered", "refused", "abandoned", "in_flight", "peak_concurrency", "max_requests_in_window"),
    *("prompt_tokens", "completion_tokens", "scorer_errors_total", "connections"),
)
"""The fields of a report that are counts of a tally."""


@dataclass(frozen=True)
class Violation:
    """A request that arrived over a limit."""

    kind: LimitKind
    at_s: float
    """When, in seconds since the server's first start."""
    over: float
    """How far it was over the limit: requests, tokens, or requests in flight."""
    early_s: float | None
    """How much later it would have been admitted, in seconds. None for concurrency."""


@dataclass(frozen=True)
class Report:
    """A snapshot of a judge server's counts of requests for completions and scores."""

    elapsed_s: float
    """Seconds since the first start."""
    requests: int
    """Requests that arrived."""
    answered: int
    """Answers of the scorer that were sent without a fault."""
    refused: int
    """Requests with a client's mistake: an invalid key, an unknown model, an invalid body."""
    abandoned: int
    """Requests whose client disconnected (or whose server stopped) before the answer, without those that got a fault.
    """
    in_flight: int
    """Admitted requests without an answer so far."""
    peak_concurrency: int
    """The most requests in flight at once."""
    throttled: int
    """Answers with status 429, also those of faults."""
    statuses: Mapping[int, int]
    """Answers by HTTP status."""
    faults: Mapping[str, int]
    """Injected faults by kind."""
    violations: Sequence[Violation]
    """The first 1,000 violations."""
    violations_total: int
    violations_by_kind: Mapping[str, int]
    max_requests_in_window: int
    """The largest number of requests that arrived within any `window_s`, admitted or not."""
    window_s: float
    prompt_tokens: int
    """Tokens of the admitted prompts."""
    completion_tokens: int
    """Tokens of the completions, also of those with a fault."""
    latency_p50_s: float | None
    """From arrival to answer, over the latest 10,000 answers. None before the first."""
    latency_p95_s: float | None
    scorer_errors: Sequence[str]
    """The first 20 exceptions of the scorer."""
    scorer_errors_total: int
    connections: int
    """Connections that were opened."""


class Tally:
    """Counts for one server. Thread-safe. Times are in seconds since the server's first start."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._changed = threading.Condition(threading.Lock())
        self._counts: Counter[str] = Counter()
        self._statuses: Counter[int] = Counter()
        self._violations: list[Violation] = []
        self._scorer_errors: list[str] = []
        self._arrivals: deque[float] = deque()
        self._latencies: deque[float] = deque(maxlen=KEPT_LATENCIES)

    def count(self, *names: str, status: int | None = None, **amounts: int) -> None:
        """Add one to each of `names` and to a status, and each of `amounts` to its name."""
        with self._changed:
            self._counts.update(names)
            self._counts.update(amounts)
            if status is not None:
                self._statuses[status] += 1
            self._changed.notify_all()

    def arrived(self, at_s: float) -> None:
        with self._changed:
            arrivals = self._arrivals
            arrivals.append(at_s)
            while at_s - arrivals[0] >= self._window_s:
                arrivals.popleft()
            self._counts["max_requests_in_window"] = max(self._counts["max_requests_in_window"], len(arrivals))
        self.count("requests")

    def in_flight(self, change: int) -> None:
        with self._changed:
            now = self._counts["in_flight"] + change
            self._counts["peak_concurrency"] = max(self._counts["peak_concurrency"], now)
        self.count(in_flight=change)

    def violated(self, violation: Violation) -> None:
        with self._changed:
            if len(self._violations) < KEPT_VIOLATIONS:
                self._violations.append(violation)
        self.count(f"violation {violation.kind}", status=429)

    def answered(self, latency_s: float) -> None:
        with self._changed:
            self._latencies.append(latency_s)
        self.count("answered", status=200)

    def scorer_failed(self, error: BaseException) -> None:
        with self._changed:
            if len(self._scorer_errors) < KEPT_SCORER_ERRORS:
                self._scorer_errors.append(f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS])
        self.count("scorer_errors_total", status=500)

    def snapshot(self, elapsed_s: float) -> Report:
        with self._changed:
            return self._snapshot(elapsed_s)

    def wait_for(
        self, predicate: Callable[[Report], bool], elapsed_s: Callable[[], float], timeout_s: float
    ) -> Report | None:
        """Block until the predicate holds for a snapshot, and return that one. None after `timeout_s` seconds."""
        report: list[Report] = []

        def holds() -> bool:
            report[:] = [self._snapshot(elapsed_s())]
            return predicate(report[0])

        with self._changed:
            return report[0] if self._changed.wait_for(holds, timeout_s) else None

    def _snapshot(self, elapsed_s: float) -> Report:
        counts = self._counts
        violations = self._of("violation ")
        return Report(
            elapsed_s=elapsed_s,
            throttled=self._statuses[429],
            statuses={status: count for status, count in sorted(self._statuses.items()) if count},
            faults=self._of("fault "),
            violations=tuple(self._violations),
            violations_total=sum(violations.values()),
            violations_by_kind=violations,
            window_s=self._window_s,
            latency_p50_s=percentile(self._latencies, 0.50) if self._latencies else None,
            latency_p95_s=percentile(self._latencies, 0.95) if self._latencies else None,
            scorer_errors=tuple(self._scorer_errors),
            **{name: counts[name] for name in _COUNTED},
        )

    def _of(self, kind: str) -> dict[str, int]:
        """The counts whose names begin so, by the rest of their names."""
        return {name.removeprefix(kind): self._counts[name] for name in sorted(self._counts) if name.startswith(kind)}
