"""Defines `QuotaUse`, a snapshot of what a quota has used and learned."""

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

    @property
    def learned(self) -> str:
        """The learned limits, for people; "" if there are none."""
        found = []
        if self.learned_requests_per_minute is not None:
            found.append(f"really about {_counted(self.learned_requests_per_minute, 'request')} a minute")
        if self.learned_tokens_per_minute is not None:
            found.append(f"really about {_counted(self.learned_tokens_per_minute, 'token')} a minute")
        if self.learned_concurrency is not None:
            found.append(f"about {self.learned_concurrency:,.0f} at once")
        if self.paced:
            found.append("counts like a token bucket")
        return ", ".join(found)


def _counted(number: float, noun: str) -> str:
    text = f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"
