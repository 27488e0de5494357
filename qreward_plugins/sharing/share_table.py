"""The table of shares of one limit: what each worker holds. The sum never exceeds the limit.

A worker's spending in the window is at most the larger of two numbers: its share, and what it spent before the share
was lowered and is still in the window. The table charges each worker with the larger one and keeps the sum of the
charges within the limit. That keeps the limit (promise P3), because a share is raised in the table before the worker
learns of it, and lowered in the table after the worker has lowered it.
"""

from __future__ import annotations

import heapq
import math

from .lost_workers import LostWorkers
from .messages import Charged, Part
from .worker_state import ROUNDING, WorkerState


class ShareTable:
    """Records what each worker holds of one limit: `limit` in any window of `window_s` seconds, or at any time if
    `window_s` is 0.

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
        """Return the share of a worker."""
        return self._states[worker].share

    def hold(self, until: float) -> None:
        """Count the whole limit as spent until `until`, less what workers report to hold.

        An earlier keeper gave the limit to workers that this keeper does not know.
        """
        self._lost.hold_all(self.limit, until)

    def charged(self, now: float, lease_s: float) -> Charged:
        """Return everything that counts as spent, for the next keeper. Workers keep their shares for `lease_s` at
        most.
        """
        self.free(now)
        lost, unknown = self._lost.amounts(now)
        for worker, state in self._states.items():
            self._charge(worker, state, now)
            if state.charge > 0:
                lost[worker] = (now + lease_s + self.window_s, state.charge)
        return Charged(self.limit, self.window_s, lost, unknown)

    def take_over(self, charged: Charged) -> None:
        """Count what an earlier keeper charged. A worker's report replaces what is charged to it."""
        for name, (until, amount) in charged.workers.items():
            self._lost.hold(name, until, amount)
        until, amount = charged.unknown
        self._lost.hold_all(amount, until)

    def free(self, now: float) -> float:
        """Return the part of the limit that no worker holds; negative if the limit was lowered."""
        changes = self._changes
        while changes and changes[0][0] <= now:
            _, worker, version = heapq.heappop(changes)
            state = self._states.get(worker)
            if state is not None and state.version == version:
                self._charge(worker, state, now)
        return self.limit - self._taken - self._lost.total(now)

    def next_change(self, now: float) -> float:
        """Return when more becomes free as time passes; infinity if only a report can free more."""
        self.free(now)
        return min(self._lost.next_end(now), self._changes[0][0] if self._changes else math.inf)

    def report(self, worker: str, part: Part, now: float, *, limit: float, window_s: float) -> None:
        """Record a worker's share, spending and demand, and the limit that is declared in its configuration.

        If workers declare different limits, the one with the lowest rate counts.
        """
        state = self._states.get(worker)
        if state is None:
            state = self._states[worker] = WorkerState()
            if worker in self._lost:
                self._lost.release(worker)  # its own report replaces the estimate
            else:
                self._lost.claimed(max(part.share, math.fsum(amount for _, amount in part.spent)))
        if state.declared != (limit, window_s):
            state.declared = (limit, window_s)
            self._find_lowest()
        state.record(part, now)
        self._charge(worker, state, now)

    def drop(self, worker: str, now: float, *, silent: bool) -> None:
        """Remove a worker that left (`silent` false), or that is silent and whose shares have expired.

        Everything that a silent worker may have spent counts as spent now, until the worker reports again.
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
        if self._states and state.declared == (self.limit, self.window_s):
            self._find_lowest()

    def died(self, worker: str, now: float, margin_s: float) -> None:
        """Remove a worker that cannot send any more. What it may have sent counts for a window, or for `margin_s` if
        that is longer.
        """
        until = now + max(self.window_s, margin_s)
        if worker in self._states:
            charge = self._states[worker].charge
            self.drop(worker, now, silent=True)
            self._lost.hold(worker, until, charge)
        else:
            self._lost.end_by(worker, until)

    def all_known(self, now: float, margin_s: float) -> None:
        """Note that unknown workers can send no more: as `died`, for what `hold` and `take_over` count."""
        self._lost.end_all_by(now + max(self.window_s, margin_s))

    def _raise(self, worker: str, share: float, now: float) -> None:
        """Set a share to `share`. The caller raises it by no more than what is free."""
        state = self._states[worker]
        state.share = share
        state.granted_at = now
        self._charge(worker, state, now)

    def _recompute_sum(self) -> None:
        """Recompute the sum of all charges, because rounding errors accumulate in the running sum."""
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
        declared = {state.declared for state in self._states.values()}
        self.limit = min(declared, key=lambda one: (one[0] / max(one[1], 1.0), one[0]))[0]
        self.window_s = max(window_s for _, window_s in declared)
