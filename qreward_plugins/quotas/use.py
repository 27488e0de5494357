"""A snapshot of a quota, for statistics and people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuotaUse:
    """A snapshot: what of a quota is in use, and what was learned. Shares are of this process's part of the limit.
    None: no such limit, or nothing learned.
    """

    in_flight: int
    concurrency: int
    requests_share: float | None
    tokens_share: float | None
    paced: bool
    learned_requests_per_minute: float | None
    learned_tokens_per_minute: float | None
    learned_concurrency: float | None
    """Set once the source throttled for it: until then it is a guess."""
    learned_from: str
    """Where the learned limit of requests comes from: "announced", "throttled" or empty."""
    announced_requests_per_window: float | None
    announced_tokens_per_window: float | None
    throttled: int
    """429s so far."""
