"""What happened, as counters while it happens and as frozen snapshots for whoever asks.

Snapshots are plain dataclasses of numbers and names, so that they can be printed, logged, compared and turned to JSON
without holding on to anything alive. Latencies are kept for the last `RECENT` answers of a source only: memory must
not grow with the length of a run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..samples import Outcome, Scored
from ..spent import Usage
from .waiting import WaitBySize

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


@dataclass
class SourceCounters:
    """What is counted of one source while it works."""

    requests: int = 0
    answered: int = 0
    throttled: int = 0
    transient: int = 0
    timeouts: int = 0
    permanent: int = 0
    invalid: int = 0
    hedges: int = 0
    cancelled: int = 0
    peak_in_flight: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float = 0.0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


@dataclass
class EngineCounters:
    """What is counted of an engine while it works."""

    submitted: int = 0
    scored: int = 0
    cached: int = 0
    attempts: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    floors: Counter[str] = field(default_factory=Counter)

    def count(self, outcome: Outcome) -> None:
        """Count one outcome."""
        if isinstance(outcome, Scored):
            verdict = outcome.verdict
            self.scored += 1
            self.cached += verdict.cached
            self.attempts += verdict.spent.attempts
            if verdict.failure is not None:
                self.floors[verdict.failure.label] += 1
        else:
            self.failed[outcome.label] += 1
            self.attempts += outcome.spent.attempts
