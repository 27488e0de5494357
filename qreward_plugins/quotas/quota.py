"""What one source still allows: requests and tokens per window, and concurrency, behind one question and one answer.

The scheduler asks `wait_s` and then takes a `Reservation`, in one step of the event loop, so that nothing can come in
between. Tokens are reserved as an upper bound (prompt plus the longest completion asked for) and settled with the real
usage as soon as it is known: what a limit forbids never happens, and what was reserved in vain is free again after one
latency rather than one window. A request and its prompt count from when they are written, a completion from when it has
come: servers count it somewhere in between, and a long answer may well outlast the window in which it was asked for.

Where several processes share a source without talking to each other, each keeps to an equal share. A share that would
be less than one is an error at start-up: rounding it up would break the limit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ..config.models import Limits
from ..errors import ConfigurationError, Mistake
from .ledger import Ledger, Pace

UNDECLARED_CONCURRENCY = 32
"""Requests in flight at a source that declares no limit of them."""

_CLEARLY_BELOW_LIMIT = 0.9
_THROTTLES_BEFORE_PACING = 3


class Reservation:
    """The part of a quota that one attempt holds. Release it exactly once, whatever became of the attempt."""

    __slots__ = ("_completion", "_prompt", "_quota", "_request", "held")

    def __init__(self, quota: Quota, prompt_tokens: float, completion_tokens: float, now: float) -> None:
        self._quota = quota
        self._request = quota._requests.hold(1) if quota._requests else None
        self._prompt = quota._tokens.hold(prompt_tokens) if quota._tokens else None
        self._completion = quota._tokens.hold(completion_tokens) if quota._tokens else None
        if quota._pace is not None:
            quota._pace.spend(now)
        quota.in_flight += 1
        self.held = True

    def sent(self, now: float) -> None:
        """Note that the request was really written at `now`."""
        if self._request is not None and self._quota._requests is not None:
            self._quota._requests.stamp(self._request, now)
        if self._prompt is not None and self._quota._tokens is not None:
            self._quota._tokens.stamp(self._prompt, now)

    def release(
        self, now: float, *, prompt_tokens: float | None = None, completion_tokens: float | None = None
    ) -> None:
        """Give the concurrency back and settle the tokens; None: unknown, the reserved amount stays spent."""
        if not self.held:
            return
        self.held = False
        self._quota.in_flight -= 1
        self.sent(now)  # it may have been, whatever the source said
        ledger = self._quota._tokens
        if ledger is None or self._prompt is None or self._completion is None:
            return
        if prompt_tokens is not None:
            ledger.amend(self._prompt, prompt_tokens)
        if completion_tokens is not None:
            ledger.amend(self._completion, completion_tokens)
        ledger.stamp(self._completion, now)


@dataclass(frozen=True)
class QuotaUse:
    """A snapshot: what of a quota is in use. Shares are of this process's part of the limit; None: no such limit."""

    in_flight: int
    concurrency: int
    requests_share: float | None
    tokens_share: float | None
    paced: bool


class Quota:
    """The quota of one source, kept in this process.

    `processes` is the number of processes that share the source's limits; this one takes an equal part. `slots` is how
    many requests the source can work on at once in this process, if that is bounded. Raises `ConfigurationError` when
    the part is less than one request or one unit of concurrency.
    """

    def __init__(self, limits: Limits, *, source: str, processes: int = 1, slots: int | None = None) -> None:
        self._limits = limits
        self._processes = processes
        self.in_flight = 0
        self.concurrency = limits.concurrency // processes if limits.concurrency else slots or UNDECLARED_CONCURRENCY
        if slots is not None:
            self.concurrency = min(self.concurrency, slots)
        self._requests: Ledger | None = None
        self._tokens: Ledger | None = None
        self._pace: Pace | None = None
        self._throttled_below_limit_at: deque[float] = deque(maxlen=_THROTTLES_BEFORE_PACING)
        mistakes: list[Mistake] = []
        where = f"sources.{source}.limits"
        if self.concurrency < 1:
            mistakes.append(_too_small(where, "concurrency", limits.concurrency, processes))
        if limits.requests_per_minute is not None:
            per_window = limits.requests_per_minute * limits.window_s / 60.0
            window_s = limits.window_s
            if processes == 1 and per_window < 1:
                per_window, window_s = 1.0, 60.0 / limits.requests_per_minute
            share = math.floor(per_window / processes + 1e-9)
            self._window_s = window_s
            if share < 1:
                mistakes.append(_too_small(where, "requests_per_minute", limits.requests_per_minute, processes))
            else:
                self._requests = Ledger(share, window_s)
        if limits.tokens_per_minute is not None:
            self._tokens = Ledger(limits.tokens_per_minute * limits.window_s / 60.0 / processes, limits.window_s)
        if mistakes:
            raise ConfigurationError(mistakes)
        if limits.window == "bucket":
            self._start_pacing()

    @property
    def rate_per_s(self) -> float:
        """Requests per second that the declared limit allows this process; infinity where none is declared."""
        return self._requests.limit / self._window_s if self._requests else math.inf

    @property
    def burst(self) -> float:
        """Requests that may be sent at once after a rest."""
        return self._requests.limit if self._requests else math.inf

    def forget_in_flight(self, now: float) -> None:
        """Take requests in flight to have ended: their event loop was closed under them."""
        self.in_flight = 0
        for ledger in (self._requests, self._tokens):
            if ledger is not None:
                ledger.stamp_all(now)

    def fits_ever(self, tokens: float) -> bool:
        """Whether a request of `tokens` can ever be sent under this quota."""
        return self._tokens is None or tokens <= self._tokens.limit

    def wait_s(self, tokens: float, now: float) -> float:
        """Seconds until a request of `tokens` may be sent.

        0: now. Infinity: no time can be told, because it waits for a request in flight to end, or it never fits.
        """
        if self.in_flight >= self.concurrency:
            return math.inf
        wait = 0.0
        if self._requests is not None:
            wait = self._requests.wait_s(1, now)
        if self._tokens is not None:
            wait = max(wait, self._tokens.wait_s(tokens, now))
        if self._pace is not None:
            wait = max(wait, self._pace.wait_s(now))
        return wait

    def reserve(self, prompt_tokens: float, completion_tokens: float, now: float) -> Reservation:
        """Take what one attempt needs at most."""
        return Reservation(self, prompt_tokens, completion_tokens, now)

    def throttled(self, now: float) -> bool:
        """Note that the server throttled a request of ours; return whether this made the quota change to pacing.

        A server that throttles, again and again within a window, a client that keeps clearly below its declared limits
        does not count a sliding window: it refills a bucket. Throttling that tokens or concurrency may explain is no
        such evidence.
        """
        if self._limits.window != "auto" or self._pace is not None or self._requests is None:
            return False
        below = self._requests.spent(now) < _CLEARLY_BELOW_LIMIT * self._requests.limit
        if self._tokens is not None:
            below = below and self._tokens.spent(now) < _CLEARLY_BELOW_LIMIT * self._tokens.limit
        if not below:
            return False
        throttled_at = self._throttled_below_limit_at
        throttled_at.append(now)
        if len(throttled_at) < _THROTTLES_BEFORE_PACING or now - throttled_at[0] > self._window_s:
            return False
        self._start_pacing()
        return True

    def use(self, now: float) -> QuotaUse:
        """A snapshot of what is in use."""
        return QuotaUse(
            in_flight=self.in_flight,
            concurrency=self.concurrency,
            requests_share=self._requests.spent(now) / self._requests.limit if self._requests else None,
            tokens_share=self._tokens.spent(now) / self._tokens.limit if self._tokens else None,
            paced=self._pace is not None,
        )

    def _start_pacing(self) -> None:
        if self._limits.requests_per_minute is not None:
            rate_per_s = self._limits.requests_per_minute / 60.0 / self._processes
            self._pace = Pace(rate_per_s, max(1, self._limits.burst // self._processes))


def _too_small(where: str, key: str, value: float | None, processes: int) -> Mistake:
    return Mistake(
        f"{where}.{key}",
        f"{value:g} cannot be shared by {processes} processes without breaking it: each would get less than one.",
        f"Use at most {max(1, math.floor(value or 1))} processes (verl: reward.num_workers), or raise the limit.",
    )
