"""Silence: how many answers of a source are missing that should have come by now.

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
"""Missing answers from which on a source is taken for silent: if it were well, the chance of that is exp(-9)."""
DOUBTED_AT = 4.0
"""Missing answers from which on nothing is planned with a source."""
SLOWED = 2.0
"""How much slower than usual a source may be without being taken for silent: requests that are sent together are
answered late together, so their ages are no independent witnesses."""
SHORTEST_S = 3.0
"""Silence that is forgiven to quick sources, too: garbage collection or a busy machine is no breakdown."""
_FRESH_S = 0.05


class Silence:
    """Counts the missing answers of one source. Times are seconds of the event loop's clock."""

    def __init__(self, live: Mapping[Attempt, None], speed: Speed, tail: Tail) -> None:
        self._live, self._speed = live, speed
        self.tail = tail
        """Shared by the sources of an event loop, so that they learn together."""
        self._heard_at = -math.inf
        self._missing = 0.0
        self._counted_at = -math.inf

    def heard(self, now: float) -> None:
        """Note that an attempt ended by what the source did, whatever that was."""
        self._heard_at = now
        self._counted_at = -math.inf

    def excuse(self, *, since: float, now: float) -> None:
        """Leave out the time from `since` to `now`, in which this process did not listen."""
        self._counted_at = -math.inf
        if self._heard_at > -math.inf:
            self._heard_at = min(now, self._heard_at + now - since)

    def missing(self, now: float) -> float:
        """How many answers should have come since the last one."""
        if not self._live or not self._speed.known:
            return 0.0
        # A source that was asked nothing was not silent, however long ago it was heard.
        if now - max(self._heard_at, next(iter(self._live)).started_at) < SHORTEST_S:
            return 0.0
        if now - self._counted_at >= _FRESH_S:
            self._counted_at = now
            self._missing = sum(self._missing_of(attempt, now) for attempt in self._live)
        return self._missing

    def _missing_of(self, attempt: Attempt, now: float) -> float:
        longest_s = SLOWED * attempt.longest_s
        age_s, when_heard_s = now - attempt.started_at, self._heard_at - attempt.started_at
        return self.tail.hazard(age_s / longest_s) - self.tail.hazard(when_heard_s / longest_s)
