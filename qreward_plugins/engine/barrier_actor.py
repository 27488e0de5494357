"""The barrier's actor: an actor of the Ray job, or without Ray an object of this process.

A process sends its reports in order; each call carries all reports since the last one. A sample that waits for its
group has its own call, which is answered when the group closes. If the actor's process is lost, Ray restarts the actor,
which then has no state. So every answer names the start that it comes from. The actor counts outcomes, because all of
them are reported to it.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from ..system import ray_actors as named_actors
from .barrier_state import BarrierState, GroupKey

NAME = "qreward-groups"
"""The name of the actor in its job."""

_BATCHES = 1_000
"""Most batches that are kept. Of batches that get shorter and shorter, the latest ones."""


class Report(NamedTuple):
    """The outcome of a sample.

    `reward` is None for a sample without a number to train on. `failure` is the cause of a failed sample ("infra",
    "verdict", "policy"), else empty. `sample` identifies it in its group, and `generation` identifies its response,
    which may be regenerated. `size` is the number of samples in the group; None if unknown. `cut`: the judge saw the
    sample without its middle. `floor`: the reward is a floor. `waited` is what the batch that ended with this sample
    waited for, in seconds by name; empty if none ended. With `key` None the sample is only counted.
    """

    key: GroupKey | None
    sample: str
    reward: float | None
    size: int | None = None
    split: Literal["train", "val"] = "train"
    failure: str = ""
    generation: str = ""
    cut: bool = False
    floor: bool = False
    waited: tuple[tuple[str, float], ...] = ()


class Close(NamedTuple):
    """Close this group early, because its failed samples can wait no longer."""

    key: GroupKey


class Memory(NamedTuple):
    """A process's record of a group, for an actor that was restarted."""

    key: GroupKey
    size: int | None
    rewards: dict[str, float | None]
    mean: float | None


class Answers(NamedTuple):
    """One answer for each item sent (see `BarrierState.report`; the mean for a `Close`), and the actor's start."""

    start: str
    means: list[float | None]


class Waited(NamedTuple):
    """The longest batch of all processes: `parts` are the seconds by name. `number` is that of the newest batch, and
    `start` the actor's start; with both, the next call of `BarrierActor.waited` has the later batches.
    """

    start: str
    number: int
    parts: dict[str, float]


class BarrierActor:
    """All methods are coroutines, so that a Ray actor serves its calls on one event loop."""

    def __init__(self) -> None:
        self._start = uuid.uuid4().hex
        self._state = BarrierState(self._wake)
        self._waiting: dict[GroupKey, set[asyncio.Future[float]]] = {}
        self._counts: Counter[str] = Counter()
        self._batches = 0
        # Each is longer than all later ones, so the first after a number is the longest after it.
        self._longest: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=_BATCHES)

    async def send(self, items: Sequence[Report | Close | Memory]) -> Answers:
        """Handle these in order."""
        return Answers(self._start, [self._take(item) for item in items])

    async def mean(self, key: GroupKey) -> float:
        """The mean of a group, once it is closed; this call waits until then. It may be cancelled."""
        known = self._state.mean(key)
        if known is not None:
            return known
        waiter: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(waiter)
        try:
            return await waiter
        finally:
            waiting = self._waiting.get(key, set())
            waiting.discard(waiter)
            if not waiting:
                self._waiting.pop(key, None)

    async def end(self, start: str) -> None:
        """Wait while this start lasts: return at once if the actor has another start, and fail if the actor is lost."""
        if start == self._start:
            await asyncio.get_running_loop().create_future()

    async def counts(self) -> tuple[str, dict[str, int]]:
        """The start, and the counts of samples since then: "train/samples", "train/failed", "train/failed/<cause>",
        "train/imputed", "train/cut", "train/floor"; the same with "val".
        """
        return self._start, dict(self._counts)

    async def waited(self, start: str, number: int) -> Waited:
        """What the longest batch waited for that ended after the one of this number of this start. Several processes
        may ask, each with what it got last.
        """
        after = number if start == self._start else 0
        parts = next((parts for ended, _, parts in self._longest if ended > after), {})
        return Waited(self._start, self._batches, parts)

    def _note_waited(self, parts: dict[str, float]) -> None:
        whole_s = math.fsum(parts.values())
        while self._longest and self._longest[-1][1] <= whole_s:
            self._longest.pop()
        self._batches += 1
        self._longest.append((self._batches, whole_s, parts))

    def _take(self, thing: Report | Close | Memory) -> float | None:
        if isinstance(thing, Report) and thing.waited:
            self._note_waited(dict(thing.waited))
        if isinstance(thing, Memory):
            self._state.restore(*thing)
            return None
        if isinstance(thing, Close):
            return self._state.close(thing.key)
        if thing.key is None:
            self._count(thing, imputed=False)
            return None
        new = not self._state.knows(thing.key, thing.sample, thing.generation)
        mean = self._state.report(thing.key, thing.sample, thing.reward, thing.size, generation=thing.generation)
        if new:
            self._count(thing, imputed=mean is not None or thing.reward is None)
        return mean

    def _count(self, report: Report, *, imputed: bool) -> None:
        self._counts[f"{report.split}/samples"] += 1
        if report.failure:
            self._counts[f"{report.split}/failed"] += 1
            self._counts[f"{report.split}/failed/{report.failure}"] += 1
        if imputed:
            self._counts[f"{report.split}/imputed"] += 1
        if report.cut:
            self._counts[f"{report.split}/cut"] += 1
        if report.floor:
            self._counts[f"{report.split}/floor"] += 1

    def _wake(self, key: GroupKey, mean: float) -> None:
        for waiter in self._waiting.pop(key, set()):
            if not waiter.done():
                waiter.set_result(mean)


class Link(Protocol):
    """The connection of a process to the barrier's actor."""

    async def send(self, items: Sequence[Report | Close | Memory]) -> Answers: ...

    async def mean(self, key: GroupKey) -> float: ...

    async def end(self, start: str) -> None: ...


class _RemoteLink:
    """A connection to a Ray actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def send(self, items: Sequence[Report | Close | Memory]) -> Answers:
        return await self._handle.send.remote(items)  # type: ignore[no-any-return]

    async def mean(self, key: GroupKey) -> float:
        return await self._handle.mean.remote(key)  # type: ignore[no-any-return]

    async def end(self, start: str) -> None:
        await self._handle.end.remote(start)


def connect() -> Link:
    """Connect to this job's actor, and start it if needed; without Ray, make one in this process. Blocks; raises Ray's
    errors.
    """
    return _RemoteLink(barrier_actor()) if named_actors.ray_is_up() else BarrierActor()


def barrier_actor() -> Any:
    """The Ray handle of this job's `BarrierActor`, which is started if needed. Blocks; raises Ray's errors."""
    return named_actors.get_or_start(NAME, BarrierActor)
