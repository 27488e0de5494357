"""One limit per window of a source, on requests or on tokens, and the ledger of what was spent of it.

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

A limit is declared, or learned from the server (discovery.py). One reply may come from a proxy or another deployment,
or be provoked by its request, so a single reply never changes a limit (promise P11). An announced limit applies while
`REPLIES_NEEDED` of the last `REPLIES_KEPT` replies state it; of several such limits the lowest applies. A declared
limit is never exceeded, and what a server announces does not change it: its window is not known. A lower one is logged
once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Literal, TypeAlias

from .discovery import Discovery, Probe

Unit: TypeAlias = Literal["requests", "tokens"]

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

REPLIES_NEEDED = 3
"""Number of replies that must announce the same limit before it applies."""
REPLIES_KEPT = 8
"""Number of recent replies whose announcements are kept."""
_WITHDRAWN = 4096
"""Rejected requests that are remembered, in case the limit is declared later."""


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


class WindowLimit:
    """What a source allows per window, and what was spent of it. Times are seconds of one monotonic clock."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._learns = Discovery
        self.ledger = Ledger()
        self.wait_s: Callable[[float, float], float] = self.ledger.wait_s
        """Returns the seconds until an amount may be sent; infinity if that is never, or unknown. Each attempt asks
        several times, so it is the method of the ledger or of `discovery` itself."""
        self.discovery: Discovery | None = None
        """What was learned of the limit; None if it is declared. `_learn` sets it."""
        self.whole = math.inf
        """The declared limit of all processes together."""
        self.window_s = 0.0
        """Length of the configured window in seconds."""
        self._announced: deque[float | None] = deque(maxlen=REPLIES_KEPT)
        """What recent replies announced; None: nothing."""
        self._told = math.inf
        """The announced limit below the declared one of which the log has told."""
        self._withdrawn: deque[tuple[int, float]] = deque(maxlen=_WITHDRAWN)

    @property
    def learned_per_minute(self) -> float | None:
        """The learned limit per minute; None if none is learned."""
        return self.discovery.per_minute if self.discovery is not None else None

    def declare(self, part: float, whole: float, window_s: float, now: float) -> None:
        """Change the declared limit; infinity: none, and it is learned from now on. What was spent stays spent."""
        if part < math.inf:
            # Rejected requests count at a declared limit.
            for entry, amount in self._withdrawn:
                self.ledger.amend(entry, amount)
            self._withdrawn.clear()
        if part < math.inf or self.discovery is None:
            self.ledger.limit = part
            self.ledger.change_window(window_s, now)
        self.whole, self.window_s = whole, window_s
        if part < math.inf:
            self._learn(None)
        elif self.discovery is None:
            self._learn(self._learns(self.ledger, self.unit, window_s))

    def learn_by(self, kind: type[Discovery]) -> None:
        """Learn an undeclared limit in another way from now on. What was learned is forgotten."""
        self._learns = kind
        if self.discovery is not None and type(self.discovery) is not kind:
            self.ledger.limit = math.inf
            self._learn(kind(self.ledger, self.unit, self.discovery.window_s))

    def _learn(self, discovery: Discovery | None) -> None:
        self.discovery = discovery
        self.wait_s = (self.ledger if discovery is None else discovery).wait_s

    def capacity(self, until: float, amount: float, now: float) -> float:
        """Return how many requests of `amount` each may be sent in [now, until]; infinity without a limit."""
        largest = amount if self.discovery is None else self.discovery.largest(amount)
        return self.ledger.capacity(until, largest, now)

    def reserve(self, amount: float, now: float) -> Probe:
        """Reserve `amount`. Return how its request relates to a learned limit."""
        probe: Probe = ""
        if self.discovery is not None and self.discovery.origin:
            probe = self.discovery.reserved(amount, now)
        self.ledger.held += amount
        return probe

    def withdraw(self, entry: int, amount: float) -> None:
        """Remove a rejected request from the ledger of an undeclared limit."""
        if self.discovery is not None and entry >= 0:
            self.ledger.amend(entry, -amount)
            self._withdrawn.append((entry, amount))

    def ended(self, now: float, sent_at: float, rejected: bool, probe: Probe) -> str | None:
        """Record the end of a request; see `Discovery.ended`. Return a log message if the limit changed."""
        if self.discovery is None or not self.discovery.origin:
            return None
        return self.discovery.ended(now, sent_at=sent_at, rejected=rejected, probe=probe)

    def announced(self, announced: Mapping[str, float], *, in_flight: float, processes: int, now: float) -> str | None:
        """Apply the limit that a reply announced (`Reply.announced`). Return a log message if the limit changed.

        `in_flight` is the amount that this process has in flight. `processes` use the source.
        """
        limit, remaining = announced.get(f"{self.unit}_per_window"), announced.get(f"{self.unit}_remaining")
        if limit is None or limit < 1 or (remaining is not None and remaining > limit):
            limit = remaining = None  # none, or inconsistent
        self._announced.append(limit)
        agreed = [stated for stated, count in Counter(self._announced).items() if count >= REPLIES_NEEDED]
        if limit is None or min((stated for stated in agreed if stated is not None), default=None) != limit:
            return None
        if self.discovery is None:
            if limit >= self.whole or limit == self._told:
                return None
            self._told = limit
            return f"the server announces a limit of {limit:g} {self.unit}, below the declared {self.whole:g}"
        reset_s = announced.get(f"{self.unit}_reset_s")
        return self.discovery.announced(limit, remaining, reset_s, in_flight=in_flight, share=processes, now=now)

    def forget_in_flight(self, now: float) -> None:
        """Count all requests in flight as ended, after their event loop was closed."""
        self.ledger.stamp(self.ledger.held, now)
        if self.discovery is not None:
            self.discovery.abandon(now)
