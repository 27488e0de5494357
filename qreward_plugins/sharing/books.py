"""What everybody holds of one limit: at most all of it, whatever happens to whom.

What a worker has in the window is at most its share, or what it had spent before the share was lowered, as far as that
is in the window still. So the books hold one number for every worker, the larger of the two, and the sum of them never
exceeds the limit; that is the whole proof. Shares are raised in the books before a worker hears of it, and lowered
after it has done so by itself.
"""

from __future__ import annotations

import heapq
import math

from .lost_workers import LostWorkers
from .messages import Part
from .worker_state import ROUNDING, WorkerState


class Books:
    """What everybody holds of one limit: at most `limit` in any window of `window_s` seconds; 0: at any time.

    Times are seconds of the keeper's monotonic clock.
    """

    def __init__(self, limit: float, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._lost = LostWorkers()
        self._states: dict[str, WorkerState] = {}
        self._taken = 0.0
        self._changes: list[tuple[float, str, int]] = []

    def __contains__(self, worker: str) -> bool:
        return worker in self._states

    def share(self, worker: str) -> float:
        """The share of a worker."""
        return self._states[worker].share

    def hold(self, until: float) -> None:
        """Take the whole limit as spent until `until`, less what workers turn out to hold: an earlier keeper gave it
        away, and nobody knows to whom.
        """
        self._lost.hold_all(self.limit, until)

    def free(self, now: float) -> float:
        """What nobody holds. Less than nothing: the limit was lowered."""
        changes = self._changes
        while changes and changes[0][0] <= now:
            _, worker, version = heapq.heappop(changes)
            state = self._states.get(worker)
            if state is not None and state.version == version:
                self._charge(worker, state, now)
        return self.limit - self._taken - self._lost.total(now)

    def next_change(self, now: float) -> float:
        """When more becomes free by itself; infinity: not by itself."""
        self.free(now)
        return min(self._lost.next_end(now), self._changes[0][0] if self._changes else math.inf)

    def report(self, worker: str, part: Part, now: float, *, limit: float, window_s: float) -> None:
        """Take in what a worker keeps to, what it has spent and what it wants, and which limit it was told of: where
        they were told different ones, the lowest rate counts.
        """
        state = self._states.get(worker)
        if state is None:
            state = self._states[worker] = WorkerState()
            if worker in self._lost:
                self._lost.release(worker)  # it is back, and knows better
            else:
                self._lost.claimed(max(part.share, math.fsum(amount for _, amount in part.spent)))
        if state.told != (limit, window_s):
            state.told = (limit, window_s)
            self._find_lowest()
        state.take_in(part, now)
        self._charge(worker, state, now)

    def drop(self, worker: str, now: float, *, silent: bool) -> None:
        """Forget a worker that left, or that fell silent and has stopped by now: then whatever it might have spent
        counts as spent just now, unless it comes back.
        """
        state = self._states.pop(worker, None)
        if state is None:
            return
        self._taken -= state.charge
        if silent:
            self._lost.hold(worker, now + self.window_s, state.charge)
        else:
            for number, (end, amount) in enumerate(state.remains()):
                self._lost.hold(f"{worker} {number}", end if end < math.inf else now + self.window_s, amount)
        if self._states and state.told == (self.limit, self.window_s):
            self._find_lowest()

    def _raise(self, worker: str, share: float, now: float) -> None:
        """Raise a share, by what is free at most."""
        state = self._states[worker]
        state.share = share
        state.granted_at = now
        self._charge(worker, state, now)

    def _count_anew(self) -> None:
        """Add up what everybody holds, so that roundings do not add up."""
        self._taken = math.fsum([state.charge for state in self._states.values()])

    def _charge(self, worker: str, state: WorkerState, now: float) -> None:
        self._taken -= state.charge
        spent = state.spent(now)
        state.charge = max(state.share, spent)
        state.version += 1
        self._taken += state.charge
        if spent > state.share + ROUNDING and state.next_change() < math.inf:
            heapq.heappush(self._changes, (state.next_change(), worker, state.version))

    def _find_lowest(self) -> None:
        told = {state.told for state in self._states.values()}
        self.limit = min(told, key=lambda one: (one[0] / max(one[1], 1.0), one[0]))[0]
        self.window_s = max(window_s for _, window_s in told)
