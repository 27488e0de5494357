"""Defines `PoolStatus`: the replicas of a pool and what the processes that use it have sent them, for people.

The pool itself sees no requests. So it asks its users for their counts, and only when somebody wants the status.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import anyio

from .replica_state import ReplicaState
from .weights import Weights

_REPORT_WITHIN_S = 5.0
"""Most seconds to wait for the counts of a process. One that is stopped, or holds the interpreter lock, sends none."""


@dataclass(frozen=True)
class ReplicaLoad:
    """What processes have sent to a replica since its server started. `pending_tokens` are those of the requests under
    way (`in_flight`), as estimated. `prefix_hits` of `prefix_tokens` prompt tokens came from the prefix cache, as the
    server states it, or as estimated. `health` counts processes by the health that the replica has for them.
    """

    requests: int = 0
    in_flight: int = 0
    pending_tokens: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    health: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: ReplicaLoad) -> ReplicaLoad:
        health = dict(Counter(self.health) + Counter(other.health))
        counts = (one.name for one in fields(self) if one.name != "health")
        return ReplicaLoad(**{name: getattr(self, name) + getattr(other, name) for name in counts}, health=health)


@dataclass(frozen=True)
class PoolStatus:
    """The state of a pool, and the load of each replica by its number. `processes` use it, the asking one not counted;
    the loads are without those of the `silent` ones, which have sent no counts in time.
    """

    replicas: tuple[ReplicaState, ...]
    weights: Weights
    processes: int = 0
    silent: int = 0
    loads: Mapping[int, ReplicaLoad] = field(default_factory=dict)

    def as_mapping(self) -> dict[str, Any]:
        """Its fields as plain values; `of` reads them."""
        loads = {str(number): asdict(load) for number, load in self.loads.items()}
        return {
            "replicas": [state.as_mapping() for state in self.replicas],
            "weights": self.weights.as_mapping(),
            "processes": self.processes,
            "silent": self.silent,
            "loads": loads,
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> PoolStatus:
        """Make the status of what `as_mapping` returned, also of its copy in JSON."""
        return cls(
            tuple(ReplicaState(**state) for state in values["replicas"]),
            Weights(**values["weights"]),
            values["processes"],
            values["silent"],
            {int(number): ReplicaLoad(**load) for number, load in values["loads"].items()},
        )


class Reports:
    """The counts that a pool asks its users for. `send` sends a message to a user."""

    def __init__(self, send: Callable[[Hashable, dict[str, Any]], None]) -> None:
        self._send = send
        self._open: set[_Question] = set()

    async def ask(self, users: Iterable[Hashable]) -> tuple[dict[int, ReplicaLoad], int]:
        """Ask these users for their counts. Return the sums by replica, and how many users have sent none in time."""
        question = _Question(users)
        self._open.add(question)
        try:
            for user in list(question.asked):
                self._send(user, {"report": True})
            await question.wait()
        finally:
            self._open.discard(question)
        return question.loads, len(question.asked)

    def receive(self, user: Hashable, loads: Mapping[str, Mapping[str, Any]]) -> None:
        """Handle the counts of a user. Questions that are open at the same time have the same answer."""
        known = {int(number): ReplicaLoad(**load) for number, load in loads.items()}
        for question in self._open:
            question.answer(user, known)

    def left(self, user: Hashable) -> None:
        """Wait no longer for a user."""
        for question in self._open:
            question.answer(user, {})


class _Question:
    """One round of reports. `asked` are the users whose counts have not come."""

    def __init__(self, users: Iterable[Hashable]) -> None:
        self.asked = set(users)
        self.loads: dict[int, ReplicaLoad] = {}
        self._over = asyncio.Event()

    def answer(self, user: Hashable, loads: Mapping[int, ReplicaLoad]) -> None:
        if user in self.asked:
            self.asked.discard(user)
            for number, load in loads.items():
                self.loads[number] = self.loads.get(number, ReplicaLoad()) + load
        if not self.asked:
            self._over.set()

    async def wait(self) -> None:
        if self.asked:
            with anyio.move_on_after(_REPORT_WITHIN_S):
                await self._over.wait()
