"""One replica of a source: its address, its load, its health and its counts."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from typing import Literal, NamedTuple

from ..observers.statistics import Health, ReplicaStatistics
from ..samples.spent import Usage
from .base import ServedWeights
from .prefixes import Prefix

FIRST_BACKOFF_S = 1.0
"""Seconds for which a replica is avoided after its first failure in a row. Each further one doubles the time."""
LONGEST_BACKOFF_S = 60.0
DRAINING_BACKOFF_S = 15.0
"""Seconds for which a replica is avoided after it said that it shuts down."""

FIRST_CALLS = 16
START_S = 0.25
"""A replica has at most `FIRST_CALLS` calls under way in the first `START_S` seconds after its first call, until one of
them has ended. A broken one mostly refuses sooner than that, and would otherwise get thousands at once."""
IN_A_ROW = 3
"""Calls in a row that a replica refused, or answered invalidly, from which this hardly comes from the calls."""

PREFIXES_KEPT = 1024
"""Prefixes that are remembered for each replica, to estimate which prompts its cache holds."""

Mark = Literal["up", "down", "draining"]
"""The state of a replica as its pool reports it. Only one that is up gets calls."""


class ReplicaChange(NamedTuple):
    """A change of the state or the weights of a replica; see `observers.ReplicaChanged`."""

    source: str
    replica: int
    state: str
    before: str
    version: str
    problem: str


class Replica:
    """One base URL. Times are seconds of the event loop's clock."""

    __slots__ = (
        "_avoided_at",
        "_backoff_s",
        "_cache_use",
        "_cached",
        "_draining",
        "_failed_at",
        "_failures",
        "_failures_in_a_row",
        "_first_at",
        "_invalid_in_a_row",
        "_prefix_hits",
        "_prefix_tokens",
        "_prefixes",
        "_prompt",
        "_read_at",
        "_refused_at",
        "_refused_in_a_row",
        "_suspected_at",
        "_trial",
        "answered_at",
        "base_url",
        "in_flight",
        "invalid_alone",
        "last_used",
        "mark",
        "pending_tokens",
        "refuses_alone",
        "requests",
        "seed",
        "weights",
    )

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
        self._first_at = math.inf
        """Time of its first call since it came up; minus infinity once one of its calls has ended."""
        self._refused_in_a_row = self._invalid_in_a_row = 0
        self._refused_at = -math.inf
        self._failures = 0
        self._failures_in_a_row = 0
        self._failed_at = 0.0
        self._avoided_at = 0.0
        """Time from which its backoff counts: that of its last failure, or of a refusal while it was half-open."""
        self._backoff_s = 0.0
        self._draining = False
        self._suspected_at: float | None = None
        """Time of its last refusal, unless it has answered since then or the request was at fault; or of its last
        invalid reply, if these are `IN_A_ROW`."""
        self._trial: object | None = None
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._prefix_hits = self._prefix_tokens = 0
        self._prompt = self._cached = 0
        self._cache_use: float | None = None
        self._read_at = 0.0
        self.refuses_alone = False
        """Whether a warning has said that it refuses what another one answers."""
        self.invalid_alone = False
        """Whether a warning has said that its replies are invalid, and those of another one are not."""

    def health(self, now: float) -> Health:
        if self.mark != "up":
            return self.mark
        if not self._failures_in_a_row:
            return "up"
        # The difference is negative if the failure comes from an event loop whose clock is ahead.
        if 0 <= now - self._avoided_at < self._backoff_s:
            return "draining" if self._draining else "backing_off"
        return "half_open"

    @property
    def is_healthy(self) -> bool:
        """Whether it is up, and has not failed since its last answer."""
        return self.mark == "up" and not self._failures_in_a_row

    def takes_calls(self, now: float) -> bool:
        """Whether it may get a call while others are there. A half-open one gets one call at a time, and one that has
        just come up a few (`FIRST_CALLS`).

        One that has refused a request gets none for `FIRST_BACKOFF_S`, then one at a time, until it answers or the
        request is found at fault; so does one with `IN_A_ROW` invalid replies, until one is valid. A broken one refuses
        sooner than others answer, so it would get most of the calls.
        """
        if self._on_trial(now):
            return self._trial is None
        return self.is_trusted and not self.starts_in_s(now)

    @property
    def is_trusted(self) -> bool:
        """Whether it is up, and neither its failures nor its refusals nor its invalid replies speak against it."""
        return self.is_healthy and self._suspected_at is None

    @property
    def refuses_all(self) -> bool:
        """Whether it refused the last calls, and has no other one that it may yet answer."""
        return self._refused_in_a_row >= IN_A_ROW and not self.in_flight

    @property
    def answers_invalidly(self) -> bool:
        """Whether its last replies were invalid."""
        return self._invalid_in_a_row >= IN_A_ROW

    def answers_others(self, since: float) -> bool:
        """Whether its refusal of a request that was sent to it at `since` says something of the request: it has
        answered others meanwhile, or before and without refusing several in a row since then.
        """
        if self.refuses_alone:
            return False
        if self.answered_at >= since:
            return True
        return self.answered_at > -math.inf and self.is_healthy and self._refused_in_a_row < IN_A_ROW

    def erred_since(self, at: float) -> bool:
        """Whether it has refused or failed a request after `at`."""
        return self._refused_at > at or (self._failures_in_a_row > 0 and self._failed_at > at)

    def starts_in_s(self, now: float) -> float:
        """Seconds for which it takes no further call, because it has just come up and has `FIRST_CALLS` under way."""
        if self.in_flight < FIRST_CALLS or not 0 <= now - self._first_at < START_S:
            return 0.0
        return self._first_at + START_S - now

    def _on_trial(self, now: float) -> bool:
        """Whether it gets one call at a time."""
        health = self.health(now)
        if health == "up" and self._suspected_at is not None:
            return not 0 <= now - self._suspected_at < FIRST_BACKOFF_S
        return health == "half_open"

    def knows(self, prefix: int) -> bool:
        """Whether a prompt with this prefix was sent to it."""
        return prefix in self._prefixes

    # What happens to its calls

    def began(self, call: object, tokens: int, prefix: Prefix | None, prompt_tokens: int, now: float) -> None:
        """Count a call that is sent to it, until `ended`."""
        if self._trial is None and self._on_trial(now):
            self._trial = call
        if self._first_at == math.inf:
            self._first_at = now
        self.in_flight += 1
        self.pending_tokens += tokens
        self.requests += 1
        if prefix is not None:
            self._prefix_tokens += prompt_tokens
            if prefix.key in self._prefixes:
                self._prefixes.move_to_end(prefix.key)
                self._prefix_hits += min(prefix.tokens, prompt_tokens)
            else:
                self._prefixes[prefix.key] = None
                if len(self._prefixes) > PREFIXES_KEPT:
                    self._prefixes.popitem(last=False)

    def ended(self, call: object, tokens: int) -> None:
        """Give back what `began` has counted for a call."""
        self.in_flight -= 1
        self.pending_tokens -= tokens
        if self._trial is call:
            self._trial = None

    def answered(self, now: float) -> None:
        """Record that it answered."""
        self.answered_at = now
        self._first_at = -math.inf
        self._refused_in_a_row = 0
        if not self.answers_invalidly:
            self._suspected_at = None
        self._failures_in_a_row = 0
        self._draining = False

    def judged(self, valid: bool, now: float) -> None:
        """Record whether its answer was a valid one for the judge that asked."""
        if not valid:
            self._invalid_in_a_row += 1
            if self.answers_invalidly:
                self._suspected_at = now
        elif self._invalid_in_a_row:
            self._invalid_in_a_row, self._suspected_at = 0, None

    def failed(self, now: float, *, began_at: float, draining: bool = False) -> None:
        """Record that a call which began at `began_at` was not answered, or not with what is an answer."""
        self._failures += 1
        self._first_at = -math.inf
        waits = 0 <= now - self._avoided_at < self._backoff_s
        if self._failures_in_a_row and began_at <= self._failed_at and waits and not (draining and not self._draining):
            # Of the calls that were under way together, the first failure tells all. Otherwise a crash under load would
            # keep the replica out for the longest time at once.
            return
        self._failures_in_a_row += 1
        self._failed_at = self._avoided_at = now
        self._draining = draining
        self._backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._failures_in_a_row - 1, 16))
        if draining:
            self._backoff_s = max(self._backoff_s, DRAINING_BACKOFF_S)

    def refused(self, now: float, *, began_at: float) -> None:
        """Record that it refused a request, sent at `began_at`, which another replica may answer: neither an answer nor
        a failure. A half-open one has not shown that it answers, so it is avoided for as long again. Another one is
        suspect if it has answered nothing since then (`takes_calls`).
        """
        self._first_at, self._refused_at = -math.inf, now
        if self.answered_at < began_at:
            self._refused_in_a_row += 1
        if self.health(now) == "half_open":
            self._avoided_at = now
        elif self.answered_at < began_at:
            self._suspected_at = now

    def refusal_confirmed(self) -> None:
        """Record that a request which it refused is at fault. One that refuses all its calls stays suspect until it
        answers: two broken ones agree.
        """
        self._avoided_at = self._failed_at
        if not (self.refuses_all or self.answers_invalidly):
            self._suspected_at = None

    def refusal_contradicted(self, now: float, *, began_at: float) -> None:
        """Record that another replica answered what it had refused in a call which began at `began_at`. If it has
        answered nothing since then, this is a failure. Otherwise it refuses only some requests, and takes the others.
        """
        if self.answered_at < began_at:
            self.failed(now, began_at=began_at)
        else:
            self._failures += 1

    def used(self, usage: Usage) -> None:
        """Count the usage that a reply states."""
        self._prompt += usage.prompt_tokens
        self._cached += usage.cached_tokens

    def reset(self) -> None:
        """Forget its failures and its prefixes: another server may have taken its place."""
        self._failures_in_a_row, self._draining = 0, False
        self._refused_in_a_row = self._invalid_in_a_row = 0
        self._suspected_at = None
        self.answered_at, self._first_at = -math.inf, math.inf
        self.refuses_alone = self.invalid_alone = False
        self._prefixes.clear()

    # Its KV cache

    def cache_read(self, use: float | None, now: float) -> None:
        """Record the share of its KV cache that is in use; None if it could not be read."""
        self._cache_use, self._read_at = use, now

    def cache_use(self, now: float, most_s: float) -> float | None:
        """Return the share of its KV cache that is in use; None if it was not read within `most_s` seconds."""
        return self._cache_use if 0 <= now - self._read_at <= most_s else None

    @property
    def prefix_counts(self) -> tuple[int, int]:
        """Prompt tokens that came from the prefix cache, and of how many: as the server states it, or estimated."""
        return (self._cached, self._prompt) if self._cached else (self._prefix_hits, self._prefix_tokens)

    def statistics(self, now: float, stale_s: float) -> ReplicaStatistics:
        hits, of = self.prefix_counts
        return ReplicaStatistics(
            base_url=self.base_url,
            health=self.health(now),
            in_flight=self.in_flight,
            pending_tokens=self.pending_tokens,
            requests=self.requests,
            failures=self._failures,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            prefix_hit_rate=hits / of if of else math.nan,
            prefix_hits_estimated=not self._cached,
            cache_use=self.cache_use(now, stale_s),
            version="" if self.weights is None else self.weights.version,
        )

    def __repr__(self) -> str:
        return f"Replica({self.base_url!r}, {self.mark}, {self.in_flight} in flight)"
