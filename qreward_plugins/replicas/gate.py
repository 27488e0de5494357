"""Defines `Gate`: counts the calls of this process at each replica, and closes a replica while it is drained.

A thread follows the pool, and an event loop sends calls. So a lock covers the count and the decision to send: after a
process has reported that it has no calls at a replica, it sends none there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from .replica_state import ReplicaState


class Gate:
    """The calls of one process at the replicas of a pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._open: frozenset[str] = frozenset()
        self._draining: dict[str, tuple[int, int]] = {}

    def enter(self, url: str) -> bool:
        """Count a call at the replica at `url`. Return False, and count nothing, if the replica takes no calls."""
        with self._lock:
            if url not in self._open:
                return False
            self._calls[url] += 1
            return True

    def leave(self, url: str) -> tuple[int, int] | None:
        """Count a call down. Return number and ticket of the replica if it is draining and this was the last call."""
        with self._lock:
            self._calls[url] -= 1
            if self._calls[url] > 0:
                return None
            del self._calls[url]
            return self._draining.get(url)

    def take(self, states: Iterable[ReplicaState]) -> list[tuple[int, int]]:
        """Open the replicas that are up, and close all others. Return number and ticket of those that are draining and
        have no calls.
        """
        states = tuple(states)
        with self._lock:
            self._open = frozenset(state.url for state in states if state.state == "up")
            self._draining = {state.url: (state.number, state.ticket) for state in states if state.state == "draining"}
            return [drained for url, drained in self._draining.items() if not self._calls[url]]
