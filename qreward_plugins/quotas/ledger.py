"""What was spent of a limit, as a ledger of entries in a sliding window.

A provider's limit is "at most L in any window of W seconds". The fastest way to keep it is to spend what is left at
once and to go on as entries leave the window; pacing the same rate evenly makes batches finish later. The ledger
therefore remembers every entry of the last window, and can say when an amount will fit.

An amount is held from the moment it is reserved, and begins to age only when it is stamped: a server counts a request
when it arrives and a completion when it is written, and both can be later than any window after the reservation (a slow
connection, a long answer). `MARGIN_S` covers how much the way to the server may vary between two requests.
"""

from __future__ import annotations

import math
from collections import deque

MARGIN_S = 0.15


class Entry:
    """One amount, held (`at` is infinite), spent at a time, or so long ago that it is forgotten (minus infinity)."""

    __slots__ = ("amount", "at")

    def __init__(self, amount: float) -> None:
        self.amount = amount
        self.at = math.inf


class Ledger:
    """Entries of one sliding window.

    `limit` is the most that may be spent in any `window_s` seconds. Times are seconds of one monotonic clock; they must
    not go backwards from call to call.
    """

    def __init__(self, limit: float, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s + MARGIN_S
        self._entries: deque[Entry] = deque()
        self._spent = 0.0
        self._held = 0.0

    def spent(self, now: float) -> float:
        """What was spent in the window that ends now, and what is held."""
        self._forget(now)
        return self._spent + self._held

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` fits, at the earliest: 0 if it does now, infinity if it is more than the limit."""
        if amount > self.limit:
            return math.inf
        excess = self.spent(now) + amount - self.limit
        if excess <= _ROUNDING:
            return 0.0
        for entry in self._entries:
            excess -= entry.amount
            if excess <= _ROUNDING:
                return max(entry.at + self.window_s - now, _SHORTEST_WAIT_S)
        return self.window_s  # for what is held, which may begin to age any moment

    def hold(self, amount: float) -> Entry:
        """Reserve `amount`, whether it fits or not: asking first is the caller's part."""
        self._held += amount
        return Entry(amount)

    def stamp(self, entry: Entry, now: float) -> None:
        """Let an entry that is held begin to age."""
        if entry.at == math.inf:
            entry.at = now
            self._entries.append(entry)
            self._held -= entry.amount
            self._spent += entry.amount

    def amend(self, entry: Entry, amount: float) -> None:
        """Set the amount of an entry to what it really was. An entry that left the window already is left alone."""
        if entry.at == math.inf:
            self._held += amount - entry.amount
        elif entry.at > -math.inf:
            self._spent += amount - entry.amount
        entry.amount = amount

    def stamp_all(self, now: float) -> None:
        """Let everything that is held begin to age: nobody is left who would stamp it."""
        self.stamp(Entry(self._held), now)

    def _forget(self, now: float) -> None:
        horizon = now - self.window_s
        entries = self._entries
        while entries and entries[0].at <= horizon:
            entry = entries.popleft()
            self._spent -= entry.amount
            entry.at = -math.inf
        if not entries:
            self._spent = 0.0


class Pace:
    """Even pacing with a small burst: the generic cell rate algorithm (ITU-T I.371), which needs one time stamp.

    `rate_per_s` requests per second, `burst` of them at once.
    """

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._interval_s = 1.0 / rate_per_s
        self._tolerance_s = (burst - 1) * self._interval_s
        self._due = -math.inf

    def wait_s(self, now: float) -> float:
        """Seconds until the next request may go."""
        wait = self._due - self._tolerance_s - now
        return wait if wait > _ROUNDING else 0.0

    def spend(self, now: float) -> None:
        """Enter one request at `now`."""
        self._due = max(self._due, now) + self._interval_s


_ROUNDING = 1e-9
_SHORTEST_WAIT_S = 1e-4
