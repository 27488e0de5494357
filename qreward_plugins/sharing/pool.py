"""One limit as the keeper sees it: who may use how much of it, so that all of it is used and never more.

What a worker has in the window is at most its share, or what it had spent before the share was lowered, as far as that
is in the window still. So the books hold one number for every worker, the larger of the two, and the sum of them never
exceeds the limit; that is the whole proof. Shares are raised in the books before a worker hears of it, and lowered
after it has done so by itself.

Who gets what: as much as everybody wants, or equal parts where that is too much (max-min fairness), and what is left
over evenly, so that a worker which begins to work has something in hand. What is scarcer than one for each goes round:
whoever waited longest is next, and keeps it for a turn. A request may need some of several limits; so the line in which
workers wait is one for all limits of a source, and who stands in it is asked for nothing by those behind him. Otherwise
one would hold the requests and another the tokens, and neither could send.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container
from typing import NamedTuple

from .ghosts import Ghosts
from .holding import ROUNDING, Holding
from .messages import Grant, Part

TURN_S = 1.0
"""Seconds for which what was granted is not asked back."""
WORTH_A_WORD = 0.05
"""Part of its share that is worth asking a worker for, or telling it of."""
LITTLE_EVERY_S = 0.5
"""Seconds between two times that a worker with something in hand is told of less than that."""
FAIR_FOR_S = 0.1
"""Seconds for which the fair shares of many workers are not found anew."""
FEW = 32


class Line(NamedTuple):
    """The workers of a source that wait for want of some limit."""

    order: dict[str, None]
    """Whoever waited longest is the first."""
    listening: Container[str]
    """Workers that can be told something now."""
    expected: Container[str]
    """Workers that can in a moment."""


class Pool:
    """The shares of one limit: at most `limit` in any window of `window_s` seconds; 0: at any time.

    Times are seconds of the keeper's monotonic clock.
    """

    def __init__(self, limit: float, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._ghosts = Ghosts()
        self._holdings: dict[str, Holding] = {}
        self._waiting: dict[str, None] = {}
        self._taken = 0.0
        self._changes: list[tuple[float, str, int]] = []
        self._level = math.inf
        self._extra = 0.0
        self._fair_at = -math.inf
        self._fair = False
        self._little_at = -math.inf

    def __contains__(self, worker: str) -> bool:
        return worker in self._holdings

    # The books

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
        if part.more > holding.room(now) + ROUNDING:
            self._waiting[worker] = None
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
        if silent:
            self._ghosts.haunt(worker, now + self.window_s, holding.charge)
        else:
            for number, (end, amount) in enumerate(holding.remains()):
                self._ghosts.haunt(f"{worker} {number}", end if end < math.inf else now + self.window_s, amount)
        if self._holdings and holding.told == (self.limit, self.window_s):
            self._find_lowest()
        self._fair = False

    # Who gets what

    def contended(self, now: float) -> bool:
        """Whether anybody waits for more, or the limit is less than what was given away."""
        return bool(self._waiting) or self.free(now) < -ROUNDING

    def lacks(self, worker: str, now: float) -> bool:
        """Whether a worker could use more, and has not even enough for the next thing that it wants to do."""
        return worker in self._waiting and self._least(self._holdings[worker], now) > ROUNDING

    def share(self, worker: str) -> float:
        """The share of a worker."""
        return self._holdings[worker].share

    def target(self, worker: str, now: float) -> float:
        """The fair share of a worker, in whole units."""
        self._share_out(now)
        holding = self._holdings[worker]
        fair = min(holding.spent(now) + holding.more, self._level) + self._extra
        return math.floor(fair / holding.unit + ROUNDING) * holding.unit

    def grant(self, worker: str, now: float) -> Grant:
        """What to tell a worker."""
        scarce = len(self._waiting) > (worker in self._waiting)
        return Grant(self._holdings[worker].share, self.target(worker, now), scarce=scarce)

    def welcome(self, worker: str, now: float) -> None:
        """Raise the share of a worker that just reported to what is fair, as far as it is free, whether it wants it now
        or not. Where others wait, it waits with them.
        """
        if len(self._waiting) > (worker in self._waiting):
            return
        holding = self._holdings[worker]
        base = holding.base(now)
        amount = min(self.target(worker, now) - base, self.free(now))
        amount = math.floor(amount / holding.unit + ROUNDING) * holding.unit
        if amount >= max(holding.unit, WORTH_A_WORD * holding.share) - ROUNDING:
            self._raise(worker, holding, base + amount, now)

    def raise_shares(self, now: float, line: Line) -> list[str]:
        """Give what is free to those who wait for it and listen; returns whose share was raised."""
        raised: list[str] = []
        if not self._waiting:
            return raised
        free = self.free(now)
        if free < ROUNDING:
            return raised
        waiting = self._waiting
        for worker in [*(one for one in line.order if one in waiting), *waiting]:
            if worker not in waiting:
                continue
            holding = self._holdings[worker]
            least, base = self._least(holding, now), holding.base(now)
            if worker not in line.listening:
                # Nobody overtakes whoever is back in a moment.
                free -= least if least > 0 and worker in line.expected else 0.0
            else:
                wanted = min(self.target(worker, now) - base, free)
                if least <= ROUNDING and wanted < self._worth_a_word(holding, now) - ROUNDING:
                    continue
                if least > free + ROUNDING:
                    return raised  # nor whoever needs much, or large requests would wait for ever
                amount = max(least, math.floor(wanted / holding.unit + ROUNDING) * holding.unit)
                self._raise(worker, holding, base + amount, now)
                raised.append(worker)
                free -= amount
            if free < ROUNDING:
                return raised
        if raised:
            self._share_rest(raised, free - self._owed(now), now)
        elif now - self._little_at >= LITTLE_EVERY_S:
            raised = self._give_little(free, line, now)
        return raised

    def _share_rest(self, raised: list[str], free: float, now: float) -> None:
        """Fair shares are whole units: what is left of them goes to the first of those who are told something anyway,
        or it would go unit by unit, and late.
        """
        for worker in raised:
            holding = self._holdings[worker]
            rest = math.floor(min(free, holding.more - holding.room(now)) / holding.unit + ROUNDING) * holding.unit
            if rest > 0:
                self._raise(worker, holding, holding.base(now) + rest, now)
                free -= rest

    def _give_little(self, free: float, line: Line, now: float) -> list[str]:
        """Give what is too little to be told of to the one that is shortest of what is fair, lest it lies idle."""
        listening = [worker for worker in self._waiting if worker in line.listening]
        if not listening:
            return []
        worker = max(listening, key=lambda one: self.target(one, now) - self._holdings[one].base(now))
        holding = self._holdings[worker]
        amount = math.floor(min(free, holding.more - holding.room(now)) / holding.unit + ROUNDING) * holding.unit
        if amount <= 0:
            return []
        self._little_at = now
        self._raise(worker, holding, holding.base(now) + amount, now)
        return [worker]

    def _owed(self, now: float) -> float:
        """What those who want more are short of their fair shares."""
        return math.fsum(
            [
                max(0.0, self.target(worker, now) - holding.base(now))
                for worker, holding in self._holdings.items()
                if holding.more > 0
            ]
        )

    def begin_turn(self, worker: str, now: float) -> None:
        """Ask a worker for nothing for a turn."""
        if worker in self._holdings:
            self._holdings[worker].granted_at = now

    def recalls(self, now: float, line: Line) -> dict[str, Grant]:
        """What to tell those who listen and hold what others wait for: what they have no use for, what is more than
        fair, and where the first in line needs more than that, whatever those behind him hold.
        """
        if not self._waiting and self.free(now) >= -ROUNDING:
            return {}
        first, ahead, wanted = "", set[str](), -self.free(now)
        for worker in line.order:
            if self.lacks(worker, now) and (worker in line.listening or worker in line.expected):
                first = first or worker
                wanted += self._least(self._holdings[worker], now)
            elif not first:
                ahead.add(worker)
        missed = self._missed(now) or self.free(now) < -ROUNDING
        told: dict[str, Grant] = {}
        for worker, holding in sorted(self._holdings.items(), key=lambda item: item[1].granted_at):
            if now - holding.granted_at < TURN_S and holding.more > 0:
                continue
            if worker not in line.listening or worker == first or holding.share <= ROUNDING:
                continue
            target = self.target(worker, now)
            if holding.more <= 0:
                if holding.room(now) >= min(holding.unit, holding.share) - ROUNDING:
                    told[worker] = Grant(holding.share, target, recall=True)
                    wanted -= holding.room(now)
                continue
            if worker in ahead:
                target = max(target, min(holding.share, holding.unit))
            surplus = holding.share - target
            least = min(holding.unit, holding.share)
            if (wanted > ROUNDING and surplus >= least - ROUNDING) or (
                missed and surplus >= max(least, WORTH_A_WORD * holding.share) - ROUNDING
            ):
                told[worker] = Grant(holding.share, target, recall=True)
                wanted -= surplus
        if first:
            missing = self._least(self._holdings[first], now) - self.free(now)
            missing -= math.fsum([grant.share - grant.target for grant in told.values()])
            self._recall_all(first, ahead, missing, told, line, now)
        return told

    def _recall_all(
        self, first: str, ahead: set[str], missing: float, told: dict[str, Grant], line: Line, now: float
    ) -> None:
        """Ask for what is fair as well, until what is missing for the first in line is there."""
        for worker, holding in self._holdings.items():
            if missing <= ROUNDING:
                return
            fair = told[worker].target if worker in told else holding.share
            if worker == first or worker in ahead or worker not in line.listening or fair <= ROUNDING:
                continue
            if now - holding.granted_at >= TURN_S:
                told[worker] = Grant(holding.share, 0.0, recall=True)
                missing -= fair

    def next_change(self, now: float) -> float:
        """When more becomes free by itself; infinity: not by itself."""
        self.free(now)
        return min(self._ghosts.next_end(now), self._changes[0][0] if self._changes else math.inf)

    def _missed(self, now: float) -> bool:
        """Whether somebody has clearly less than is fair."""
        for worker in self._waiting:
            holding, target = self._holdings[worker], self.target(worker, now)
            if target - holding.base(now) >= max(holding.unit, WORTH_A_WORD * target) - ROUNDING:
                return True
        return False

    def _least(self, holding: Holding, now: float) -> float:
        """What is missing for the next thing that it wants to do."""
        return min(holding.unit, self.limit) - holding.room(now)

    def _worth_a_word(self, holding: Holding, now: float) -> float:
        """The least that a worker is told of which has something in hand: a part of its share, or all that it wants."""
        return max(holding.unit, min(WORTH_A_WORD * holding.share, holding.more - holding.room(now)))

    def _raise(self, worker: str, holding: Holding, share: float, now: float) -> None:
        holding.share = share
        holding.granted_at = now
        self._waiting.pop(worker, None)
        self._charge(worker, holding, now)

    def _share_out(self, now: float) -> None:
        """Find the level up to which everybody gets what he wants."""
        age_s = now - self._fair_at
        if age_s < FAIR_FOR_S and (self._fair or len(self._holdings) > FEW):
            return
        if self._fair and age_s < TURN_S:
            return
        self._fair, self._fair_at = True, now
        self._taken = math.fsum([holding.charge for holding in self._holdings.values()])
        wanted = sorted([holding.spent(now) + holding.more for holding in self._holdings.values()])
        left, count = self.limit, len(wanted)
        self._level, self._extra = math.inf, 0.0
        for position, amount in enumerate(wanted):
            equal = left / (count - position)
            if amount >= equal:
                self._level = equal
                return
            left -= amount
        self._extra = left / max(1, count)

    def _find_lowest(self) -> None:
        told = {holding.told for holding in self._holdings.values()}
        self.limit = min(told, key=lambda one: (one[0] / max(one[1], 1.0), one[0]))[0]
        self.window_s = max(window_s for _, window_s in told)
        self._fair = False

    def _charge(self, worker: str, holding: Holding, now: float) -> None:
        self._taken -= holding.charge
        spent = holding.spent(now)
        holding.charge = max(holding.share, spent)
        holding.version += 1
        self._taken += holding.charge
        if spent > holding.share + ROUNDING and holding.next_change() < math.inf:
            heapq.heappush(self._changes, (holding.next_change(), worker, holding.version))
