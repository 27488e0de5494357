"""What everybody holds of one limit: at most all of it, whatever happens to whom.

What a worker has in the window is at most its share, or what it had spent before the share was lowered, as far as that
is in the window still. So the books hold one number for every worker, the larger of the two, and the sum of them never
exceeds the limit; that is the whole proof. Shares are raised in the books before a worker hears of it, and lowered
after it has done so by itself.
"""

from __future__ import annotations

import heapq
import math

from .ghosts import Ghosts
from .holding import ROUNDING, Holding
from .messages import Part


class Books:
    """What everybody holds of one limit: at most `limit` in any window of `window_s` seconds; 0: at any time.

    Times are seconds of the keeper's monotonic clock.
    """

    def __init__(self, limit: float, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._ghosts = Ghosts()
        self._holdings: dict[str, Holding] = {}
        self._taken = 0.0
        self._changes: list[tuple[float, str, int]] = []

    def __contains__(self, worker: str) -> bool:
        return worker in self._holdings

    def share(self, worker: str) -> float:
        """The share of a worker."""
        return self._holdings[worker].share

    def haunt(self, until: float) -> None:
        """Take the whole limit as spent until `until`, less what workers turn out to hold: an earlier keeper gave it
        away, and nobody knows to whom.
        """
        self._ghosts.haunt_all(self.limit, until)

    def free(self, now: float) -> float:
        """What nobody holds. Less than nothing: the limit was lowered."""
        changes = self._changes
        while changes and changes[0][0] <= now:
            _, worker, version = heapq.heappop(changes)
            holding = self._holdings.get(worker)
            if holding is not None and holding.version == version:
                self._charge(worker, holding, now)
        return self.limit - self._taken - self._ghosts.total(now)

    def next_change(self, now: float) -> float:
        """When more becomes free by itself; infinity: not by itself."""
        self.free(now)
        return min(self._ghosts.next_end(now), self._changes[0][0] if self._changes else math.inf)

    def report(self, worker: str, part: Part, now: float, *, limit: float, window_s: float) -> None:
        """Take in what a worker keeps to, what it has spent and what it wants, and which limit it was told of: where
        they were told different ones, the lowest rate counts.
        """
        holding = self._holdings.get(worker)
        if holding is None:
            holding = self._holdings[worker] = Holding()
            if worker in self._ghosts:
                self._ghosts.banish(worker)  # it is back, and knows better
            else:
                self._ghosts.turns_out(max(part.share, math.fsum(amount for _, amount in part.spent)))
        if holding.told != (limit, window_s):
            holding.told = (limit, window_s)
            self._find_lowest()
        holding.take_in(part, now)
        self._charge(worker, holding, now)

    def drop(self, worker: str, now: float, *, silent: bool) -> None:
        """Forget a worker that left, or that fell silent and has stopped by now: then whatever it might have spent
        counts as spent just now, unless it comes back.
        """
        holding = self._holdings.pop(worker, None)
        if holding is None:
            return
        self._taken -= holding.charge
        if silent:
            self._ghosts.haunt(worker, now + self.window_s, holding.charge)
        else:
            for number, (end, amount) in enumerate(holding.remains()):
                self._ghosts.haunt(f"{worker} {number}", end if end < math.inf else now + self.window_s, amount)
        if self._holdings and holding.told == (self.limit, self.window_s):
            self._find_lowest()

    def _raise(self, worker: str, share: float, now: float) -> None:
        """Raise a share, by what is free at most."""
        holding = self._holdings[worker]
        holding.share = share
        holding.granted_at = now
        self._charge(worker, holding, now)

    def _count_anew(self) -> None:
        """Add up what everybody holds, so that roundings do not add up."""
        self._taken = math.fsum([holding.charge for holding in self._holdings.values()])

    def _charge(self, worker: str, holding: Holding, now: float) -> None:
        self._taken -= holding.charge
        spent = holding.spent(now)
        holding.charge = max(holding.share, spent)
        holding.version += 1
        self._taken += holding.charge
        if spent > holding.share + ROUNDING and holding.next_change() < math.inf:
            heapq.heappush(self._changes, (holding.next_change(), worker, holding.version))

    def _find_lowest(self) -> None:
        told = {holding.told for holding in self._holdings.values()}
        self.limit = min(told, key=lambda one: (one[0] / max(one[1], 1.0), one[0]))[0]
        self.window_s = max(window_s for _, window_s in told)
