"""What was spent of a limit, as a ledger of a sliding window.

A provider's limit is "at most L in any window of W seconds". The fastest way to keep it is to spend what is left at
once and to go on as entries leave the window; pacing the same rate evenly makes batches finish later. The ledger
therefore remembers every entry of the last window, and can say when an amount will fit, and how much will fit by then.

An amount is held from the moment it is reserved, and begins to age only when it is stamped: a server counts a request
when it arrives and a completion when it is written, and both can be later than any window after the reservation (a slow
connection, a long answer). `MARGIN_S` covers how much the way to the server may vary between two requests.

Entries are plain numbers in lists, oldest first; running sums are kept as far as somebody asked for them, so that both
questions are a binary search. A ledger without a limit keeps its books, too: a limit may be learned or declared later,
and what was spent by then counts. Entries are kept a minute at least for that reason, and where there are thousands of
them, those of one grain of time become one, which counts from the latest: memory is bounded at any rate.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

MARGIN_S = 0.15

_KEPT_S = 60.0
_MANY = 4096
_OUTLOOK = 64
_TIDY_AT = 1024
_ROUNDING = 1e-9
_SHORTEST_WAIT_S = 1e-4


class Ledger:
    """Entries of one sliding window.

    At most `limit` (infinity: no limit) may be spent in any `window_s` seconds. Times are seconds of one monotonic
    clock; they must not go backwards from call to call.
    """

    __slots__ = (
        "_amounts",
        "_at",
        "_dropped",
        "_dropped_amount",
        "_dropped_at",
        "_first",
        "_grain_s",
        "_in_window",
        "_sums",
        "_tidy_at",
        "held",
        "limit",
        "window_s",
    )

    def __init__(self, limit: float = math.inf, window_s: float = 60.0) -> None:
        self.limit = limit
        self.held = 0.0
        """What is reserved and does not age yet."""
        self._at: list[float] = []
        self._amounts: list[float] = []
        self._sums: list[float] = []
        self._first = 0  # of the entries in the window
        self._in_window = 0.0
        self._dropped = 0
        self._dropped_amount = 0.0
        self._dropped_at = -math.inf
        self._tidy_at = _TIDY_AT
        self._set_window(window_s)

    def spent(self, now: float) -> float:
        """What was spent in the window that ends now, and what is held."""
        self._forget(now)
        return self._in_window + self.held

    def share(self, now: float) -> float | None:
        """What is spent, as a share of the limit; None where there is no limit."""
        if self.limit == math.inf:
            return None
        return self.spent(now) / self.limit if self.limit else 1.0

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` fits, at the earliest: 0 if it does now, infinity if it is more than the limit.

        Where it would have to wait for what is held, the answer is a whole window, because that may begin to age any
        moment.
        """
        limit = self.limit
        if limit == math.inf or amount <= 0:
            return 0.0
        if amount > limit + _ROUNDING:
            return math.inf
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
        """How many requests of `amount` each can be sent in [now, until], spending the window as soon as it allows.

        What ages out is spent again, and ages out again a window later. What is held is taken to age from now.
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

    def hold(self, amount: float) -> None:
        """Reserve `amount`, whether it fits or not: asking first is the caller's part."""
        self.held += amount

    def stamp(self, amount: float, now: float) -> int:
        """Let `amount` of what is held begin to age. Returns the number of its entry, for `amend`."""
        if amount <= 0:
            return -1
        self._forget(now)
        self.held -= amount
        if self.held < _ROUNDING:
            self.held = 0.0
        self._in_window += amount
        at = self._at
        last = len(at) - 1
        if last >= _MANY and last >= self._first and at[last] // self._grain_s == now // self._grain_s:
            at[last] = now
            self._amounts[last] += amount
            del self._sums[last:]
        else:
            last += 1
            at.append(now)
            self._amounts.append(amount)
        return self._dropped + last

    def amend(self, entry: int, by: float) -> None:
        """Change the amount of an entry, once it is known what it really was. An entry long gone is left alone."""
        index = entry - self._dropped
        if index < 0 or not by:
            return
        self._amounts[index] += by
        if index >= self._first:
            self._in_window += by
        del self._sums[index:]

    def stamp_all(self, now: float) -> None:
        """Let everything that is held begin to age: nobody is left who would stamp it."""
        self.stamp(self.held, now)

    def since(self, moment: float) -> float:
        """What was spent after `moment`, and what is held."""
        return math.fsum(self._amounts[bisect_right(self._at, moment) :]) + self.held

    def outlook(self, now: float) -> tuple[tuple[float, float], ...]:
        """What is spent, as (seconds until it leaves the window, amount), in at most some sixty parts, each of which
        has left by then; what is held leaves at no time that could be told: infinity.

        What was spent at about the same time is one part. Were it so many entries each, a part could hold the last of
        one burst and the first of the next, and would be told to leave a whole window too late.
        """
        self._forget(now)
        at, parts, start = self._at, [], self._first
        while start < len(at):
            end = bisect_right(at, at[start] + self.window_s / _OUTLOOK, start)
            amount = math.fsum(self._amounts[start:end])
            if amount > 0:
                parts.append((at[end - 1] + self.window_s - now, amount))
            start = end
        if self.held > 0:
            parts.append((math.inf, self.held))
        return tuple(parts)

    def forgive(self, down_to: float, now: float) -> bool:
        """Forget the oldest of what was spent until `down_to` is left; return whether there was anything to forget."""
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
        """Count over windows of another length from now on.

        What a longer window reaches back to and is no longer remembered counts as if it had been spent at the last
        moment that was not remembered: too early to send again is never an option.
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
        self.window_s = window_s + MARGIN_S
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
        # As many again as are left: the work stays in proportion to the entries.
        self._tidy_at = self._first + max(_TIDY_AT, len(self._at))

    def _summed(self) -> list[float]:
        """Running sums of all amounts that are kept."""
        sums, done = self._sums, len(self._sums)
        if done < len(self._amounts):
            start = sums.pop() if done else 0.0
            sums.extend(accumulate(self._amounts[done:], initial=start))
            if not done:
                del sums[0]
        return sums

    def _before(self) -> float:
        return self._summed()[self._first - 1] if self._first else 0.0
