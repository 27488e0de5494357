"""Who gets how much of one limit, so that all of it is used: as much as everybody wants, or equal parts where that is
too much (max-min fairness), and what is left over evenly, so that a worker which begins to work has something in hand.

What is scarcer than one for each goes round: whoever waited longest is next, and keeps it for a turn. A request may
need some of several limits; so the line in which workers wait is one for all limits of a source, and who stands in it
is asked for nothing by those behind him. Otherwise one would hold the requests and another the tokens, and neither
could send.

Whoever hears something has to report again, so what is too little is not worth a word; but nothing may lie idle with
one while another waits either. So who wants nothing gives up all that others wait for, what fair shares leave over goes
with what is told anyway, and what is left then is told twice a second.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import NamedTuple

from .books import Books
from .messages import Grant, Part
from .worker_state import ROUNDING, WorkerState

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


class Pool(Books):
    """The shares of one limit, and who gets them.

    Times are seconds of the keeper's monotonic clock.
    """

    def __init__(self, limit: float, window_s: float) -> None:
        super().__init__(limit, window_s)
        self._waiting: dict[str, None] = {}
        self._level = math.inf
        self._extra = 0.0
        self._fair_at = -math.inf
        self._fair = False
        self._little_at = -math.inf

    def report(self, worker: str, part: Part, now: float, *, limit: float, window_s: float) -> None:
        super().report(worker, part, now, limit=limit, window_s=window_s)
        if part.more > self._states[worker].room(now) + ROUNDING:
            self._waiting[worker] = None
        else:
            self._waiting.pop(worker, None)
        self._fair = False

    def drop(self, worker: str, now: float, *, silent: bool) -> None:
        super().drop(worker, now, silent=silent)
        self._waiting.pop(worker, None)
        self._fair = False

    def contended(self, now: float) -> bool:
        """Whether anybody waits for more, or the limit is less than what was given away."""
        return bool(self._waiting) or self.free(now) < -ROUNDING

    def lacks(self, worker: str, now: float) -> bool:
        """Whether a worker could use more, and has not even enough for the next thing that it wants to do."""
        return worker in self._waiting and self._least(self._states[worker], now) > ROUNDING

    def target(self, worker: str, now: float) -> float:
        """The fair share of a worker, in whole units."""
        self._share_out(now)
        state = self._states[worker]
        fair = min(state.spent(now) + state.more, self._level) + self._extra
        return state.in_units(fair)

    def grant(self, worker: str, now: float) -> Grant:
        """What to tell a worker."""
        scarce = len(self._waiting) > (worker in self._waiting)
        return Grant(self._states[worker].share, self.target(worker, now), scarce=scarce)

    def welcome(self, worker: str, now: float) -> None:
        """Raise the share of a worker that just reported to what is fair, as far as it is free, whether it wants it now
        or not. Where others wait, it waits with them.
        """
        if len(self._waiting) > (worker in self._waiting):
            return
        state = self._states[worker]
        base = state.base(now)
        amount = state.in_units(min(self.target(worker, now) - base, self.free(now)))
        if amount >= max(state.unit, WORTH_A_WORD * state.share) - ROUNDING:
            self._raise(worker, base + amount, now)

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
            state = self._states[worker]
            least, base = self._least(state, now), state.base(now)
            if worker not in line.listening:
                # Nobody overtakes whoever is back in a moment.
                free -= least if least > 0 and worker in line.expected else 0.0
            else:
                wanted = min(self.target(worker, now) - base, free)
                if least <= ROUNDING and wanted < self._worth_a_word(state, now) - ROUNDING:
                    continue
                if least > free + ROUNDING:
                    return raised  # nor whoever needs much, or large requests would wait for ever
                amount = max(least, state.in_units(wanted))
                self._raise(worker, base + amount, now)
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
            state = self._states[worker]
            rest = state.in_units(min(free, state.more - state.room(now)))
            if rest > 0:
                self._raise(worker, state.base(now) + rest, now)
                free -= rest

    def _give_little(self, free: float, line: Line, now: float) -> list[str]:
        """Give what is too little to be told of to the one that is shortest of what is fair, lest it lies idle."""
        listening = [worker for worker in self._waiting if worker in line.listening]
        if not listening:
            return []
        worker = max(listening, key=lambda one: self.target(one, now) - self._states[one].base(now))
        state = self._states[worker]
        amount = state.in_units(min(free, state.more - state.room(now)))
        if amount <= 0:
            return []
        self._little_at = now
        self._raise(worker, state.base(now) + amount, now)
        return [worker]

    def _owed(self, now: float) -> float:
        """What those who want more are short of their fair shares."""
        return math.fsum(
            [
                max(0.0, self.target(worker, now) - state.base(now))
                for worker, state in self._states.items()
                if state.more > 0
            ]
        )

    def begin_turn(self, worker: str, now: float) -> None:
        """Ask a worker for nothing for a turn."""
        if worker in self._states:
            self._states[worker].granted_at = now

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
                wanted += self._least(self._states[worker], now)
            elif not first:
                ahead.add(worker)
        missed = self._missed(now) or self.free(now) < -ROUNDING
        useful = self._useful(now)
        told: dict[str, Grant] = {}
        for worker, state in sorted(self._states.items(), key=lambda item: item[1].granted_at):
            if now - state.granted_at < TURN_S and state.more > 0:
                continue
            if worker not in line.listening or worker == first or state.share <= ROUNDING:
                continue
            target = self.target(worker, now)
            if state.more <= 0:
                if useful > ROUNDING and state.room(now) >= min(state.unit, state.share) - ROUNDING:
                    told[worker] = Grant(state.share, target, recall=True)
                    wanted -= state.room(now)
                    useful -= state.room(now)
                continue
            if worker in ahead:
                target = max(target, min(state.share, state.unit))
            surplus = state.share - target
            least = min(state.unit, state.share)
            if (wanted > ROUNDING and surplus >= least - ROUNDING) or (
                missed and surplus >= max(least, WORTH_A_WORD * state.share) - ROUNDING
            ):
                told[worker] = Grant(state.share, target, recall=True)
                wanted -= surplus
        if first:
            missing = self._least(self._states[first], now) - self.free(now)
            missing -= math.fsum([grant.share - grant.target for grant in told.values()])
            self._recall_all(first, ahead, missing, told, line, now)
        return told

    def _recall_all(
        self, first: str, ahead: set[str], missing: float, told: dict[str, Grant], line: Line, now: float
    ) -> None:
        """Ask for what is fair as well, until what is missing for the first in line is there."""
        for worker, state in self._states.items():
            if missing <= ROUNDING:
                return
            fair = told[worker].target if worker in told else state.share
            if worker == first or worker in ahead or worker not in line.listening or fair <= ROUNDING:
                continue
            if now - state.granted_at >= TURN_S:
                told[worker] = Grant(state.share, 0.0, recall=True)
                missing -= fair

    def _useful(self, now: float) -> float:
        """What those who wait could use beyond what is free."""
        holdings = [self._states[worker] for worker in self._waiting]
        return math.fsum([state.more - state.room(now) for state in holdings]) - self.free(now)

    def _missed(self, now: float) -> bool:
        """Whether somebody has clearly less than is fair."""
        for worker in self._waiting:
            state, target = self._states[worker], self.target(worker, now)
            if target - state.base(now) >= max(state.unit, WORTH_A_WORD * target) - ROUNDING:
                return True
        return False

    def _least(self, state: WorkerState, now: float) -> float:
        """What is missing for the next thing that it wants to do."""
        return min(state.unit, self.limit) - state.room(now)

    def _worth_a_word(self, state: WorkerState, now: float) -> float:
        """The least that a worker is told of which has something in hand: a part of its share, or all that it wants."""
        return max(state.unit, min(WORTH_A_WORD * state.share, state.more - state.room(now)))

    def _raise(self, worker: str, share: float, now: float) -> None:
        super()._raise(worker, share, now)
        self._waiting.pop(worker, None)

    def _share_out(self, now: float) -> None:
        """Find the level up to which everybody gets what he wants."""
        age_s = now - self._fair_at
        if age_s < FAIR_FOR_S and (self._fair or len(self._states) > FEW):
            return
        if self._fair and age_s < TURN_S:
            return
        self._fair, self._fair_at = True, now
        self._count_anew()
        wanted = sorted([state.spent(now) + state.more for state in self._states.values()])
        left, count = self.limit, len(wanted)
        self._level, self._extra = math.inf, 0.0
        for position, amount in enumerate(wanted):
            equal = left / (count - position)
            if amount >= equal:
                self._level = equal
                return
            left -= amount
        self._extra = left / max(1, count)
