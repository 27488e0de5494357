"""The part of declared limits that one process may use, and how much of it is used.

Processes that use a source without a keeper each get an equal part. A part below one is an error at start-up, because
rounding it up would break the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config.source_models import Limits
from ..errors import ConfigurationError, Mistake


@dataclass(frozen=True)
class Shares:
    """This process's part of the declared limits. Infinity or None if not declared."""

    requests: float
    """Requests in a window of `window_s` seconds; a whole number."""
    window_s: float
    tokens: float
    """Tokens in a window of `tokens_window_s` seconds."""
    tokens_window_s: float
    concurrency: int | None
    """Requests in flight: declared, or the slots of the source if it has them."""
    pace_per_s: float
    """Requests per second if requests are paced."""
    burst: int


def shares(limits: Limits, *, source: str, processes: int, slots: int | None) -> Shares:
    """Return this process's part of `limits`. Raises `ConfigurationError` if a part is less than one."""
    mistakes: list[Mistake] = []
    where = f"sources.{source}.limits"
    concurrency = limits.concurrency // processes if limits.concurrency is not None else slots
    if concurrency is not None and slots is not None:
        concurrency = min(concurrency, slots)
    if concurrency is not None and concurrency < 1:
        mistakes.append(_too_small(where, "concurrency", limits.concurrency, processes))
    requests, window_s, pace_per_s = math.inf, limits.window_s, math.inf
    if limits.requests_per_minute is not None:
        per_window = limits.requests_per_minute * limits.window_s / 60.0
        if processes == 1 and per_window < 1:
            per_window, window_s = 1.0, 60.0 / limits.requests_per_minute
        requests = math.floor(per_window / processes + 1e-9)
        pace_per_s = limits.requests_per_minute / 60.0 / processes
        if requests < 1:
            mistakes.append(_too_small(where, "requests_per_minute", limits.requests_per_minute, processes))
    tokens = math.inf
    if limits.tokens_per_minute is not None:
        tokens = limits.tokens_per_minute * limits.window_s / 60.0 / processes
    if mistakes:
        raise ConfigurationError(mistakes)
    burst = max(1, limits.burst // processes)
    return Shares(requests, window_s, tokens, limits.window_s, concurrency, pace_per_s, burst)


def _too_small(where: str, key: str, value: float | None, processes: int) -> Mistake:
    return Mistake(
        f"{where}.{key}",
        f"{value:g} cannot be shared by {processes} processes: each would get less than one.",
        f"Use at most {max(1, math.floor(value or 1))} processes (verl: reward.num_workers, ROLL: world_size), or "
        "raise the limit.",
    )


@dataclass(frozen=True)
class QuotaUse:
    """A snapshot of the usage and the learned limits of one quota.

    `requests_share` and `tokens_share` are used fractions (0..1) of this process's part of the limit. A field is None
    if there is no such limit, or none was learned.
    """

    requests_share: float | None
    tokens_share: float | None
    paced: bool
    learned_requests_per_minute: float | None
    learned_tokens_per_minute: float | None
    learned_concurrency: float | None
    """None until the source throttled for it: before that the concurrency is a guess."""

    @property
    def learned(self) -> str:
        """The learned limits, for people; "" if there are none."""
        found = []
        if self.learned_requests_per_minute is not None:
            found.append(f"really about {_shown(self.learned_requests_per_minute)} requests a minute")
        if self.learned_tokens_per_minute is not None:
            found.append(f"really about {_shown(self.learned_tokens_per_minute)} tokens a minute")
        if self.learned_concurrency is not None:
            found.append(f"really about {self.learned_concurrency:,.0f} at once")
        if self.paced:
            found.append("counts like a token bucket")
        return ", ".join(found)


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
