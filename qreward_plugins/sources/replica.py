"""One replica of a source: its address, its load, its health and its counts."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from typing import Literal

from ..observers.statistics import Health, ReplicaStatistics
from ..samples.spent import Usage
from .base import ServedWeights

FIRST_BACKOFF_S = 1.0
"""Seconds for which a replica is avoided after its first failure in a row. Each further one doubles the time."""
LONGEST_BACKOFF_S = 60.0

INVALID_IN_A_ROW = 3
"""Invalid replies in a row that count as a failure: they hardly come from the calls."""

PREFIXES_KEPT = 1024
"""Prefixes that are remembered for each replica, to estimate which prompts its cache holds."""

Mark = Literal["up", "down", "draining"]
"""The state of a replica as its pool reports it. Only one that is up gets calls."""


class Replica:
    """One base URL. Times are seconds of the event loop's clock."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.seed = int.from_bytes(hashlib.blake2b(base_url.encode(), digest_size=8).digest(), "big")
        self.mark: Mark = "up"
        self.weights: ServedWeights | None = None
        self.in_flight = 0
        self.pending_tokens = 0
        self.last_used = 0
        self.requests = 0
        self.answered_at = -math.inf
        """Time of its last answer; minus infinity before the first one since it came up."""
        self._invalid_in_a_row = 0
        self._failures = 0
        self._failures_in_a_row = 0
        self._failed_at = 0.0
        self._backoff_s = 0.0
        self._trial: object | None = None
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._prompt = self._cached = 0
        self._cache_use: float | None = None
        self.waiting = 0.0
        """Requests of all clients that wait at its server, as far as `cache_use` is known."""
        self._read_at = 0.0

    def health(self, now: float) -> Health:
        if self.mark != "up":
            return self.mark
        if not self._failures_in_a_row:
            return "up"
        # The difference is negative if the failure comes from an event loop whose clock is ahead.
        if 0 <= now - self._failed_at < self._backoff_s:
            return "backing_off"
        return "half_open"

    @property
    def is_healthy(self) -> bool:
        """Whether it is up, and has not failed since its last answer."""
        return self.mark == "up" and not self._failures_in_a_row

    def takes_calls(self, now: float) -> bool:
        """Whether it may get a call while others are there. A half-open one gets one call at a time."""
        return self.is_healthy or (self._trial is None and self.health(now) == "half_open")

    def knows(self, prefix: int) -> bool:
        """Whether a prompt with this prefix was sent to it."""
        return prefix in self._prefixes

    # What happens to its calls

    def began(self, call: object, tokens: int, prefix: int | None, now: float) -> None:
        """Count a call that is sent to it, until `ended`."""
        if self._trial is None and self.health(now) == "half_open":
            self._trial = call
        self.in_flight += 1
        self.pending_tokens += tokens
        self.requests += 1
        if prefix is not None:
            self._prefixes[prefix] = None
            self._prefixes.move_to_end(prefix)
            if len(self._prefixes) > PREFIXES_KEPT:
                self._prefixes.popitem(last=False)

    def ended(self, call: object, tokens: int) -> None:
        """Give back what `began` has counted for a call."""
        self.in_flight -= 1
        self.pending_tokens -= tokens
        if self._trial is call:
            self._trial = None

    def answered(self, now: float) -> None:
        """Record that it answered. Only a valid reply ends the avoidance of one whose replies were invalid."""
        self.answered_at = now
        if self._invalid_in_a_row < INVALID_IN_A_ROW:
            self.forgiven()

    def judged(self, valid: bool, now: float) -> None:
        """Record whether its answer was a valid one for the judge that asked."""
        if not valid:
            self._invalid_in_a_row += 1
            if self._invalid_in_a_row >= INVALID_IN_A_ROW:
                self.failed(now, began_at=now)
        elif self._invalid_in_a_row:
            self._invalid_in_a_row = 0
            self.forgiven()

    def failed(self, now: float, *, began_at: float) -> None:
        """Record that a call which began at `began_at` was not answered, or not with what is an answer."""
        self._failures += 1
        self._avoid(now, began_at=began_at)

    def _avoid(self, now: float, *, began_at: float) -> None:
        waits = 0 <= now - self._failed_at < self._backoff_s
        if self._failures_in_a_row and began_at <= self._failed_at and waits:
            # Of the calls that were under way together, the first failure tells all. Otherwise a crash under load would
            # keep the replica out for the longest time at once.
            return
        self._failures_in_a_row += 1
        self._failed_at = now
        self._backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._failures_in_a_row - 1, 16))

    def refused(self, now: float, *, began_at: float) -> None:
        """Record that it refused a request, sent at `began_at`, which another replica is asked now. Unless it has
        answered others meanwhile, it is avoided until that one says who is at fault: a broken replica refuses sooner
        than others answer, so it would get most of the calls.
        """
        if self.answered_at < began_at:
            self._avoid(now, began_at=began_at)

    def refused_alone(self) -> None:
        """Record that another replica answered what it has refused: that was a failure."""
        self._failures += 1

    def forgiven(self) -> None:
        """Record that nothing speaks against it: it answered, or a request that it refused is at fault."""
        self._failures_in_a_row = 0

    def used(self, usage: Usage) -> None:
        """Count the usage that a reply states."""
        self._prompt += usage.prompt_tokens
        self._cached += usage.cached_tokens

    def reset(self) -> None:
        """Forget its failures and its prefixes: another server may have taken its place."""
        self.forgiven()
        self._invalid_in_a_row, self.answered_at = 0, -math.inf
        self._prefixes.clear()

    # Its KV cache

    def cache_read(self, use: float | None, waiting: float, now: float) -> None:
        """Record the share of its KV cache that is in use (None if it could not be read), and how many requests of all
        clients wait at it.
        """
        self._cache_use, self.waiting, self._read_at = use, waiting, now

    def cache_use(self, now: float, most_s: float) -> float | None:
        """Return the share of its KV cache that is in use; None if it was not read within `most_s` seconds."""
        return self._cache_use if 0 <= now - self._read_at <= most_s else None

    def statistics(self, now: float, stale_s: float) -> ReplicaStatistics:
        return ReplicaStatistics(
            base_url=self.base_url,
            health=self.health(now),
            in_flight=self.in_flight,
            pending_tokens=self.pending_tokens,
            requests=self.requests,
            failures=self._failures,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            prefix_hit_rate=self._cached / self._prompt if self._cached else math.nan,
            cache_use=self.cache_use(now, stale_s),
            version="" if self.weights is None else self.weights.version,
        )
