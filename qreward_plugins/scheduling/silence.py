"""Silence: detects a source that accepts requests and stops answering, by the number of overdue answers.

A source that accepts requests and never answers fails none of them until a time limit of minutes has passed. The ages
of its attempts tell earlier that it is down: if it were well, some of them would have been answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .speed import Speed
from .tail import Tail

if TYPE_CHECKING:
    from .attempts import Attempt

SILENT_AT = 9.0
"""Overdue answers from which a source is silent. A healthy source reaches this number with probability exp(-9)."""
DOUBTED_AT = 4.0
"""Overdue answers from which the planner leaves a source out."""
SLOWED = 2.0
"""Factor by which a source may be slower than usual without being silent. Requests that are sent together are late
together, so their ages are not independent."""
SHORTEST_S = 3.0
"""Shortest silence, in seconds, however quick the source: garbage collection or a busy machine is no breakdown."""
_FRESH_S = 0.05
"""Seconds for which a count of overdue answers is used again."""


class Silence:
    """Counts the overdue answers of one source. Times are seconds of the event loop's clock."""

    def __init__(self, live: Mapping[Attempt, None], speed: Speed, tail: Tail) -> None:
        self._live, self._speed = live, speed
        self.tail = tail
        """Shared by the sources of an event loop, so that they learn together."""
        self._heard_at = -math.inf
        self._missing = 0.0
        self._counted_at = -math.inf

    def heard(self, now: float) -> None:
        """Note that the source ended an attempt: an answer, an error or a refusal."""
        self._heard_at = now
        self._counted_at = -math.inf

    def excuse(self, *, since: float, now: float) -> None:
        """Leave out the time from `since` to `now`, in which this process could not read answers."""
        self._counted_at = -math.inf
        if self._heard_at > -math.inf:
            self._heard_at = min(now, self._heard_at + now - since)

    def missing(self, now: float) -> float:
        """The expected number of answers since the last sign of life."""
        if not self._live or not self._speed.known:
            return 0.0
        # Time without any request under way is no silence.
        if now - max(self._heard_at, next(iter(self._live)).started_at) < SHORTEST_S:
            return 0.0
        if now - self._counted_at >= _FRESH_S:
            self._counted_at = now
            # Calls that share a request are answered together.
            self._missing = sum(self._missing_of(attempt, now) / attempt.together for attempt in self._live)
        return self._missing

    def _missing_of(self, attempt: Attempt, now: float) -> float:
        longest_s = SLOWED * attempt.longest_s
        age_s, when_heard_s = now - attempt.started_at, self._heard_at - attempt.started_at
        return self.tail.hazard(age_s / longest_s) - self.tail.hazard(when_heard_s / longest_s)
