"""Defines `PoolView`: what the event loop knows of a pool of servers.

Another thread receives the states of the pool. The view passes them to the inner source of a `ReplicaSet`, which sends
the requests, and admits its calls to replicas that are up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..replicas import ReplicaState
from ..replicas.pool_use import PoolUse
from ..secrets import Redactor
from .base import ServedWeights
from .endpoint import Endpoint
from .replica import Mark, ReplicaChange

PROBLEM_CHARS = 300
"""Most characters of a problem that a server or its log states."""
_MOST_CHANGES = 1000
_MARKS: Mapping[str, Mark] = {"up": "up", "draining": "draining"}
_GONE = ("failed", "stopped")
"""The states of replicas that do not come back."""


class PoolView:
    """The pool `use` of the source `name`, whose requests `inner` sends to URLs that end with `path`.

    It is the `CallGate` of `inner`.
    """

    def __init__(self, name: str, use: PoolUse, inner: Endpoint, redactor: Redactor, path: str) -> None:
        self._name = name
        self._use = use
        self._inner = inner
        self._redactor = redactor
        self._path = path
        self._seen = -1
        self._changes: list[ReplicaChange] = []
        self.states: tuple[ReplicaState, ...] = ()
        """The states of the replicas at the last look."""
        inner.replicas_asked.gate = self

    def look(self) -> None:
        """Update the inner source from the states of the pool."""
        if self._seen == self._use.version:
            return
        self._seen = self._use.version
        before, self.states = self.states, self._use.states
        asked = self._inner.replicas_asked
        running = {state.url + self._path: state for state in self.states if state.url}
        asked.absent = sum(not state.url and state.state not in _GONE for state in self.states)
        self._inner.move(list(running))
        for url, state in running.items():
            asked.mark(url, _MARKS.get(state.state, "down"))
            if state.state == "up":
                asked.serves(url, ServedWeights(state.version, state.identity))
            elif state.abort:
                asked.abort(url)
        were = {state.number: state for state in before}
        for state in self.states:
            was = were.get(state.number)
            if was is None or (was.state, was.version) != (state.state, state.version):
                earlier = "" if was is None else was.state
                problem = self._redactor.of(state.problem, PROBLEM_CHARS)
                self._changes.append(
                    ReplicaChange(self._name, state.number, state.state, earlier, state.version, problem)
                )
        del self._changes[:-_MOST_CHANGES]

    def take_changes(self) -> Sequence[ReplicaChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    # The `CallGate` of the inner source

    def enter(self, base_url: str) -> bool:
        return self._use.enter(base_url.removesuffix(self._path))

    def leave(self, base_url: str) -> None:
        self._use.leave(base_url.removesuffix(self._path))

    def held(self) -> str:
        return self._use.held
