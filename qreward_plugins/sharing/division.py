"""Divides one limit between the workers by max-min fairness. The sum of what they hold never exceeds the limit.

A worker's spending in the window is at most the larger of two numbers: its share, and what it spent before the share
was lowered and is still in the window. Each worker is charged with the larger one, and the sum of the charges is kept
within the limit. That keeps the limit (promise P3), because a share is raised here before the worker learns of it, and
lowered here after the worker has lowered it. What a worker that is gone has spent, or may have spent, stays charged
until it has left the window.

Each worker gets what it wants, or an equal part if the limit is too small for all. What is left over is divided evenly,
so that a worker can begin to send before it asks.

If the limit is smaller than one unit per worker, the workers take turns of `TURN_S`; the longest waiting is next. All
limits of a source have one common line of waiting workers. Otherwise one worker could hold the requests and another the
tokens, and neither could send. A recall for one worker leaves the workers ahead of it one unit of their shares.

Each change of a share costs a report, so a change below `MIN_CHANGE` of a share is not recalled by itself. No part of
the limit lies unused while a worker waits: an idle worker gives up its whole share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterable
from typing import NamedTuple

from .messages import Grant, Part

ROUNDING = 1e-6
TURN_S = 1.0
"""Seconds for which a granted share is not recalled."""
MIN_CHANGE = 0.05
"""Smallest change that is sent to a worker by itself, as a fraction of its share."""
RECOMPUTE_EVERY_S = 0.1
"""Least time in seconds between two computations of the fair shares of more than `FEW_WORKERS` workers."""
FEW_WORKERS = 32
_UNKNOWN = ""
"""Name under which the shares of an earlier keeper are charged. Its workers are not known by name."""


class WorkerState:
    """A worker's share, demand and spending, as of its last report."""

    __slots__ = ("_spent", "charge", "declared", "entries", "granted_at", "held", "more", "share", "unit", "version")

    def __init__(self) -> None:
        self.declared = (math.inf, 0.0)
        self.share = 0.0
        self.held = 0.0
        """The part of `spent` that may be given back."""
        self.more = 0.0
        self.unit = 1.0
        self.granted_at = -math.inf
        self.charge = 0.0
        self.version = 0
        self.entries: list[tuple[float, float]] = []
        """The amounts spent, the latest first: (when the amount leaves the window, amount)."""
        self._spent = 0.0

    def record(self, part: Part, now: float) -> None:
        """Record the worker's report."""
        self.share, self.more, self.unit = part.share, part.more, max(part.unit, ROUNDING)
        self.held = math.fsum(amount for left_s, amount in part.spent if left_s == math.inf)
        self.spend([(now + left_s, amount) for left_s, amount in part.spent])

    def spend(self, entries: Iterable[tuple[float, float]]) -> None:
        """Replace the amounts spent."""
        self.entries = sorted(entries, reverse=True)
        self._spent = math.fsum(amount for _, amount in self.entries)

    def spent(self, now: float) -> float:
        """Return the amount spent that is still in the window."""
        entries = self.entries
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
        return self.entries[-1][0] if self.entries else math.inf


class WaitingLine(NamedTuple):
    """The waiting line of one source: workers that cannot send because a share is too small."""

    order: dict[str, None]
    """The waiting workers, longest wait first."""
    listening: Container[str]
    """Workers whose report the keeper holds, so that it can answer now."""
    expected: Container[str]
    """Workers that were answered and are expected to report again at once."""


class Division:
    """Decides the shares of one limit: `limit` in any window of `window_s` seconds, or at any time if `window_s` is 0.

    Times are seconds of the keeper's monotonic clock.
    """

    def __init__(self, limit: float, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._states: dict[str, WorkerState] = {}
        self._gone: dict[str, WorkerState] = {}
        """The workers without a share whose spending still counts: they left, or are silent."""
        self._taken = 0.0
        self._changes: list[tuple[float, str, int]] = []
        self._waiting: dict[str, None] = {}
        self._level = math.inf
        self._extra = 0.0
        self._left = math.inf
        self._fair_at = -math.inf
        self._fair = False

    def __contains__(self, worker: str) -> bool:
        return worker in self._states

    def share(self, worker: str) -> float:
        """Return the share of a worker."""
        return self._states[worker].share

    def hold(self, until: float) -> None:
        """Count the whole limit as spent until `until`, less what workers report to hold.

        An earlier keeper gave the limit to workers that this keeper does not know.
        """
        self._count_gone(_UNKNOWN, WorkerState(), [(until, self.limit)], -math.inf)

    def free(self, now: float) -> float:
        """Return the part of the limit that no worker holds; negative if the limit was lowered."""
        changes = self._changes
        while changes and changes[0][0] <= now:
            _, worker, version = heapq.heappop(changes)
            state = self._states.get(worker) or self._gone.get(worker)
            if state is not None and state.version == version:
                self._charge(worker, state, now)
        return self.limit - self._taken

    def left(self, now: float) -> float:
        """Return the unspent part of the limit. What an earlier keeper may have given out does not count as spent."""
        gone = [state.spent(now) for worker, state in self._gone.items() if worker != _UNKNOWN]
        return self.unspent(now) - math.fsum(gone)

    def unspent(self, now: float) -> float:
        """Return the limit less what workers report as spent, without those that are gone."""
        return self.limit - math.fsum([state.spent(now) - state.held for state in self._states.values()])

    def spent_since(self, moment: float) -> float:
        """Return what was spent after `moment`; a silent worker may have spent all that it is charged with."""
        gone = [entry for state in self._gone.values() for entry in state.entries]
        return math.fsum(amount for until, amount in [*self.entries(), *gone] if until - self.window_s > moment)

    def entries(self) -> list[tuple[float, float]]:
        """Return what workers report as spent in the window: (when it leaves the window, amount)."""
        return [entry for state in self._states.values() for entry in state.entries]

    def next_change(self, now: float) -> float:
        """Return when more becomes free as time passes; infinity if only a report can free more."""
        self.free(now)
        return self._changes[0][0] if self._changes else math.inf

    def report(self, worker: str, part: Part, now: float, *, limit: float, window_s: float) -> None:
        """Record a worker's share, spending and demand, and the limit that is declared in its configuration.

        If workers declare different limits, the one with the lowest rate counts.
        """
        state = self._states.get(worker)
        if state is None:
            state = self._states[worker] = WorkerState()
            gone = self._gone.pop(worker, None)
            if gone is not None:
                self._taken -= gone.charge  # its own report replaces the estimate
            elif (unknown := self._gone.get(_UNKNOWN)) is not None:
                its = max(part.share, math.fsum(amount for _, amount in part.spent))
                self._count_gone(_UNKNOWN, unknown, [(end, amount - its) for end, amount in unknown.entries], now)
        if state.declared != (limit, window_s):
            state.declared = (limit, window_s)
            self._find_lowest()
        state.record(part, now)
        self._charge(worker, state, now)
        if part.more > state.room(now) + ROUNDING and self.limit < math.inf:
            self._waiting[worker] = None
        else:
            self._waiting.pop(worker, None)
        self._fair = False

    def drop(self, worker: str, now: float, *, silent: bool) -> None:
        """Remove a worker that left (`silent` false), or that is silent and whose shares have expired.

        Everything that a silent worker may have spent counts as spent now, until the worker reports again.
        """
        self._waiting.pop(worker, None)
        self._fair = False
        state = self._states.pop(worker, None)
        if state is None:
            return
        ends = now + self.window_s
        left = [(end if end < math.inf else ends, amount) for end, amount in state.entries]
        # One that left may come back with another ledger, so its own report does not replace what it had spent.
        name = worker if silent else f"{worker} until {now}"
        self._count_gone(name, state, [(ends, state.charge)] if silent else left, now)
        if self._states and state.declared == (self.limit, self.window_s):
            self._find_lowest()

    def change(self, limit: float, window_s: float, workers: Iterable[str]) -> bool:
        """Change the limit of workers that do not declare one; return whether it was another one."""
        changed = False
        for state in [self._states[worker] for worker in workers if worker in self._states]:
            changed = changed or state.declared != (limit, window_s)
            state.declared = limit, window_s
        if changed:
            self._find_lowest()
            self._fair = False
            if self.limit == math.inf:
                self._waiting.clear()
        return changed

    def unit(self, worker: str) -> float:
        """Return what the next request of a worker takes; 1 if it is not known."""
        return self._states[worker].unit if worker in self._states else 1.0

    def waiting(self) -> Iterable[str]:
        """Return the workers that wait for more."""
        return self._waiting

    def contended(self, now: float) -> bool:
        """Return whether a worker waits for more, or the shares exceed a limit that was lowered."""
        return bool(self._waiting) or self.free(now) < -ROUNDING

    def lacks(self, worker: str, now: float) -> bool:
        """Return whether a worker waits for more and its unspent share is too small for its next request."""
        return worker in self._waiting and self._least(self._states[worker], now) > ROUNDING

    def target(self, worker: str, now: float) -> float:
        """Return the fair share of a worker, in whole units."""
        self._share_out(now)
        state = self._states[worker]
        fair = min(state.spent(now) + state.more, self._level) + self._extra
        return state.in_units(fair)

    def grant(self, worker: str, now: float) -> Grant:
        """Return the answer to a worker, without a recall."""
        scarce = len(self._waiting) > (worker in self._waiting)
        target = self.target(worker, now)
        return Grant(self._states[worker].share, target, scarce=scarce, left=self._left)

    def raise_to_fair(self, worker: str, now: float) -> None:
        """Raise the share of a worker that just reported to its fair share, as far as the limit is free, even if the
        worker does not need it now. Does nothing while other workers wait.
        """
        if self.limit == math.inf or len(self._waiting) > (worker in self._waiting):
            return
        state = self._states[worker]
        base = state.base(now)
        amount = state.in_units(min(self.target(worker, now) - base, self.free(now)))
        if amount >= max(state.unit, MIN_CHANGE * state.share) - ROUNDING:
            self._raise(worker, base + amount, now)

    def raise_shares(self, now: float, line: WaitingLine) -> list[str]:
        """Divide what is free between the waiting workers that can be answered; return those whose share was raised."""
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
                # No worker overtakes one that is expected back at once.
                free -= least if least > 0 and worker in line.expected else 0.0
            else:
                wanted = min(self.target(worker, now) - base, free)
                if least <= ROUNDING and wanted < state.unit - ROUNDING:
                    continue
                if least > free + ROUNDING:
                    return raised  # no worker overtakes a large request either, or it would wait for ever
                amount = max(least, state.in_units(wanted))
                self._raise(worker, base + amount, now)
                raised.append(worker)
                free -= amount
            if free < ROUNDING:
                return raised
        for worker in [one for one in waiting if one in line.listening and one not in raised][:1]:
            # What is left above the fair shares.
            state = self._states[worker]
            if (amount := state.in_units(min(free, state.more - state.room(now)))) > 0:
                self._raise(worker, state.base(now) + amount, now)
                raised.append(worker)
        return raised

    def begin_turn(self, worker: str, now: float) -> None:
        """Recall nothing from a worker for `TURN_S`."""
        if worker in self._states:
            self._states[worker].granted_at = now

    def recalls(self, now: float, line: WaitingLine) -> dict[str, Grant]:
        """Return the recalls to send to workers that can be answered and hold what other workers wait for.

        Recalled are the shares of idle workers and what exceeds a fair share. If the first worker in line needs more
        than that, fair shares of workers behind it are recalled, too.
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
        recalled: dict[str, Grant] = {}
        for worker, state in sorted(self._states.items(), key=lambda item: item[1].granted_at):
            if now - state.granted_at < TURN_S and state.more > 0:
                continue
            if worker not in line.listening or worker == first or state.share <= ROUNDING:
                continue
            target = self.target(worker, now)
            if state.more <= 0:
                if useful > ROUNDING and state.room(now) >= min(state.unit, state.share) - ROUNDING:
                    recalled[worker] = Grant(state.share, target, recall=True)
                    wanted -= state.room(now)
                    useful -= state.room(now)
                continue
            if worker in ahead:
                target = max(target, min(state.share, state.unit))
            surplus = state.share - target
            least = min(state.unit, state.share)
            if (wanted > ROUNDING and surplus >= least - ROUNDING) or (
                missed and surplus >= max(least, MIN_CHANGE * state.share) - ROUNDING
            ):
                recalled[worker] = Grant(state.share, target, recall=True)
                wanted -= surplus
        if first:
            missing = self._least(self._states[first], now) - self.free(now)
            missing -= math.fsum([grant.share - grant.target for grant in recalled.values()])
            self._recall_all(first, ahead, missing, recalled, line, now)
        return recalled

    def _recall_all(
        self, first: str, ahead: set[str], missing: float, recalled: dict[str, Grant], line: WaitingLine, now: float
    ) -> None:
        """Recall fair shares, too, until they cover what the first worker in line is missing."""
        for worker, state in self._states.items():
            if missing <= ROUNDING:
                return
            fair = recalled[worker].target if worker in recalled else state.share
            if worker == first or worker in ahead or worker not in line.listening or fair <= ROUNDING:
                continue
            if now - state.granted_at >= TURN_S:
                recalled[worker] = Grant(state.share, 0.0, recall=True)
                missing -= fair

    def _useful(self, now: float) -> float:
        """Return what waiting workers could use in addition to what is free."""
        holdings = [self._states[worker] for worker in self._waiting]
        return math.fsum([state.more - state.room(now) for state in holdings]) - self.free(now)

    def _missed(self, now: float) -> bool:
        """Return whether a waiting worker is below its fair share by `MIN_CHANGE` or more."""
        for worker in self._waiting:
            state, target = self._states[worker], self.target(worker, now)
            if target - state.base(now) >= max(state.unit, MIN_CHANGE * target) - ROUNDING:
                return True
        return False

    def _least(self, state: WorkerState, now: float) -> float:
        """Return what the worker's next request needs in addition to its unspent share."""
        return min(state.unit, self.limit) - state.room(now)

    def _share_out(self, now: float) -> None:
        """Compute the level up to which each worker gets what it wants, and the equal part of the rest (`_extra`)."""
        age_s = now - self._fair_at
        if age_s < RECOMPUTE_EVERY_S and (self._fair or len(self._states) > FEW_WORKERS):
            return
        if self._fair and age_s < TURN_S:
            return
        self._fair, self._fair_at = True, now
        self._recompute_sum()
        self._left = self.left(now)
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

    def _raise(self, worker: str, share: float, now: float) -> None:
        """Set a share to `share`. The caller raises it by no more than what is free."""
        state = self._states[worker]
        state.share = share
        state.granted_at = now
        self._charge(worker, state, now)
        self._waiting.pop(worker, None)

    def _recompute_sum(self) -> None:
        """Recompute the sum of all charges, because rounding errors accumulate in the running sum."""
        self._taken = math.fsum(state.charge for one in (self._states, self._gone) for state in one.values())

    def _count_gone(self, worker: str, state: WorkerState, entries: Iterable[tuple[float, float]], now: float) -> None:
        """Charge a worker that is gone with what it has spent, until that has left the window."""
        state.share = 0.0
        state.spend(entries)
        self._gone[worker] = state
        self._charge(worker, state, now)

    def _charge(self, worker: str, state: WorkerState, now: float) -> None:
        self._taken -= state.charge
        spent = state.spent(now)
        state.charge = max(state.share, spent)
        state.version += 1
        self._taken += state.charge
        if spent > state.share + ROUNDING:
            if state.next_change() < math.inf:
                heapq.heappush(self._changes, (state.next_change(), worker, state.version))
        elif self._gone.pop(worker, None) is not None:
            self._recompute_sum()

    def _find_lowest(self) -> None:
        declared = {state.declared for state in self._states.values()}
        self.limit = min(declared, key=lambda one: (one[0] / max(one[1], 1.0), one[0]))[0]
        self.window_s = max(window_s for _, window_s in declared)
