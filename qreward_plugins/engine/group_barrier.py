"""`GroupBarrier`: lets a failed sample wait for its siblings, whichever process scores them.

The barrier never ends a run, and delays a process only for a bounded time. It makes one call at a time to the actor;
each carries all reports since the last one. If the actor is lost, this process finds or starts another and sends its
own records, so that waiting samples still get the mean of their group. While no actor can be reached, a scored sample
keeps its own reward after `answer_s`, and a failed one gets the mean that this process knows when its waiting ends.

Waiting must not deadlock. A waiting sample may occupy one of the calls that its process can carry at once (1,000 in a
Ray actor with async methods), and its siblings may queue for these calls. So at most `max_waiting` samples wait in a
process. One more closes the group that has waited longest, at the mean of its scored samples.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import anyio

from ..secrets import described_error
from ..system.threads import in_thread
from .barrier_actor import Close, Link, Memory, Report, connect
from .barrier_state import GroupKey, GroupRecord

_log = logging.getLogger(__name__)

MAX_WAITING = 500
"""Half of the calls that an async Ray actor carries at once by default."""

ANSWER_S = 5.0
"""Most seconds for an answer of the actor; after that it counts as lost."""

RECENT = 4_096
"""Most groups whose reports this process keeps for an actor that is restarted."""

_BATCH = 2_000
_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(slots=True)
class _Waiting:
    """The failed samples of a group that wait in this process."""

    mean: asyncio.Future[float]
    samples: int = 0
    ending: bool = False
    watch: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Request:
    thing: Report | Close
    answer: asyncio.Future[float | None]


class GroupBarrier:
    """The barrier for the samples that one process scores on one event loop.

    With Ray, the processes of a job share an actor, which the first of them starts. Without Ray, only the samples of
    this object meet.

    Args:
        wait_s: most seconds that a failed sample waits for its siblings, from its failure.
        max_waiting: most samples that wait at once; None for any number.
        answer_s: most seconds for an answer of the actor.
        connect: finds or starts the actor; it runs in its own thread, and may block and raise.
    """

    def __init__(
        self,
        *,
        wait_s: float,
        max_waiting: int | None = MAX_WAITING,
        answer_s: float = ANSWER_S,
        connect: Callable[[], Link] = connect,
    ) -> None:
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._answer_s = answer_s
        self._connect = connect
        self._link: Link | None = None
        self._start: str | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: list[_Request] = []
        self._recent: OrderedDict[GroupKey, GroupRecord] = OrderedDict()
        self._waiting: OrderedDict[GroupKey, _Waiting] = OrderedDict()
        self._unreachable = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of failed samples that wait, without those whose waiting is being ended."""
        return sum(waiting.samples for waiting in self._waiting.values() if not waiting.ending)

    async def settle(self, report: Report, *, wait: bool = True) -> float | None:
        """Report a sample. Return the number that it trains on instead of its own; None if it keeps its own, or was
        only counted.

        A failed sample of a group always gets a number. It waits for its siblings at most `wait_s` and the time of one
        answer; without `wait` not at all. A scored sample waits at most `answer_s`, and not at all while the actor is
        known to be unreachable. A cancelled call still counts its report. Raises ValueError for a reward that is not
        finite, and nothing else.
        """
        if report.reward is not None and not math.isfinite(report.reward):
            raise ValueError(f"a reward must be finite, not {report.reward}")
        if report.key is None:
            return await self._ask(report)
        own = self._own(report.key, report.size)
        if own.mean is not None and report.sample not in own.rewards:
            await self._ask(report)
            return own.mean
        if own.rewards.get(report.sample) is None or not own.knows(report.sample, report.generation):
            own.take(report.sample, report.reward, report.generation)
        if report.reward is None:
            return await self._wait(report, report.key, self._wait_s if wait else 0.0)
        mean = await self._ask(report)
        if mean is not None:
            self._settled(report.key, mean)
            own.rewards.pop(report.sample, None)
        return mean

    def end_waiting(self, key: GroupKey) -> None:
        """Close a group that failed samples wait for, at the mean of its scored samples so far."""
        if key in self._waiting:
            self._end(key, self._waiting[key])

    async def aclose(self) -> None:
        """End all tasks. Waiting samples get the mean of the rewards that this process has."""
        self._closed = True
        for key in list(self._waiting):
            self._settled(key, self._known_mean(key))
        for request in self._unsent:
            request.answer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, report: Report) -> float | None:
        """The actor's answer; also None if it does not come in time."""
        if self._closed:
            return None
        request = self._enqueue(report)
        try:
            if not self._unreachable:
                await asyncio.wait({request.answer}, timeout=self._answer_s)
            return request.answer.result() if _has_result(request.answer) else None
        finally:
            request.answer.cancel()

    async def _wait(self, report: Report, key: GroupKey, wait_s: float) -> float:
        """The mean at which the group of a failed sample closes: by its last sibling, by time, or to make room."""
        if self._closed:
            return self._known_mean(key)
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting(asyncio.get_running_loop().create_future())
        waiting.samples += 1
        request = self._enqueue(report)
        try:
            self._make_room()
            await asyncio.wait({waiting.mean}, timeout=wait_s)
            if not waiting.mean.done():
                self._end(key, waiting)
            return await asyncio.shield(waiting.mean)
        finally:
            request.answer.cancel()
            waiting.samples -= 1
            if not waiting.samples:
                self._waiting.pop(key, None)
                if waiting.watch is not None:
                    waiting.watch.cancel()

    def _make_room(self) -> None:
        while self._max_waiting is not None and self.waiting > self._max_waiting:
            key, oldest = next((key, waiting) for key, waiting in self._waiting.items() if not waiting.ending)
            self._end(key, oldest)

    def _end(self, key: GroupKey, waiting: _Waiting) -> None:
        if not waiting.ending:
            waiting.ending = True
            self._spawn(self._close_early(key, waiting))

    async def _close_early(self, key: GroupKey, waiting: _Waiting) -> None:
        request = self._enqueue(Close(key))
        either: set[asyncio.Future[Any]] = {request.answer, waiting.mean}
        await asyncio.wait(either, timeout=self._answer_s, return_when=asyncio.FIRST_COMPLETED)
        request.answer.cancel()
        self._settled(key, self._known_mean(key))

    def _known_mean(self, key: GroupKey) -> float:
        return self._own(key, None).mean_so_far()

    def _settled(self, key: GroupKey, mean: float) -> None:
        """Note that the group is closed. The first mean that this process got stands."""
        own = self._own(key, None)
        if own.mean is None:
            own.mean = mean
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.mean.done():
            waiting.mean.set_result(own.mean)

    def _own(self, key: GroupKey, size: int | None) -> GroupRecord:
        own = self._recent.setdefault(key, GroupRecord(size))
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return own

    def _enqueue(self, thing: Report | Close) -> _Request:
        request = _Request(thing, asyncio.get_running_loop().create_future())
        if self._link is None and len(self._unsent) > _BATCH:
            self._drop_unwanted()
        self._unsent.append(request)
        if self._guarding is None:
            self._guarding = self._spawn(self._guard())
        if self._sending is None or self._sending.done():
            self._sending = self._spawn(self._send())
        return request

    def _drop_unwanted(self) -> None:
        """If there is no connection, drop the requests that no caller waits for. `_recent` keeps their reports."""
        self._unsent = [request for request in self._unsent if not request.answer.done()]

    async def _send(self) -> None:
        while self._unsent:
            link = await self._connected()
            batch, self._unsent = self._unsent[:_BATCH], self._unsent[_BATCH:]
            try:
                with anyio.fail_after(self._answer_s):
                    answers = await link.send([request.thing for request in batch])
            except Exception as error:
                self._unsent[:0] = batch
                self._lost(link, error)
                await asyncio.sleep(_PAUSES_S[0])
                continue
            for request, mean in zip(batch, answers.means, strict=True):
                self._take(request, mean)
            if answers.start != self._start:
                self._lost(link, None)
                await self._connected()

    def _take(self, request: _Request, mean: float | None) -> None:
        if not request.answer.done():
            request.answer.set_result(mean)
        key = request.thing.key
        if key is None or (isinstance(request.thing, Report) and request.thing.reward is not None):
            return
        if mean is not None:
            self._settled(key, mean)
        elif key in self._waiting and self._waiting[key].watch is None:
            self._waiting[key].watch = self._spawn(self._watch(key, self._waiting[key]))

    async def _guard(self) -> None:
        """Detect a lost actor at once: other processes may wait for reports that this process has sent already."""
        while True:
            link = await self._connected()
            try:
                await link.end(self._start or "")
            except Exception as error:
                self._lost(link, error)
                await asyncio.sleep(_PAUSES_S[0])
            else:
                self._lost(link, None)

    async def _watch(self, key: GroupKey, waiting: _Waiting) -> None:
        while not waiting.mean.done():
            link = await self._connected()
            try:
                mean = await link.mean(key)
            except Exception as error:
                self._lost(link, error)
                await asyncio.sleep(_PAUSES_S[0])
            else:
                self._settled(key, mean)

    async def _connected(self) -> Link:
        while self._link is None:
            if self._connecting is None or self._connecting.done():
                self._connecting = self._spawn(self._reconnect())
            await asyncio.wait({self._connecting})
        return self._link

    async def _reconnect(self) -> None:
        for number in itertools.count():
            try:
                link = await in_thread(self._connect)
                self._drop_unwanted()
                with anyio.fail_after(self._answer_s):
                    answers = await link.send(self._memories())
            except Exception as error:
                self._unreachable = True
                if number == 0:
                    _log.warning("the group barrier does not answer (%s); trying again", described_error(error))
                await asyncio.sleep(_PAUSES_S[min(number, len(_PAUSES_S) - 1)])
            else:
                self._start, self._link, self._unreachable = answers.start, link, False
                return

    def _memories(self) -> list[Memory]:
        """The records for a new actor, without the reports that are still to be sent."""
        queued = {
            (request.thing.key, request.thing.sample) for request in self._unsent if isinstance(request.thing, Report)
        }
        memories = []
        for key, own in self._recent.items():
            rewards = {sample: reward for sample, reward in own.rewards.items() if (key, sample) not in queued}
            if rewards or own.mean is not None:
                memories.append(Memory(key, own.size, rewards, own.mean))
        return memories

    def _lost(self, link: Link, error: Exception | None) -> None:
        if self._link is link:
            self._link = None
            _log.info("the group barrier is lost (%s)", "it was restarted" if error is None else described_error(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _has_result(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled()
