"""The far side of a barrier: an actor of the Ray job, and an object of this process where there is no Ray.

A process sends its reports in order, all since its last call in one call. A sample that waits for its group has a call
of its own, which is answered when the group is complete or closed. Ray starts the actor anew when its process is lost;
the new one knows nothing, so every answer says which start it is from. Outcomes are counted here, because all of them
are reported here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from .. import named_actors
from ._state import BarrierState, GroupKey

NAME = "qreward-groups"
"""The name of the actor in its job."""


class Report(NamedTuple):
    """What became of a sample.

    `reward` is None for a sample without a number to train on; `failure` is the cause ("infra", "verdict", "policy") of
    one without a verdict, and empty for any other. `sample` tells the samples of a group apart, and `generation` the
    responses of a sample that is generated anew. `size` is how many samples the group has, None if that is not known.
    `cut`: the judge saw the sample without its middle. `floor`: the reward is a floor. With `key` None the sample is
    only counted.
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


class Close(NamedTuple):
    """Close this group early, because no worker waits for it any longer."""

    key: GroupKey


class Memory(NamedTuple):
    """What a process remembers of a group, for a barrier that was started anew."""

    key: GroupKey
    size: int | None
    rewards: dict[str, float | None]
    mean: float | None


class Answers(NamedTuple):
    """One answer for each thing that was sent (`BarrierState.report`, the mean for a `Close`), and the start."""

    start: str
    means: list[float | None]


class BarrierActor:
    """The far side. All methods are coroutines, because that makes a Ray actor serve its calls on one event loop."""

    def __init__(self) -> None:
        self._start = uuid.uuid4().hex
        self._state = BarrierState(self._tell)
        self._parked: dict[GroupKey, set[asyncio.Future[float]]] = {}
        self._counts: Counter[str] = Counter()

    async def send(self, things: Sequence[Report | Close | Memory]) -> Answers:
        """Take these in, in their order."""
        return Answers(self._start, [self._take(thing) for thing in things])

    async def mean(self, key: GroupKey) -> float:
        """The mean of a group, as soon as it is closed. This call is parked until then; cancelling it is harmless."""
        known = self._state.mean(key)
        if known is not None:
            return known
        parked: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._parked.setdefault(key, set()).add(parked)
        try:
            return await parked
        finally:
            waiting = self._parked.get(key, set())
            waiting.discard(parked)
            if not waiting:
                self._parked.pop(key, None)

    async def end(self, start: str) -> None:
        """Parked for as long as this start lasts: the call returns at once if it is another one by now, and fails when
        the actor is lost.
        """
        if start == self._start:
            await asyncio.get_running_loop().create_future()

    async def counts(self) -> tuple[str, dict[str, int]]:
        """The start, and how many samples were what since then: "train/samples", "train/failed",
        "train/failed/infra" and so on, "train/imputed", "train/cut", "train/floor"; the same with "val".
        """
        return self._start, dict(self._counts)

    def _take(self, thing: Report | Close | Memory) -> float | None:
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

    def _tell(self, key: GroupKey, mean: float) -> None:
        for parked in self._parked.pop(key, set()):
            if not parked.done():
                parked.set_result(mean)


class Link(Protocol):
    """What a process needs of the far side."""

    async def send(self, things: Sequence[Report | Close | Memory]) -> Answers: ...

    async def mean(self, key: GroupKey) -> float: ...

    async def end(self, start: str) -> None: ...


class _RemoteLink:
    """The far side in its Ray actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def send(self, things: Sequence[Report | Close | Memory]) -> Answers:
        return await self._handle.send.remote(things)  # type: ignore[no-any-return]

    async def mean(self, key: GroupKey) -> float:
        return await self._handle.mean.remote(key)  # type: ignore[no-any-return]

    async def end(self, start: str) -> None:
        await self._handle.end.remote(start)


def connect() -> Link:
    """The far side of this Ray job, started if there is none; without Ray one of this process. Blocks; raises what Ray
    raises.
    """
    return _RemoteLink(barrier_actor()) if named_actors.ray_is_up() else BarrierActor()


def barrier_actor() -> Any:
    """The Ray handle of this job's `BarrierActor`, started if there is none; its `counts` say what the outcomes came
    to. Blocks; raises what Ray raises.
    """
    return named_actors.get_or_start(NAME, BarrierActor)
