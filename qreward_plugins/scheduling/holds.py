"""Holds: what kept a source from taking requests, over time. A batch report tells from it what a batch waited for."""

from __future__ import annotations

import bisect
from collections import deque
from typing import Literal

Hold = Literal["", "queue", "quota", "pause"]
"""Why a source takes no request: `queue`, all its concurrency is in use; `quota`, its quota is spent; `pause`, it asked
for a pause or its circuit is open. "" if it takes requests."""

_REMEMBERED = 8192
"""Number of changes that are remembered; older ones are dropped."""


class Holds:
    """The changes of one source's hold. Times are seconds of the event loop's clock."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, Hold]] = deque(maxlen=_REMEMBERED)

    def note(self, hold: Hold, now: float) -> None:
        """Note what holds the source from `now` on."""
        if not self._changes or self._changes[-1][1] != hold:
            self._changes.append((now, hold))

    def seconds(self, since: float, until: float) -> dict[Hold, float]:
        """Seconds of [since, until] by hold. Time before the oldest remembered change counts as no hold."""
        changes = list(self._changes)
        first = max(0, bisect.bisect_right(changes, since, key=lambda change: change[0]) - 1)
        seconds: dict[Hold, float] = {}
        at, hold = since, changes[first][1] if changes and changes[first][0] <= since else ""
        for changed_at, new_hold in changes[first:]:
            if changed_at >= until:
                break
            if changed_at > at:
                seconds[hold] = seconds.get(hold, 0.0) + changed_at - at
                at = changed_at
            hold = new_hold
        seconds[hold] = seconds.get(hold, 0.0) + until - at
        return seconds
