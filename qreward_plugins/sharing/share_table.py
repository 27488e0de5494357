"""The table of shares of one limit: what each worker holds. The sum never exceeds the limit.

A worker's spending in the window is at most the larger of two numbers: its share, and what it spent before the share
was lowered and is still in the window. The table charges each worker with the larger one and keeps the sum of the
charges within the limit. That keeps the limit (promise P3), because a share is raised in the table before the worker
learns of it, and lowered in the table after the worker has lowered it.

What a lost worker may have spent stays charged until it has left the window.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from .messages import Part

ROUNDING = 1e-6
_UNKNOWN = ""
"""Name under which the shares of an earlier keeper are charged. Its workers are not known by name."""


class WorkerState:
    """A worker's share, demand and spending, as of its last report."""

    __slots__ = ("_entries", "_spent", "charge", "declared", "granted_at", "held", "more", "share", "unit", "version")

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
        self._entries: list[tuple[float, float]] = []  # (until, amount), the latest first
        self._spent = 0.0

    def record(self, part: Part, now: float) -> None:
        """Record the worker's report."""
        self.share, self.more, self.unit = part.share, part.more, max(part.unit, ROUNDING)
        self._entries = sorted([(now + left_s, amount) for left_s, amount in part.spent], reverse=True)
        self._spent = math.fsum(amount for _, amount in part.spent)
        self.held = math.fsum(amount for left_s, amount in part.spent if left_s == math.inf)

    def spent(self, now: float) -> float:
        """Return the amount spent that is still in the window."""
        entries = self._entries
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
        return self._entries[-1][0] if self._entries else math.inf

    def remains(self) -> list[tuple[float, float]]:
        """Return the amounts spent: (when the amount leaves the window, amount)."""
        return self._entries


class _Lost:
    """Amounts that count as spent without a worker, each until a time."""

    def __init__(self) -> None:
        self._amounts: dict[str, tuple[float, float]] = {}
        self._ends: list[tuple[float, str]] = []
        self._total = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._amounts

    def hold(self, name: str, until: float, amount: float) -> None:
        """Count `amount` until `until`, instead of what counted under this name."""
        self.release(name)
        if amount > 0:
            self._amounts[name] = (until, amount)
            self._total += amount
            heapq.heappush(self._ends, (until, name))

    def release(self, name: str) -> None:
        """Stop counting the amount of a name."""
        _, amount = self._amounts.pop(name, (0.0, 0.0))
        self._total = self._total - amount if self._amounts else 0.0

    def reduce(self, name: str, amount: float) -> None:
        """Count `amount` less under a name."""
        if name in self._amounts:
            until, before = self._amounts[name]
            self.hold(name, until, before - amount)

    def amount(self, name: str) -> float:
        """Return the amount that counts under a name."""
        return self._amounts.get(name, (0.0, 0.0))[1]

    def total(self, now: float) -> float:
        """Return the sum of the amounts that count."""
        while self._ends and self._ends[0][0] <= now:
            until, name = heapq.heappop(self._ends)
            if self._amounts.get(name, (math.inf, 0.0))[0] <= until:
                self.release(name)
        return self._total

    def next_end(self, now: float) -> float:
        """Return when the sum next decreases; infinity if never."""
        self.total(now)
        return self._ends[0][0] if self._ends else math.inf


class ShareTable:
    """Records what each worker holds of one limit: `limit` in any window of `window_s` seconds, or at any time if
    `window_s` is 0.

    Times are seconds of the keeper's monotonic clock.
    """

    def __init__(self, limit: float, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._lost = _Lost()
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
        self._lost.hold(_UNKNOWN, until, self.limit)

    def free(self, now: float) -> float:
        """Return the part of the limit that no worker holds; negative if the limit was lowered."""
        changes = self._changes
        while changes and changes[0][0] <= now:
            _, worker, version = heapq.heappop(changes)
            state = self._states.get(worker)
            if state is not None and state.version == version:
                self._charge(worker, state, now)
        return self.limit - self._taken - self._lost.total(now)

    def left(self, now: float) -> float:
        """Return what nobody has spent of the limit. What an earlier keeper may have given out is not spent."""
        return self.unspent(now) - self._lost.total(now) + self._lost.amount(_UNKNOWN)

    def unspent(self, now: float) -> float:
        """Return the limit less what workers report as spent. What lost workers may have spent is not subtracted."""
        return self.limit - math.fsum([state.spent(now) - state.held for state in self._states.values()])

    def spent_since(self, moment: float) -> float:
        """Return what was spent after `moment`; a silent worker may have spent all that it is charged with."""
        amounts = [amount for until, amount in self.entries() if until - self.window_s > moment]
        return math.fsum(amounts) + self._lost.total(moment + self.window_s)

    def entries(self) -> list[tuple[float, float]]:
        """Return what was spent in the window: (when it leaves the window, amount)."""
        return [entry for state in self._states.values() for entry in state.remains()]

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
                self._lost.reduce(_UNKNOWN, max(part.share, math.fsum(amount for _, amount in part.spent)))
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

    def change(self, limit: float, window_s: float, workers: Iterable[str]) -> bool:
        """Change the limit of workers that do not declare one; return whether it was another one."""
        changed = False
        for state in [self._states[worker] for worker in workers if worker in self._states]:
            changed = changed or state.declared != (limit, window_s)
            state.declared = limit, window_s
        if changed:
            self._find_lowest()
        return changed

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
