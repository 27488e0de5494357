"""A lane: one source as the scheduler sees it, with its quota, its health, and what was learned of it."""

from __future__ import annotations

import logging
import math
from collections import deque

from ..config.models import Price
from ..quotas import Quota, Reservation
from ..samples import Usage
from ..sources.base import Request, Source
from ..telemetry import SourceCounters, SourceStatistics, percentile
from .breaker import Breaker

_log = logging.getLogger("qreward_plugins.scheduling")

_LATENCY_WEIGHT = 0.1
_FIRST_TOKENS_PER_BYTE = 1 / 3
_TOKENS_PER_BYTE_DECAY = 0.05
_FIRST_THROTTLE_PAUSE_S = 1.0
_LONGEST_THROTTLE_PAUSE_S = 60.0
_GARBAGE_WINDOW = 50
_GARBAGE_AT_LEAST = 10


class Lane:
    """One source as the scheduler sees it. Times are seconds of the event loop's clock."""

    def __init__(self, source: Source, quota: Quota, *, timeout_s: float, price: Price) -> None:
        self.source = source
        self.name = source.name
        self.quota = quota
        self.timeout_s = timeout_s
        self.price = price
        self.breaker = Breaker()
        self.counters = SourceCounters()
        self.unusable = ""
        """Why no request may go to this source any more; empty: it may."""
        self.latency_s: float | None = None
        """Smoothed latency of answered attempts; None before the first answer."""
        self._paused_until = -math.inf
        self._paused_at = -math.inf
        self._throttles_in_row = 0
        self._tokens_per_byte = _FIRST_TOKENS_PER_BYTE
        self._validity: deque[bool] = deque(maxlen=_GARBAGE_WINDOW)

    def abandon_attempts(self, now: float) -> None:
        """Forget the attempts of an event loop that was closed under them; the ledgers of what was sent stay."""
        self.quota.forget_in_flight(now)
        self.breaker.abandoned(probe=True)

    def tokens(self, request: Request) -> int:
        """An upper bound of the tokens that `request` takes, prompt and completion."""
        return self._prompt_tokens(request) + request.max_completion_tokens

    def reserve(self, request: Request, now: float) -> Reservation:
        """Take what an attempt of `request` needs from the quota."""
        return self.quota.reserve(self._prompt_tokens(request), request.max_completion_tokens, now)

    def wait_s(self, tokens: float, now: float) -> float:
        """Seconds until a request of `tokens` may go; infinity: no time can be told."""
        if self.unusable:
            return math.inf
        return max(self._paused_until - now, self.breaker.wait_s(now), self.quota.wait_s(tokens, now))

    def expected_s(self) -> float:
        """How long an answer takes; 0 before the first one, so that every source gets its first request."""
        return self.latency_s or 0.0

    def answers_garbage(self) -> bool:
        """Whether most of the last replies were no valid verdicts: then it is not the responses that provoke them."""
        invalid = self._validity.count(False)
        return len(self._validity) >= _GARBAGE_AT_LEAST and 2 * invalid > len(self._validity)

    def answered(self, request: Request, usage: Usage | None, latency_s: float) -> float:
        """Learn from a reply; return its cost in dollars."""
        self.breaker.succeeded()
        self._throttles_in_row = 0
        self.counters.answered += 1
        self.counters.latencies_s.append(latency_s)
        weight = _LATENCY_WEIGHT if self.latency_s is not None else 1.0
        self.latency_s = (1 - weight) * self.expected_s() + weight * latency_s
        cost = self.price.per_request
        if usage is not None:
            cost += usage.prompt_tokens * self.price.input_per_million / 1e6
            cost += usage.completion_tokens * self.price.output_per_million / 1e6
            self.counters.usage += usage
            if usage.prompt_tokens and request.size:
                seen = usage.prompt_tokens / request.size
                # Up at once, down slowly: an estimate below the truth would break a limit, one above it only waits.
                self._tokens_per_byte += max(seen - self._tokens_per_byte, 0.0) + _TOKENS_PER_BYTE_DECAY * min(
                    seen - self._tokens_per_byte, 0.0
                )
        self.counters.cost_usd += cost
        return cost

    def judged(self, valid: bool) -> None:
        """Note whether a reply was a valid verdict."""
        self._validity.append(valid)
        if not valid:
            self.counters.invalid += 1

    def throttled(self, retry_after_s: float | None, sent_at: float, now: float) -> None:
        """Pause the source as it asks for. Attempts sent before the pause began tell nothing new and do not prolong
        it.
        """
        self.counters.throttled += 1
        if sent_at < self._paused_at or now < self._paused_until:
            return
        self._throttles_in_row += 1
        if retry_after_s is None:
            pause = min(_FIRST_THROTTLE_PAUSE_S * 2 ** (self._throttles_in_row - 1), _LONGEST_THROTTLE_PAUSE_S)
        else:
            # "Retry at once" from a server that keeps on throttling would be a storm.
            pause = max(retry_after_s, min(0.1 * 2 ** (self._throttles_in_row - 1), _FIRST_THROTTLE_PAUSE_S))
        self._paused_at = now
        self._paused_until = now + pause
        if self.quota.throttled(now):
            _log.warning(
                "source %s throttles requests that keep to its declared limits: it counts like a token bucket, so its "
                "requests are paced from now on (set `window: bucket` to start that way)",
                self.name,
            )
        _log.info("source %s asks for a pause of %.1f s", self.name, pause)

    def failed(self, now: float, *, probe: bool) -> None:
        """Note a transient failure."""
        self.counters.transient += 1
        if self.breaker.failed(now, probe=probe, in_flight=self.quota.in_flight):
            _log.warning(
                "source %s failed %d times in a row: it rests for %.0f s, then one request probes it",
                self.name,
                self.breaker.failures_in_row,
                self.breaker.wait_s(now),
            )

    def take_out(self, reason: str) -> None:
        """Send nothing to this source any more, and say so loudly."""
        if not self.unusable:
            self.unusable = reason
            _log.error("source %s is taken out until the engine is opened anew: %s", self.name, reason)

    def state(self, now: float) -> str:
        """One word or two for people."""
        if self.unusable:
            return "out"
        if self._paused_until > now:
            return "paused"
        if not self.breaker.closed:
            return "resting"
        return "garbled" if self.answers_garbage() else "up"

    def statistics(self, now: float) -> SourceStatistics:
        """A snapshot."""
        counters, use = self.counters, self.quota.use(now)
        return SourceStatistics(
            name=self.name,
            state=self.state(now),
            requests=counters.requests,
            answered=counters.answered,
            throttled=counters.throttled,
            transient=counters.transient,
            timeouts=counters.timeouts,
            permanent=counters.permanent,
            invalid=counters.invalid,
            cancelled=counters.cancelled,
            in_flight=use.in_flight,
            peak_in_flight=counters.peak_in_flight,
            latency_p50_s=percentile(counters.latencies_s, 0.5),
            latency_p95_s=percentile(counters.latencies_s, 0.95),
            prompt_tokens=counters.usage.prompt_tokens,
            completion_tokens=counters.usage.completion_tokens,
            cost_usd=counters.cost_usd,
            requests_share=use.requests_share,
            tokens_share=use.tokens_share,
            paced=use.paced,
        )

    def _prompt_tokens(self, request: Request) -> int:
        return math.ceil(request.size * self._tokens_per_byte)
