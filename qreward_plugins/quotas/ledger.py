"""Records what was spent of a limit in a sliding window.

A provider's limit is "at most L in any window of W seconds". The fastest way to use it is to spend what is left at once
and go on as entries leave the window; pacing the same rate evenly makes batches finish later. The ledger keeps every
entry of the last window, and computes when an amount fits and how much fits until a given time.

An amount is held from its reservation and enters the window only when it is stamped. A server counts a request when it
arrives and a completion when it is written, and both can be more than a window after the reservation (slow connection,
long answer). `MARGIN_S` covers the variation of the network delay between two requests.

Entries are numbers in lists, oldest first. Running sums are computed on demand, so that both queries are a binary
search. A ledger without a limit records entries, too: a limit may be learned or declared later, and earlier entries
count for it. Entries are therefore kept for at least `_KEPT_S`. To bound memory, entries beyond `_MANY` that fall into
one `_grain_s` are merged, and the merged entry counts from the latest of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

MARGIN_S = 0.15
"""Seconds that are added to every window, for the variation of the network delay."""

FOR_GOOD_S = 1e9
"""Length of a window that no run outlasts: what is spent in it stays spent as long as a process shares the limit."""

_KEPT_S = 60.0
"""Shortest time, in seconds, for which entries are kept."""
_MANY = 4096
"""Number of entries from which neighbours are merged."""
OUTLOOK = 64
"""Most parts of an outlook."""
_TIDY_AT = 1024
"""Entries outside of the window from which they are dropped."""
_ROUNDING = 1e-9
_SHORTEST_WAIT_S = 1e-4


def window_with_margin(window_s: float) -> float:
    """Return for how long a ledger of this window counts what was spent, in seconds."""
    return window_s + MARGIN_S


class Ledger:
    """Entries of one sliding window.

    At most `limit` (infinity: no limit) may be spent in any `window_s` seconds. Times are seconds of one monotonic
    clock; they must not go backwards from call to call.
    """

    def __init__(self, limit: float = math.inf, window_s: float = 60.0) -> None:
        self.limit = limit
        self.held = 0.0
        """Amount that is reserved and not stamped yet. Ask `wait_s` before you add to it."""
        self._at: list[float] = []
        self._amounts: list[float] = []
        self._sums: list[float] = []
        self._first = 0  # index of the first entry in the window
        self._in_window = 0.0
        self._dropped = 0
        self._dropped_amount = 0.0
        self._dropped_at = -math.inf
        self._tidy_at = _TIDY_AT
        self._set_window(window_s)

    def spent(self, now: float) -> float:
        """Return the amount spent in the window that ends now, plus what is held."""
        self._forget(now)
        return self._in_window + self.held

    def share(self, now: float) -> float | None:
        """Return the spent part of the limit as a fraction; None if there is no limit."""
        if self.limit == math.inf:
            return None
        return self.spent(now) / self.limit if self.limit else 1.0

    def wait_s(self, amount: float, now: float) -> float:
        """Return the least seconds until `amount` fits: 0 if it fits now, infinity if it exceeds the limit.

        If it must wait for a held amount, the result is a whole window, because that amount may be stamped at any time.
        """
        limit = self.limit
        if limit == math.inf or amount <= 0:
            return 0.0
        if amount > limit + _ROUNDING:
            return math.inf
        if self._in_window + self.held + amount <= limit:
            return 0.0  # entries that have left the window would only add room
        self._forget(now)
        excess = self._in_window + self.held + amount - limit
        if excess <= _ROUNDING:
            return 0.0
        if excess > self._in_window + _ROUNDING:
            return self.window_s
        first = self._first
        if self._amounts[first] < excess - _ROUNDING:
            first = min(bisect_left(self._summed(), self._before() + excess - _ROUNDING, first), len(self._at) - 1)
        return max(self._at[first] + self.window_s - now, _SHORTEST_WAIT_S)

    def capacity(self, until: float, amount: float, now: float) -> float:
        """Return how many requests of `amount` each can be sent in [now, until] if each is sent as early as possible.

        Capacity that leaves the window is spent again, and leaves it again one window later. Held amounts count as
        stamped now.
        """
        if until < now:
            return 0.0
        if self.limit == math.inf or amount <= 0:
            return math.inf
        self._forget(now)
        windows, rest = divmod(until - now + _ROUNDING, self.window_s)
        free = self.limit - self._in_window - self.held
        aged = bisect_right(self._at, now + rest - self.window_s + _ROUNDING, self._first)
        if aged > self._first:
            free += self._summed()[aged - 1] - self._before()
        return windows * math.floor(self.limit / amount + _ROUNDING) + max(0, math.floor(free / amount + _ROUNDING))

    def stamp(self, amount: float, now: float) -> int:
        """Move `amount` from held into the window. Returns the number of its entry, for `amend`."""
        if amount <= 0:
            return -1
        at, last = self._at, len(self._at)
        if last > self._first and at[self._first] <= now - self.window_s:
            self._forget(now)
            last = len(at)
        self.held = self.held - amount if self.held - amount >= _ROUNDING else 0.0
        self._in_window += amount
        if last > _MANY and last > self._first and at[last - 1] // self._grain_s == now // self._grain_s:
            last -= 1
            at[last] = now
            self._amounts[last] += amount
            del self._sums[last:]
        else:
            at.append(now)
            self._amounts.append(amount)
        return self._dropped + last

    def amend(self, entry: int, by: float) -> None:
        """Add `by` to the amount of an entry, when the real usage is known. Ignores entries that are not kept."""
        index = entry - self._dropped
        if index < 0 or not by:
            return
        self._amounts[index] += by
        if index >= self._first:
            self._in_window += by
        del self._sums[index:]

    def since(self, moment: float) -> float:
        """Return the amount spent after `moment`, plus what is held."""
        return math.fsum(self._amounts[bisect_right(self._at, moment) :]) + self.held

    def outlook(self, now: float) -> tuple[tuple[float, float], ...]:
        """Return what is spent as (seconds until it has left the window, amount), in about `OUTLOOK` parts at most.
        The seconds of a held amount are infinity.

        Entries are grouped by time, not by number. A group of a fixed number could hold the end of one burst and the
        start of the next, and would leave up to a window too late.
        """
        self._forget(now)
        at, parts, start = self._at, [], self._first
        while start < len(at):
            end = bisect_right(at, at[start] + self.window_s / OUTLOOK, start)
            amount = math.fsum(self._amounts[start:end])
            if amount > 0:
                parts.append((at[end - 1] + self.window_s - now, amount))
            start = end
        if self.held > 0:
            parts.append((math.inf, self.held))
        return tuple(parts)

    def remove_oldest(self, down_to: float, now: float) -> bool:
        """Remove the oldest entries until `down_to` is left; return False if there was nothing to remove."""
        self._forget(now)
        first, end = self._first, len(self._at)
        excess = self._in_window + self.held - down_to
        if excess < 1 or first == end:
            return False
        while first < end and self._amounts[first] <= excess:
            excess -= self._amounts[first]
            self._in_window -= self._amounts[first]
            first += 1
        self._first = first
        if first < end:
            self._amounts[first] -= excess
            self._in_window -= excess
            del self._sums[first:]
        return True

    def change_window(self, window_s: float, now: float) -> None:
        """Change the length of the window.

        A longer window may reach back to entries that are no longer kept. They count at the time of the latest of them,
        which is the safe side: no capacity is reported too early.
        """
        self._set_window(window_s)
        self._first = bisect_right(self._at, now - self.window_s)
        if self._dropped_at > now - self.window_s:
            if not self._at:
                self._at.append(self._dropped_at)
                self._amounts.append(0.0)
            self._amounts[0] += self._dropped_amount
            self._dropped_amount = 0.0
            self._sums.clear()
        self._in_window = math.fsum(self._amounts[self._first :])

    def _set_window(self, window_s: float) -> None:
        self.window_s = window_with_margin(window_s)
        self._grain_s = max(self.window_s, _KEPT_S) / _MANY

    def _forget(self, now: float) -> None:
        at, first = self._at, self._first
        end, horizon = len(at), now - self.window_s
        if first == end or at[first] > horizon:
            return
        while first < end and at[first] <= horizon:
            self._in_window -= self._amounts[first]
            first += 1
        self._first = first
        if first == end:
            self._in_window = 0.0
        if first >= self._tidy_at:
            self._tidy(now)

    def _tidy(self, now: float) -> None:
        count = bisect_right(self._at, now - max(self.window_s, _KEPT_S), 0, self._first)
        if count:
            self._dropped += count
            self._dropped_at = self._at[count - 1]
            self._dropped_amount += math.fsum(self._amounts[:count])
            del self._at[:count], self._amounts[:count]
            self._sums.clear()
            self._first -= count
        # Tidies again after as many entries as are left, so that its cost stays proportional to the entries.
        self._tidy_at = self._first + max(_TIDY_AT, len(self._at))

    def _summed(self) -> list[float]:
        """Return the running sums of all kept amounts."""
        sums, done = self._sums, len(self._sums)
        if done < len(self._amounts):
            start = sums.pop() if done else 0.0
            sums.extend(accumulate(self._amounts[done:], initial=start))
            if not done:
                del sums[0]
        return sums

    def _before(self) -> float:
        return self._summed()[self._first - 1] if self._first else 0.0
