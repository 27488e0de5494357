"""One limit as the keeper sees it: who may use how much of it, so that all of it is used and never more.

What a worker has in the window is at most its share, or what it had spent before the share was lowered, as far as that
is in the window still. So the books hold one number for every worker, the larger of the two, and the sum of them never
exceeds the limit; that is the whole proof. Shares are raised in the books before a worker hears of it, and lowered
after it has done so by itself.

Who gets what: as much as everybody wants, or equal parts where that is too much (max-min fairness), and what is left
over evenly, so that a worker which begins to work has something in hand. What is scarcer than one for each goes round:
whoever waited longest is next, and keeps it for a turn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator

from .messages import Grant, Part

TURN_S = 1.0
"""Seconds for which what was granted is not asked back."""
WORTH_A_WORD = 0.05
"""Part of its share that is worth asking a worker for, or telling it of."""
FAIR_FOR_S = 0.1
"""Seconds for which the fair shares of many workers are not found anew."""
FEW = 32

ROUNDING = 1e-6


class _Holding:
    """What one worker holds, wants, and has spent, as far as it was told."""

    __slots__ = ("charge", "granted_at", "more", "share", "spent", "told", "unit", "version")

    def __init__(self) -> None:
        self.told = (math.inf, 0.0)
        self.share = 0.0
        self.spent: list[tuple[float, float]] = []  # (until, amount), the latest first
        self.more = 0.0
        self.unit = 1.0
        self.granted_at = -math.inf
        self.charge = 0.0
        self.version = 0

    def spent_at(self, now: float) -> float:
        spent = self.spent
        while spent and spent[-1][0] <= now:
            spent.pop()
        return math.fsum(amount for _, amount in spent)


class Pool:
    """The shares of one limit: at most `limit` in any window of `window_s` seconds; 0: at any time.

    Times are seconds of the keeper's monotonic clock.
    """

    def __init__(self, limit: float, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._holdings: dict[str, _Holding] = {}
        self._waiting: dict[str, float] = {}  # since when; whoever came first is the first
        self._taken = 0.0
        self._changes: list[tuple[float, str, int]] = []
        self._ghosts: dict[str, tuple[float, float]] = {}
        self._endings: list[tuple[float, str]] = []
        self._haunted = 0.0
        self._phantom = 0.0
        self._phantom_until = -math.inf
        self._level = math.inf
        self._extra = 0.0
        self._fair_at = -math.inf
        self._fair = False

    def __contains__(self, worker: str) -> bool:
        return worker in self._holdings

    @property
    def contended(self) -> bool:
        """Whether anybody waits for more."""
        return bool(self._waiting)

    # The books

    def haunt(self, until: float) -> None:
        """Take the whole limit as spent until `until`, less what workers turn out to hold: an earlier keeper gave it
        away, and nobody knows to whom.
        """
        self._phantom, self._phantom_until = self.limit, until

    def free(self, now: float) -> float:
        """What nobody holds."""
        self._settle(now)
        return self.limit - self._taken - self._phantom - self._haunted

    def report(self, worker: str, part: Part, now: float, *, limit: float, window_s: float) -> None:
        """Take in what a worker keeps to, what it has spent and what it wants, and which limit it was told of: where
        they were told different ones, the lowest rate counts.
        """
        holding = self._holdings.get(worker)
        if holding is None:
            holding = self._holdings[worker] = _Holding()
            if worker in self._ghosts:
                self._banish(worker)  # it is back, and knows better
            else:
                held = max(part.share, math.fsum(amount for _, amount in part.spent))
                self._phantom = max(0.0, self._phantom - held)
        if holding.told != (limit, window_s):
            holding.told = (limit, window_s)
            self._lowest()
        holding.share = part.share
        holding.spent = sorted(((now + left_s, amount) for left_s, amount in part.spent), reverse=True)
        holding.unit = max(part.unit, ROUNDING)
        holding.more = part.more
        if part.more > self._room(holding, now) + ROUNDING:
            self._waiting.setdefault(worker, now)
        else:
            self._waiting.pop(worker, None)
        self._charge(worker, holding, now)
        self._fair = False

    def drop(self, worker: str, now: float, *, silent: bool) -> None:
        """Forget a worker that left, or that fell silent and has stopped by now: then whatever it might have spent
        counts as spent just now, unless it comes back.
        """
        holding = self._holdings.pop(worker, None)
        if holding is None:
            return
        self._waiting.pop(worker, None)
        self._taken -= holding.charge
        self._fair = False
        if silent:
            self._haunt_by(worker, now + self.window_s, holding.charge)
        else:
            for end, amount in holding.spent:
                self._haunt_by(f"{worker} {end}", min(end, now + self.window_s), amount)

    # Who gets what

    def target(self, worker: str, now: float) -> float:
        """The fair share of a worker, in whole units."""
        self._share_out(now)
        holding = self._holdings[worker]
        fair = min(holding.spent_at(now) + holding.more, self._level) + self._extra
        return math.floor(fair / holding.unit + ROUNDING) * holding.unit

    def grant(self, worker: str, now: float, *, recall: bool = False) -> Grant:
        """What to tell a worker."""
        return Grant(self._holdings[worker].share, self.target(worker, now), recall)

    def welcome(self, worker: str, now: float) -> None:
        """Raise the share of a worker that just reported to what is fair, as far as it is free, whether it wants it now
        or not. Where others wait, it waits with them.
        """
        if self._waiting and list(self._waiting) != [worker]:
            return
        holding = self._holdings[worker]
        amount = min(self.target(worker, now) - self._base(holding, now), self.free(now))
        amount = math.floor(amount / holding.unit + ROUNDING) * holding.unit
        if amount >= max(holding.unit, WORTH_A_WORD * holding.share) - ROUNDING:
            self._raise(worker, holding, amount, now)

    def raise_shares(self, now: float, listening: Container[str]) -> Iterator[str]:
        """Give what is free to those who wait for it and listen; yields whose share was raised."""
        free = self.free(now) if self._waiting else 0.0
        if free < ROUNDING:
            return
        for worker in [worker for worker in self._waiting if worker in listening]:
            holding = self._holdings[worker]
            least = min(holding.unit, self.limit) - self._room(holding, now)
            fair = self.target(worker, now) - self._base(holding, now)
            if least <= ROUNDING and min(fair, free) < max(holding.unit, WORTH_A_WORD * holding.share) - ROUNDING:
                continue
            if least > free + ROUNDING:
                return  # nobody overtakes it, or large requests would wait for ever
            amount = max(least, math.floor(min(fair, free) / holding.unit + ROUNDING) * holding.unit)
            self._raise(worker, holding, amount, now)
            free -= amount
            yield worker
            if free < ROUNDING:
                return

    def recalls(self, now: float, listening: Container[str]) -> list[str]:
        """Those who listen and hold more than is fair while others wait for it."""
        short, turn = self._missed(now)
        if not (short or turn):
            return []
        found = []
        for worker, holding in self._holdings.items():
            if worker in listening and now - holding.granted_at >= TURN_S:
                least = holding.unit if turn else max(holding.unit, WORTH_A_WORD * holding.share)
                if holding.share >= least - ROUNDING and holding.share - self.target(worker, now) >= least - ROUNDING:
                    found.append(worker)
        return found

    def next_change(self, now: float) -> float:
        """When more becomes free by itself; infinity: not by itself."""
        self._settle(now)
        times = [self._phantom_until] if self._phantom else []
        times += [heap[0][0] for heap in (self._changes, self._endings) if heap]
        return min(times, default=math.inf)

    def _missed(self, now: float) -> tuple[bool, bool]:
        """Whether somebody has clearly less than is fair, and whether it is somebody else's turn."""
        turn = False
        for worker, since in self._waiting.items():
            holding = self._holdings[worker]
            target = self.target(worker, now)
            if target - self._base(holding, now) >= max(holding.unit, WORTH_A_WORD * target) - ROUNDING:
                return True, turn
            turn = turn or (now - since >= TURN_S and self._room(holding, now) < holding.unit - ROUNDING)
        return False, turn

    def _raise(self, worker: str, holding: _Holding, amount: float, now: float) -> None:
        holding.share = self._base(holding, now) + amount
        holding.granted_at = now
        self._waiting.pop(worker, None)
        self._charge(worker, holding, now)

    def _base(self, holding: _Holding, now: float) -> float:
        return max(holding.share, holding.spent_at(now))

    def _room(self, holding: _Holding, now: float) -> float:
        """What is left of its share, as far as was told."""
        return max(0.0, holding.share - holding.spent_at(now))

    def _share_out(self, now: float) -> None:
        """Find the level up to which everybody gets what he wants."""
        age_s = now - self._fair_at
        if age_s < FAIR_FOR_S and (self._fair or len(self._holdings) > FEW):
            return
        if self._fair and age_s < TURN_S:
            return
        self._fair, self._fair_at = True, now
        self._taken = math.fsum(holding.charge for holding in self._holdings.values())
        wanted = sorted(holding.spent_at(now) + holding.more for holding in self._holdings.values())
        left, count = self.limit, len(wanted)
        self._level, self._extra = math.inf, 0.0
        for position, amount in enumerate(wanted):
            equal = left / (count - position)
            if amount >= equal:
                self._level = equal
                return
            left -= amount
        self._extra = left / max(1, count)

    def _lowest(self) -> None:
        told = [holding.told for holding in self._holdings.values()]
        lowest = min(told, key=lambda told: (told[0] / max(told[1], 1.0), told[0]))
        self.limit, self.window_s = lowest[0], max(window_s for _, window_s in told)
        self._fair = False

    # What passes with time

    def _charge(self, worker: str, holding: _Holding, now: float) -> None:
        self._taken -= holding.charge
        spent = holding.spent_at(now)
        holding.charge = max(holding.share, spent)
        holding.version += 1
        self._taken += holding.charge
        if spent > holding.share + ROUNDING and holding.spent[-1][0] < math.inf:
            heapq.heappush(self._changes, (holding.spent[-1][0], worker, holding.version))

    def _haunt_by(self, name: str, until: float, amount: float) -> None:
        self._ghosts[name] = (until, amount)
        self._haunted += amount
        heapq.heappush(self._endings, (until, name))

    def _banish(self, name: str) -> None:
        _, amount = self._ghosts.pop(name, (0.0, 0.0))
        self._haunted = self._haunted - amount if self._ghosts else 0.0

    def _settle(self, now: float) -> None:
        """Let go of what has left the window."""
        while self._changes and self._changes[0][0] <= now:
            _, worker, version = heapq.heappop(self._changes)
            holding = self._holdings.get(worker)
            if holding is not None and holding.version == version:
                self._charge(worker, holding, now)
        while self._endings and self._endings[0][0] <= now:
            until, name = heapq.heappop(self._endings)
            if self._ghosts.get(name, (math.inf, 0.0))[0] <= until:
                self._banish(name)
        if self._phantom and self._phantom_until <= now:
            self._phantom = 0.0
