"""The queue of an event loop: all jobs that wait for a source, in order, with the sources that each may go to.

Jobs with the same sources and the same rank (`Rank`) share a shelf, sorted by precedence. A source looks at the heads
of the few shelves that it may serve, and finds the largest job that it could finish in a given time by bisection. So
neither a long queue nor jobs for other sources slow it down. Where precedence does not count, a shelf goes by turn.

A call that is already under way is not sent again: equal calls wait for it outside of the queue (`EqualCalls`), and all
of their callers get the answer. The samples of a group often have equal responses: at temperature 0, or once the policy
has collapsed.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

from .calls import Answer
from .jobs import Job, Rank

Item = tuple[float, int, int, Job]
_NO_ITEM = (0.0, 0, 0, None)
_LEAST_COMPACTED = 64


class Shelf:
    """Jobs with the same sources and rank. They go by `Job.precedence`, or by `Job.turn`."""

    __slots__ = ("_by_turn", "_items", "eligible", "live", "rank")

    def __init__(self, eligible: frozenset[str], rank: Rank, *, by_precedence: bool) -> None:
        self.eligible = eligible
        self.rank = rank
        self.live = 0
        # Items in ascending order: the last one is served first.
        self._items: list[Item] = []
        self._by_turn: list[Item] | None = None if by_precedence else []

    def add(self, job: Job) -> None:
        """Put a job in that is queued."""
        bisect.insort(self._items, (job.precedence, -job.sequence, job.entry, job))
        if self._by_turn is not None:
            bisect.insort(self._by_turn, (-job.turn, 0, job.entry, job))
        self.live += 1

    def take(self) -> None:
        """Note that a job of this shelf was discarded: its entry no longer counts."""
        self.live -= 1
        for items in (self._items, self._by_turn or []):
            if len(items) > _LEAST_COMPACTED + 2 * self.live:
                items[:] = [item for item in items if item[3].entry == item[2]]

    def order(self, *, by_precedence: bool) -> None:
        """Let the jobs go by precedence, or by turn, from now on."""
        if by_precedence:
            self._by_turn = None
        elif self._by_turn is None:
            self._by_turn = sorted((-job.turn, 0, job.entry, job) for job in self.jobs())

    def head(self) -> Item | None:
        """The job that is served first."""
        items = self._items if self._by_turn is None else self._by_turn
        while items and items[-1][3].entry != items[-1][2]:
            items.pop()
        return items[-1] if items else None

    def largest_within(self, precedence: float) -> Item | None:
        """The job with the highest precedence of at most `precedence`."""
        items = self._items
        for index in range(bisect.bisect_right(items, (precedence, math.inf)) - 1, -1, -1):
            if items[index][3].entry == items[index][2]:
                return items[index]
        return None

    def tail(self) -> Item | None:
        """The job with the lowest precedence."""
        return next((item for item in self._items if item[3].entry == item[2]), None)

    def jobs(self) -> Iterator[Job]:
        """Every job, in order of precedence."""
        return (item[3] for item in reversed(self._items) if item[3].entry == item[2])


class ReadyQueue:
    """Jobs that wait for a source.

    Order: rank, then precedence (`Job.precedence`, higher first), then submission. On a shelf that goes by turn: rank,
    then `Job.turn` (lower first).
    """

    def __init__(self) -> None:
        self._shelves: dict[tuple[Rank, frozenset[str]], Shelf] = {}
        self._ranked: list[Shelf] = []
        self._of: dict[int, Shelf] = {}
        self._entries = itertools.count(1)
        self.total_size = 0
        """Sum of the sizes of the queued jobs, in bytes."""

    def __len__(self) -> int:
        return len(self._of)

    def push(self, job: Job, eligible: frozenset[str]) -> None:
        """Queue `job` for the sources of `eligible`; an entry it had before no longer counts."""
        if job.entry:
            self.discard(job)
        rank = job.rank
        shelf = self._shelves.get((rank, eligible))
        if shelf is None:
            shelf = self._shelves[rank, eligible] = Shelf(eligible, rank, by_precedence=job.batch.together)
            bisect.insort(self._ranked, shelf, key=lambda shelf: shelf.rank)
        job.entry = next(self._entries)
        self._of[job.entry] = shelf
        self.total_size += job.size
        shelf.add(job)

    def discard(self, job: Job) -> None:
        """Take `job` out of the queue, if it is in."""
        shelf = self._of.pop(job.entry, None)
        if shelf is None:
            return
        job.entry = 0
        self.total_size -= job.size
        shelf.take()
        if not shelf.live:
            del self._shelves[shelf.rank, shelf.eligible]
            self._ranked.remove(shelf)

    def count(self, source: str) -> int:
        """Number of jobs that `source` may serve."""
        return sum(shelf.live for shelf in self._ranked if source in shelf.eligible)

    def first(self, source: str) -> Job | None:
        """The first job that `source` may serve, left in the queue."""
        return max(self._of_first_rank(source, Shelf.head), default=_NO_ITEM)[3]

    def largest_within(self, source: str, precedence: float) -> Job | None:
        """The first job that `source` may serve among those of at most `precedence`, rank by rank."""
        found = self._of_first_rank(source, lambda shelf: shelf.largest_within(precedence))
        return max(found, default=_NO_ITEM)[3]

    def smallest(self, source: str) -> Job | None:
        """The last job by precedence that `source` may serve, of those that rank first."""
        return min(self._of_first_rank(source, Shelf.tail), default=_NO_ITEM)[3]

    def _of_first_rank(self, source: str, find: Callable[[Shelf], Item | None]) -> list[Item]:
        """What `find` returns for the shelves that `source` may serve, of the first rank where it returns anything."""
        found: list[Item] = []
        rank = None
        for shelf in self._ranked:
            if found and shelf.rank != rank:
                break
            if source in shelf.eligible and (item := find(shelf)) is not None:
                found.append(item)
                rank = shelf.rank
        return found

    def higher_waits(self, source: str, job: Job) -> bool:
        """Whether a job of higher priority than `job` waits for `source`. Jobs that go last do not count."""
        for shelf in self._ranked:
            if source in shelf.eligible:
                return not shelf.rank.last and shelf.rank.priority < job.rank.priority
        return False

    def jobs(self, source: str) -> Iterator[Job]:
        """The jobs that `source` may serve, shelf by shelf in order of rank."""
        for shelf in list(self._ranked):
            if source in shelf.eligible:
                yield from shelf.jobs()

    def eligible_sets(self) -> Iterator[tuple[frozenset[str], int]]:
        """Each set of sources that jobs wait for, with the number of these jobs."""
        return ((shelf.eligible, shelf.live) for shelf in self._ranked)

    def level(self, job: Job) -> list[Shelf]:
        """The jobs of the batch, priority and deadline of `job` that may go to any of its sources."""
        mine, sources = job.rank.level, job.call.sources
        return [shelf for shelf in self._ranked if shelf.rank.level == mine and not shelf.eligible.isdisjoint(sources)]


class EqualCalls:
    """The calls of an event loop that are asked, and those that wait for an equal one. None waits unless `enabled`.

    Two calls are equal if the same judge asks the same sources with the same texts and parameters. Those of one sample
    never are, because a judge that asks twice wants two answers. Images and the arguments of functions are not
    compared. A call that waits for an equal one keeps its own deadline. If the first one fails, each call
    that waits for it is asked itself.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._asked: dict[Hashable, Job] = {}
        self._waiting: dict[Job, list[Job]] = {}

    def joins(self, job: Job) -> bool:
        """Return whether `job` waits for an equal one from now on. Otherwise others may wait for it."""
        question = _question(job) if self._enabled else None
        first = None if question is None else self._asked.get(question)
        if first is None:
            if question is not None:
                self._asked[question], job.question = job, question
            return False
        urgent = job.rank.priority < first.rank.priority
        if first.member is job.member or urgent or first.request.parameters != job.request.parameters:
            return False
        self._waiting.setdefault(first, []).append(job)
        job.last_problem = "an equal call, which was asked first, has not been answered"
        return True

    def ended(self, job: Job) -> list[Job]:
        """Note that `job` has ended; return the jobs that wait for it."""
        if self._asked.get(job.question) is job:
            del self._asked[job.question]
        others = [other for other in self._waiting.pop(job, ()) if not other.ended]
        for other in others:
            other.last_problem = ""
        return others

    def forget(self) -> None:
        """Let no job wait for one that was asked before now, because the sources have changed."""
        self._asked.clear()


def answer_to(job: Job, answer: Answer[Any], now: float) -> Answer[Any]:
    """Return an answer to an equal call as that to `job`, for which nothing was spent."""
    return replace(answer, spent=job.spent(now), service_s=0.0)


def _question(job: Job) -> Hashable | None:
    """What `job` asks, and how the reply is read; None if that is not compared."""
    call, texts = job.call, [message["content"] for message in job.request.messages]
    if not (call.identity and texts) or call.on_text is not None or call.once:
        return None
    return (call.read, call.identity, call.sources, *texts) if all(isinstance(text, str) for text in texts) else None
