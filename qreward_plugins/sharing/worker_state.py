"""What the keeper knows of one worker and one limit."""

from __future__ import annotations

import math

from .messages import Part

ROUNDING = 1e-6


class WorkerState:
    """What a worker holds, wants and has spent, by what it told last."""

    __slots__ = ("_entries", "_spent", "charge", "granted_at", "more", "share", "told", "unit", "version")

    def __init__(self) -> None:
        self.told = (math.inf, 0.0)
        self.share = 0.0
        self.more = 0.0
        self.unit = 1.0
        self.granted_at = -math.inf
        self.charge = 0.0
        self.version = 0
        self._entries: list[tuple[float, float]] = []  # (until, amount), the latest first
        self._spent = 0.0

    def take_in(self, part: Part, now: float) -> None:
        """Take in what it says."""
        self.share, self.more, self.unit = part.share, part.more, max(part.unit, ROUNDING)
        self._entries = sorted([(now + left_s, amount) for left_s, amount in part.spent], reverse=True)
        self._spent = math.fsum(amount for _, amount in part.spent)

    def spent(self, now: float) -> float:
        """What of it is in the window still."""
        entries = self._entries
        if entries and entries[-1][0] <= now:
            while entries and entries[-1][0] <= now:
                self._spent -= entries.pop()[1]
            if not entries:
                self._spent = 0.0
        return self._spent

    def base(self, now: float) -> float:
        """What it may have in the window at most."""
        return max(self.share, self.spent(now))

    def room(self, now: float) -> float:
        """What is left of its share."""
        return max(0.0, self.share - self.spent(now))

    def in_units(self, amount: float) -> float:
        """An amount, less what is of no use to it."""
        return math.floor(amount / self.unit + ROUNDING) * self.unit

    def next_change(self) -> float:
        """When some of what it has spent leaves the window; infinity: not before it says so."""
        return self._entries[-1][0] if self._entries else math.inf

    def remains(self) -> list[tuple[float, float]]:
        """What it has spent: (until when, amount)."""
        return self._entries
