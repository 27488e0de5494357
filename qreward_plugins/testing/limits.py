"""The limits of a judge server, for each of its keys. They are enforced exactly, as simulated servers do."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Literal

from ..simulation.strict_limits import Excess, Ledger, LimitKind, StrictLimits, ledger_of

# If a client closes a connection and sends on another, the server may see these in the other order. So a request over
# the concurrency limit waits this long for an abandoned one to end before it counts as a violation.
_ABANDONED_GRACE_S = 0.02


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a judge server. `None` means no limit.

    Over a limit the server answers 429 with a `Retry-After` in whole seconds, rounded up (RFC 9110, 10.2.3), and
    records a violation; rejected requests do not count as used. Every answer announces the limits
    (`x-ratelimit-limit-*`, `x-ratelimit-remaining-*`, `x-ratelimit-reset-*`). A bucket states the rate per minute, what
    is left of it, and the seconds until the bucket is full, as OpenAI and Anthropic do; it states nothing of its burst.
    A request
    counts when the server has read it: a server that gets no processor for a while sees requests closer together than
    they were sent. Raises `ValueError` for values that cannot be enforced.
    """

    requests_per_minute: float | None = None
    """Requests per 60 s. In a window of another length: `requests_per_minute * window_s / 60`, rounded down."""
    tokens_per_minute: float | None = None
    """Tokens per 60 s: the prompt's are charged on arrival, the completion's after the scorer has answered."""
    concurrency: int | None = None
    """Requests in flight at once."""
    window_s: float = 60.0
    """Length of the sliding window in seconds. Shorten it to keep tests short. Also the window of
    `Report.max_requests_in_window`."""
    kind: Literal["sliding", "bucket"] = "sliding"
    """"sliding": at most the limit in any `window_s`. "bucket": a token bucket refilled at the rate."""
    burst_s: float = 1.0
    """Size of the bucket, in seconds of the rate (but at least one request). For `kind="bucket"` only."""

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "concurrency", "window_s", "burst_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"ServerLimits.{name} must be a finite number above 0, not {value!r}")
        if self.kind not in ("sliding", "bucket"):
            raise ValueError(f"ServerLimits.kind must be 'sliding' or 'bucket', not {self.kind!r}")
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if self.kind == "sliding" and value is not None and value * self.window_s < 60:
                raise ValueError(
                    f"ServerLimits.{name}={value!r} allows less than one in window_s={self.window_s!r} s:"
                    " make the window longer"
                )

    def ledger(self, per_minute: float | None) -> Ledger:
        """The ledger of one of the limits."""
        bucket = max(1.0, (per_minute or 0.0) / 60.0 * self.burst_s) if self.kind == "bucket" else None
        return ledger_of(per_minute, self.window_s, bucket)


class Throttle(Exception):
    """A request is over a limit."""

    def __init__(self, kind: LimitKind, excess: Excess) -> None:
        super().__init__(kind)
        self.kind: LimitKind = kind
        self.excess = excess


class Account:
    """What a server keeps of one key: its limits, its requests in flight, and whether it is revoked. `key` None: no key
    is needed.
    """

    def __init__(self, key: str | None, limits: ServerLimits) -> None:
        self.bearer = None if key is None else bearer_of(key)
        self.revoked = False
        requests, tokens = limits.ledger(limits.requests_per_minute), limits.ledger(limits.tokens_per_minute)
        self.limits = StrictLimits(requests, tokens, limits.concurrency)
        self._taken = self._abandoned = 0

    async def enter(self, tokens: int, arrived_s: float) -> None:
        """Charge a request to the limits, and take a slot. Raises `Throttle`, and charges nothing then.

        Where no slot is free, it waits shortly for a late disconnect.
        """
        if broken := self.limits.broken(tokens, 0, arrived_s):
            raise Throttle(*broken)
        self.limits.enter(tokens, arrived_s)
        if self._taken >= self.limits.concurrency:
            abandoned = self._abandoned
            try:
                await asyncio.sleep(_ABANDONED_GRACE_S)
                if self._abandoned == abandoned or self._taken >= self.limits.concurrency:
                    raise Throttle("concurrency", Excess(1, 0.0))
            except BaseException:
                self.limits.give_back(tokens, arrived_s)
                raise
        self._taken += 1

    def leave(self, *, gone: bool) -> None:
        """Free a slot. `gone`: its client abandoned it."""
        self._taken -= 1
        self._abandoned += gone


def bearer_of(key: str) -> bytes:
    """The header `Authorization` that carries a key."""
    return f"Bearer {key}".encode()
