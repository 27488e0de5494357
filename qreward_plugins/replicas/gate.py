"""Defines `Gate`: counts the calls of this process at each replica, and closes a replica while it is drained.

A thread follows the pool, and an event loop sends calls. So the count and the decision to send are taken under a lock:
once a process has said that it has no calls at a replica, none begins there.

With `affinity: group`, `groups` says which weights have begun to judge each group. The last replicas with their weights
then drain in two steps: calls of groups that these weights have begun to judge still enter, until no sample of such a
group is left.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from .group_weights import GroupWeights, Named
from .replica_state import ReplicaState


class Gate:
    """The calls of one process at the replicas of a pool. `groups`: None without `affinity: group`."""

    def __init__(self, groups: GroupWeights | None = None) -> None:
        self.groups = groups
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._states: dict[str, ReplicaState] = {}
        """Those that are up or draining, by URL."""
        self._over: set[tuple[int, int]] = set()
        """Number and ticket of replicas that take no call any more, because this process has said that it has none."""

    def enter(self, url: str, group: str = "") -> bool:
        """Count a call at the replica at `url`, unless it takes none, or none of this group."""
        with self._lock:
            state = self._states.get(url)
            if state is None or not (state.state == "up" or self._ends(state, group)):
                return False
            self._calls[url] += 1
            if group and self.groups is not None:
                self.groups.begin(group, _weights(state))
            return True

    def ends(self, url: str, group: str) -> bool:
        """Whether the replica at `url` is draining, and still takes calls of this group."""
        with self._lock:
            state = self._states.get(url)
            return state is not None and self._ends(state, group)

    def may_begin(self, group: str) -> bool:
        """Whether a replica takes calls of this group now; False: they wait for one."""
        with self._lock:
            return any(state.state == "up" or self._ends(state, group) for state in self._states.values())

    def awaits_groups(self) -> bool:
        """Whether a draining replica still takes calls of some groups."""
        with self._lock:
            return any(self._awaits(state) for state in self._states.values())

    def leave(self, url: str) -> list[tuple[int, int]]:
        """Count a call down. Return number and ticket of the replica if it is draining and this was the last call."""
        with self._lock:
            self._calls[url] -= 1
            if self._calls[url] > 0:
                return []
            del self._calls[url]
            return self._drained()

    def submitted(self, group: str) -> None:
        """Note that a sample of a group was submitted."""
        if self.groups is not None:
            with self._lock:
                self.groups.submitted(group)

    def restart(self) -> None:
        """Forget the samples under way: their event loop was closed."""
        if self.groups is not None:
            with self._lock:
                self.groups.restart()

    def ended(self, group: str) -> list[tuple[int, int]]:
        """Note that a sample of a group has its outcome. Return the replicas that have drained by that."""
        if self.groups is None:
            return []
        with self._lock:
            return self._drained() if self.groups.ended(group) else []

    def take(self, states: Iterable[ReplicaState]) -> list[tuple[int, int]]:
        """Open and close replicas. Return number and ticket of those that are draining and have no calls."""
        with self._lock:
            was = {state.url: state for state in self._states.values() if state.state == "draining"}
            self._states = {state.url: state for state in states if state.state in ("up", "draining")}
            current = {_drain(state) for state in self._states.values()}
            # A connection to another pool begins with its tickets anew.
            self._over = {over for over in self._over if over in current}
            if self.groups is not None:
                self.groups.last(
                    {
                        _weights(state)
                        for state in self._states.values()
                        if _last(state) and (state.url not in was or _drain(was[state.url]) != _drain(state))
                    },
                    any(_last(state) for state in self._states.values()),
                )
            return self._drained(again=True)

    def _ends(self, state: ReplicaState, group: str) -> bool:
        if self.groups is None or not group or not _last(state) or _drain(state) in self._over:
            return False
        return self.groups.belongs(group, _weights(state))

    def _awaits(self, state: ReplicaState) -> bool:
        if self.groups is None or not _last(state) or _drain(state) in self._over:
            return False
        return self.groups.under_way(_weights(state))

    def _drained(self, *, again: bool = False) -> list[tuple[int, int]]:
        """Close the replicas that have drained, and return them; with `again`, also those returned before."""
        found = []
        for url, state in self._states.items():
            drain = _drain(state)
            if state.state != "draining" or self._calls[url] or self._awaits(state):
                continue
            if again or drain not in self._over:
                self._over.add(drain)
                found.append(drain)
        return found


def _last(state: ReplicaState) -> bool:
    return state.state == "draining" and state.last


def _drain(state: ReplicaState) -> tuple[int, int]:
    return state.number, state.ticket


def _weights(state: ReplicaState) -> Named:
    return state.version, state.identity
