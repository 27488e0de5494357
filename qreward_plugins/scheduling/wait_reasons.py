"""Why a source took no requests, over time. The report of a batch tells from it what the batch waited for."""

from __future__ import annotations

import bisect
from collections import deque
from typing import Literal

WaitReason = Literal["", "queue", "quota", "pause"]
"""Why a source takes no request: `queue`, all its concurrency is in use; `quota`, its quota is spent; `pause`, it asked
for a pause, its servers sleep or get other weights, or its circuit is open. "" if it takes requests."""

_REMEMBERED = 8192
"""Number of changes that are remembered; older ones are dropped."""


class WaitReasons:
    """The changes of one source's wait reason. Times are seconds of the event loop's clock."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, WaitReason]] = deque(maxlen=_REMEMBERED)

    def note(self, reason: WaitReason, now: float) -> None:
        """Note why the source takes no requests from `now` on."""
        if not self._changes or self._changes[-1][1] != reason:
            self._changes.append((now, reason))

    def seconds(self, since: float, until: float) -> dict[WaitReason, float]:
        """Seconds of [since, until] by reason. Time before the oldest remembered change counts as ""."""
        changes = list(self._changes)
        first = max(0, bisect.bisect_right(changes, since, key=lambda change: change[0]) - 1)
        seconds: dict[WaitReason, float] = {}
        at, reason = since, changes[first][1] if changes and changes[first][0] <= since else ""
        for changed_at, new_reason in changes[first:]:
            if changed_at >= until:
                break
            if changed_at > at:
                seconds[reason] = seconds.get(reason, 0.0) + changed_at - at
                at = changed_at
            reason = new_reason
        seconds[reason] = seconds.get(reason, 0.0) + until - at
        return seconds
