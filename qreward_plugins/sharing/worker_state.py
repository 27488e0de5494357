"""The keeper's state of one worker at one limit."""

from __future__ import annotations

import math

from .messages import Part

ROUNDING = 1e-6


class WorkerState:
    """A worker's share, demand and spending, as of its last report."""

    __slots__ = ("_entries", "_spent", "charge", "declared", "granted_at", "more", "share", "unit", "version")

    def __init__(self) -> None:
        self.declared = (math.inf, 0.0)
        self.share = 0.0
        self.more = 0.0
        self.unit = 1.0
        self.granted_at = -math.inf
        self.charge = 0.0
        self.version = 0
        self._entries: list[tuple[float, float]] = []  # (until, amount), the latest first
        self._spent = 0.0

    def record(self, part: Part, now: float) -> None:
        """Record the worker's report."""
        self.share, self.more, self.unit = part.share, part.more, max(part.unit, ROUNDING)
        self._entries = sorted([(now + left_s, amount) for left_s, amount in part.spent], reverse=True)
        self._spent = math.fsum(amount for _, amount in part.spent)

    def spent(self, now: float) -> float:
        """Return the amount spent that is still in the window."""
        entries = self._entries
        if entries and entries[-1][0] <= now:
            while entries and entries[-1][0] <= now:
                self._spent -= entries.pop()[1]
            if not entries:
                self._spent = 0.0
        return self._spent

    def base(self, now: float) -> float:
        """Return the most that the worker can have in the window: its share, or what it spent under a larger one."""
        return max(self.share, self.spent(now))

    def room(self, now: float) -> float:
        """Return the unspent part of the share."""
        return max(0.0, self.share - self.spent(now))

    def in_units(self, amount: float) -> float:
        """Round `amount` down to whole units of the worker."""
        return math.floor(amount / self.unit + ROUNDING) * self.unit

    def next_change(self) -> float:
        """Return when the next amount leaves the window; infinity if that is unknown until the next report."""
        return self._entries[-1][0] if self._entries else math.inf

    def remains(self) -> list[tuple[float, float]]:
        """Return the amounts spent: (when the amount leaves the window, amount)."""
        return self._entries
