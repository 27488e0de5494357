"""`GroupBoard`: a worker's way to the board of its job.

Nothing here may hold up a worker for long or end a run. Reports go out in one call at a time, with all that has
gathered meanwhile. A board that is lost is found or started again, and told what this worker remembers, so that whoever
waits still gets the mean of the group; as long as none can be reached a scored sample keeps its own reward after
`answer_s`, and a failed one gets, at the end of its waiting, what this process knows.

Waiting must not be able to deadlock either. A failed sample that waits holds one of the calls that its worker can carry
at once (1,000 in a Ray actor with async methods), and its siblings may stand in line for one of these very calls. So at
most `max_waiting` wait in a process; one more closes the group that has waited longest, at what is scored by then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ..groups import mean_of
from .board import Key
from .board_actor import Close, Memory, Report
from .board_link import Post, connect
from .named_actors import in_thread

_log = logging.getLogger(__name__)

MAX_WAITING = 500
"""Half of the calls that an async Ray actor carries at once by default."""

ANSWER_S = 5.0
"""How long the board may take to answer before it counts as lost, in seconds."""

RECENT = 4_096
"""Groups whose reports this process remembers for a board that is started anew, at most."""

_BATCH = 2_000
_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(slots=True)
class _Own:
    """What this process knows of a group."""

    size: int | None
    rewards: dict[str, float | None] = field(default_factory=dict)
    generations: dict[str, str] = field(default_factory=dict)
    mean: float | None = None


@dataclass(slots=True)
class _Waiting:
    """The failed samples of a group that wait here, for one number."""

    mean: asyncio.Future[float]
    samples: int = 0
    ending: bool = False
    watch: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Letter:
    thing: Report | Close
    answer: asyncio.Future[float | None]


class GroupBoard:
    """The board, for the samples that one process scores on one event loop.

    Args:
        wait_s: how long a failed sample waits for its siblings at most, in seconds from its failure.
        max_waiting: how many wait at once at most.
        answer_s: how long the board may take to answer, in seconds.
        connect: finds or starts the board; called in a thread of its own, may block and raise.
    """

    def __init__(
        self,
        *,
        wait_s: float,
        max_waiting: int = MAX_WAITING,
        answer_s: float = ANSWER_S,
        connect: Callable[[], Post] = connect,
    ) -> None:
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._answer_s = answer_s
        self._connect = connect
        self._post: Post | None = None
        self._start: str | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._delivering: asyncio.Task[None] | None = None
        self._heeding: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: list[_Letter] = []
        self._recent: OrderedDict[Key, _Own] = OrderedDict()
        self._waiting: OrderedDict[Key, _Waiting] = OrderedDict()
        self._unreachable = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many failed samples wait here, without those whose waiting is being ended."""
        return sum(waiting.samples for waiting in self._waiting.values() if not waiting.ending)

    async def settle(self, report: Report, *, wait: bool = True) -> float | None:
        """The number that a sample trains on in place of its own; None: its own stands, or it was only to be counted.

        A failed sample of a group always gets a number; it waits for its siblings, `wait_s` and the time of one answer
        at most, and without `wait` not at all. Whatever else there is takes `answer_s` at most, and no time while it is
        known that the board cannot be reached. Raises nothing; may be cancelled, and the report counts all the same.
        """
        if report.key is None:
            return await self._ask(report)
        own = self._own(report.key, report.size)
        if own.mean is not None and report.sample not in own.rewards:
            await self._ask(report)
            return own.mean
        if own.rewards.get(report.sample) is None or own.generations.get(report.sample) != report.generation:
            own.rewards[report.sample] = report.reward
            own.generations[report.sample] = report.generation
        if report.reward is None:
            return await self._wait(report, report.key, self._wait_s if wait else 0.0)
        mean = await self._ask(report)
        if mean is not None:
            self._settled(report.key, mean)
            own.rewards.pop(report.sample, None)
        return mean

    async def aclose(self) -> None:
        """End everything that is under way here; whoever waits gets what this process knows."""
        self._closed = True
        for key in list(self._waiting):
            self._settled(key, self._known_mean(key))
        for letter in self._outbox:
            letter.answer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, report: Report) -> float | None:
        """The board's answer; None, too, when it does not come in time."""
        if self._closed:
            return None
        letter = self._mail(report)
        try:
            if not self._unreachable:
                await asyncio.wait({letter.answer}, timeout=self._answer_s)
            return letter.answer.result() if _has_result(letter.answer) else None
        finally:
            letter.answer.cancel()

    async def _wait(self, report: Report, key: Key, wait_s: float) -> float:
        """What the group of a failed sample is closed at, by its siblings, by time, or by one too many that wait."""
        if self._closed:
            return self._known_mean(key)
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting(asyncio.get_running_loop().create_future())
        waiting.samples += 1
        letter = self._mail(report)
        try:
            self._make_room()
            await asyncio.wait({waiting.mean}, timeout=wait_s)
            if not waiting.mean.done():
                self._end(key, waiting)
            return await asyncio.shield(waiting.mean)
        finally:
            letter.answer.cancel()
            waiting.samples -= 1
            if not waiting.samples:
                self._waiting.pop(key, None)
                if waiting.watch is not None:
                    waiting.watch.cancel()

    def _make_room(self) -> None:
        while self.waiting > self._max_waiting:
            key, oldest = next((key, waiting) for key, waiting in self._waiting.items() if not waiting.ending)
            self._end(key, oldest)

    def _end(self, key: Key, waiting: _Waiting) -> None:
        if not waiting.ending:
            waiting.ending = True
            self._spawn(self._close_early(key, waiting))

    async def _close_early(self, key: Key, waiting: _Waiting) -> None:
        letter = self._mail(Close(key))
        either: set[asyncio.Future[Any]] = {letter.answer, waiting.mean}
        await asyncio.wait(either, timeout=self._answer_s, return_when=asyncio.FIRST_COMPLETED)
        letter.answer.cancel()
        self._settled(key, self._known_mean(key))

    def _known_mean(self, key: Key) -> float:
        own = self._own(key, None)
        return mean_of(own.rewards.values()) if own.mean is None else own.mean

    def _settled(self, key: Key, mean: float) -> None:
        """The group is closed; the first number that was heard stands."""
        own = self._own(key, None)
        if own.mean is None:
            own.mean = mean
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.mean.done():
            waiting.mean.set_result(own.mean)

    def _own(self, key: Key, size: int | None) -> _Own:
        own = self._recent.setdefault(key, _Own(size))
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return own

    def _mail(self, thing: Report | Close) -> _Letter:
        letter = _Letter(thing, asyncio.get_running_loop().create_future())
        if self._post is None and len(self._outbox) > _BATCH:
            self._drop_unwanted()
        self._outbox.append(letter)
        if self._heeding is None:
            self._heeding = self._spawn(self._heed())
        if self._delivering is None or self._delivering.done():
            self._delivering = self._spawn(self._deliver())
        return letter

    def _drop_unwanted(self) -> None:
        """Without a connection, letters that nobody expects an answer to; what is in them is remembered."""
        self._outbox = [letter for letter in self._outbox if not letter.answer.done()]

    async def _deliver(self) -> None:
        while self._outbox:
            post = await self._board()
            batch, self._outbox = self._outbox[:_BATCH], self._outbox[_BATCH:]
            try:
                answers = await asyncio.wait_for(post.post([letter.thing for letter in batch]), self._answer_s)
            except Exception as error:
                self._outbox[:0] = batch
                self._lost(post, error)
                await asyncio.sleep(_PAUSES_S[0])
                continue
            for letter, mean in zip(batch, answers.means, strict=True):
                self._take(letter, mean)
            if answers.start != self._start:
                self._lost(post, None)
                await self._board()

    def _take(self, letter: _Letter, mean: float | None) -> None:
        if not letter.answer.done():
            letter.answer.set_result(mean)
        key = letter.thing.key
        if key is None or (isinstance(letter.thing, Report) and letter.thing.reward is not None):
            return
        if mean is not None:
            self._settled(key, mean)
        elif key in self._waiting and self._waiting[key].watch is None:
            self._waiting[key].watch = self._spawn(self._watch(key, self._waiting[key]))

    async def _heed(self) -> None:
        """Notice at once when the board is lost: others may wait for what this process knows, and has said already."""
        while True:
            post = await self._board()
            try:
                await post.end(self._start or "")
            except Exception as error:
                self._lost(post, error)
                await asyncio.sleep(_PAUSES_S[0])
            else:
                self._lost(post, None)

    async def _watch(self, key: Key, waiting: _Waiting) -> None:
        while not waiting.mean.done():
            post = await self._board()
            try:
                mean = await post.mean(key)
            except Exception as error:
                self._lost(post, error)
                await asyncio.sleep(_PAUSES_S[0])
            else:
                self._settled(key, mean)

    async def _board(self) -> Post:
        while self._post is None:
            if self._connecting is None or self._connecting.done():
                self._connecting = self._spawn(self._reconnect())
            await asyncio.wait({self._connecting})
        return self._post

    async def _reconnect(self) -> None:
        for number in itertools.count():
            try:
                post = await in_thread(self._connect)
                self._drop_unwanted()
                answers = await asyncio.wait_for(post.post(self._memories()), self._answer_s)
            except Exception as error:
                self._unreachable = True
                if number == 0:
                    _log.warning("the group board does not answer (%s); trying again until it does", _words(error))
                await asyncio.sleep(_PAUSES_S[min(number, len(_PAUSES_S) - 1)])
            else:
                self._start, self._post, self._unreachable = answers.start, post, False
                return

    def _memories(self) -> list[Memory]:
        """What the board is told when it is found; the reports that are still to be sent are not part of it."""
        mailed = {
            (letter.thing.key, letter.thing.sample) for letter in self._outbox if isinstance(letter.thing, Report)
        }
        memories = []
        for key, own in self._recent.items():
            rewards = {sample: reward for sample, reward in own.rewards.items() if (key, sample) not in mailed}
            if rewards or own.mean is not None:
                memories.append(Memory(key, own.size, rewards, own.mean))
        return memories

    def _lost(self, post: Post, error: Exception | None) -> None:
        if self._post is post:
            self._post = None
            _log.info("the group board is lost (%s)", "it was started anew" if error is None else _words(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _has_result(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


__all__ = ["ANSWER_S", "MAX_WAITING", "GroupBoard"]
