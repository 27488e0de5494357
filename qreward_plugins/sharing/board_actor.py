"""The board as an actor of the Ray job, and as an object of this process where there is no Ray.

What comes from a worker comes in order, in one call for all that has gathered there since the last; who waits for a
group has a call of its own parked here. Every answer says which start of the board it is from, because Ray starts an
actor anew when its process is lost, with nothing on the board. As every outcome passes here, they are counted here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .board import Board, Key

NAME = "qreward-board"
"""The name of the actor in its job."""


class Report(NamedTuple):
    """What became of a sample.

    `reward` is None for a sample without a number to train on; `failure` is the cause ("infra", "verdict", "policy") of
    one without a verdict, and empty for any other. `generation` tells the responses of a sample apart that is generated
    anew. `cut`: the judge saw the sample without its middle. `floor`: the reward is a floor. With `key` None the sample
    is only counted.
    """

    key: Key | None
    sample: str
    reward: float | None
    size: int | None = None
    split: Literal["train", "val"] = "train"
    failure: str = ""
    generation: str = ""
    cut: bool = False
    floor: bool = False


class Close(NamedTuple):
    """Close this group early; nobody waits for it any longer."""

    key: Key


class Memory(NamedTuple):
    """What a worker remembers of a group, for a board that was started anew."""

    key: Key
    size: int | None
    rewards: dict[str, float | None]
    mean: float | None


class Answers(NamedTuple):
    """One answer for each thing that was sent (`Board.report`, the mean for a `Close`), and the board's start."""

    start: str
    means: list[float | None]


class BoardActor:
    """The board. All methods are coroutines, because that makes a Ray actor serve its calls on one event loop."""

    def __init__(self) -> None:
        self._start = uuid.uuid4().hex
        self._board = Board(self._tell)
        self._parked: dict[Key, set[asyncio.Future[float]]] = {}
        self._counts: Counter[str] = Counter()

    async def post(self, things: Sequence[Report | Close | Memory]) -> Answers:
        """Take these in, in their order."""
        return Answers(self._start, [self._take(thing) for thing in things])

    async def mean(self, key: Key) -> float:
        """The mean of a group, as soon as it is closed. This call is parked until then; cancelling it is harmless."""
        known = self._board.mean(key)
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
        """Parked for as long as this start of the board lasts: the call returns at once if it is another one by now,
        and fails when the board is lost.
        """
        if start == self._start:
            await asyncio.get_running_loop().create_future()

    async def counts(self) -> tuple[str, dict[str, int]]:
        """The board's start, and how many samples were what since then: "train/samples", "train/failed",
        "train/failed/infra" and so on, "train/imputed", "train/cut"; the same with "val".
        """
        return self._start, dict(self._counts)

    def _take(self, thing: Report | Close | Memory) -> float | None:
        if isinstance(thing, Memory):
            self._board.restore(*thing)
            return None
        if isinstance(thing, Close):
            return self._board.close(thing.key)
        if thing.key is None:
            self._count(thing, imputed=False)
            return None
        new = not self._board.knows(thing.key, thing.sample, thing.generation)
        mean = self._board.report(thing.key, thing.sample, thing.reward, thing.size, generation=thing.generation)
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

    def _tell(self, key: Key, mean: float) -> None:
        for parked in self._parked.pop(key, set()):
            if not parked.done():
                parked.set_result(mean)


__all__ = ["NAME", "Answers", "BoardActor", "Close", "Memory", "Report"]
