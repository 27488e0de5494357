"""A snapshot of a quota for statistics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuotaUse:
    """A snapshot of the usage and the learned limits of one quota.

    `requests_share` and `tokens_share` are used fractions (0..1) of this process's part of the limit. A field is None
    if there is no such limit, or none was learned.
    """

    in_flight: int
    concurrency: int
    requests_share: float | None
    tokens_share: float | None
    paced: bool
    learned_requests_per_minute: float | None
    learned_tokens_per_minute: float | None
    learned_concurrency: float | None
    """None until the source throttled for it: before that the concurrency is a guess."""
    learned_from: str
    """Origin of the learned request limit: "announced", "throttled", or empty if none."""
    throttled: int
    """Number of 429s so far."""
