"""The queue of an event loop: all jobs that wait for a source, in order, with the sources that each may go to.

Jobs with the same sources and the same rank (`Rank`) share a shelf, sorted by precedence. A source looks at the heads
of the few shelves that it may serve, and finds the largest job that it could finish in a given time by bisection. So
neither a long queue nor jobs for other sources slow it down.

The order by rank and precedence makes batches end early but ignores deadlines. So each shelf also sorts its jobs by
deadline. Where time is short (`ReadyQueue.by_deadline`), the earliest deadline goes first (EDF).

A call that is already under way is not sent again: equal calls wait for it outside of the queue (`EqualCalls`), and all
of their callers get the answer. The samples of a group often have equal responses: at temperature 0, or once the policy
has collapsed.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence

from .jobs import Job, Rank

Item = tuple[float, int, int, Job]
"""A job with what it is sorted by, and the number of its entry, which it has no more once it was discarded."""
_LEAST_COMPACTED = 64


class Shelf:
    """Jobs of one rank that may go to the same sources. Its items are in ascending order of precedence: the last one is
    served first.
    """

    __slots__ = ("_came", "_due", "_items", "coming", "eligible", "live", "rank")

    def __init__(self, eligible: frozenset[str], rank: Rank) -> None:
        self.eligible = eligible
        self.rank = rank
        self.live = 0
        """Number of its jobs."""
        self._items: list[Item] = []
        self._due: list[Item] = []
        self._came: list[Item] = []
        self.coming = rank.single
        """Whether single jobs are still being submitted, so that the first one submitted goes first."""

    def add(self, job: Job) -> None:
        heapq.heappush(self._due, (job.deadline_at, job.tie_break, job.entry, job))
        bisect.insort(self._items, (job.precedence, -job.sequence, job.entry, job))
        if self.rank.single:
            heapq.heappush(self._came, (job.sequence, 0, job.entry, job))
        self.live += 1

    def take(self) -> None:
        """Note that a job of this shelf was discarded: its entry no longer counts."""
        self.live -= 1
        for heap in (self._due, self._came):
            if len(heap) > 2 * self.live:
                heap[:] = [item for item in heap if item[3].entry == item[2]]
                heapq.heapify(heap)
        if len(self._items) > _LEAST_COMPACTED + 2 * self.live:
            # The head is not read while jobs go by submission or by deadline, as in a stream that never ends.
            self._items = [item for item in self._items if item[3].entry == item[2]]

    def first(self, *, by_deadline: bool) -> Job | None:
        """The job that is served first."""
        return self.first_due() if by_deadline else self.first_come() if self.coming else self.head()

    def first_due(self) -> Job | None:
        """The job with the earliest deadline."""
        return _first_of(self._due)

    @property
    def due_at(self) -> float:
        """The earliest deadline of its jobs; infinity without any, and for jobs that go last."""
        job = None if self.rank.last else self.first_due()
        return math.inf if job is None else job.deadline_at

    def first_come(self) -> Job | None:
        """The single job that was submitted first."""
        return _first_of(self._came)

    def head(self) -> Job | None:
        items = self._items
        while items and items[-1][3].entry != items[-1][2]:
            items.pop()
        return items[-1][3] if items else None

    def largest_within(self, precedence: float) -> Job | None:
        """The job with the highest precedence of at most `precedence`."""
        items = self._items
        for index in range(bisect.bisect_right(items, (precedence, math.inf)) - 1, -1, -1):
            if items[index][3].entry == items[index][2]:
                return items[index][3]
        return None

    def tail(self) -> Job | None:
        """The job that is served last."""
        return next((item[3] for item in self._items if item[3].entry == item[2]), None)

    def jobs(self) -> Iterator[Job]:
        """Every job, in the order in which they are served."""
        return (item[3] for item in reversed(self._items) if item[3].entry == item[2])


def _first_of(heap: list[Item]) -> Job | None:
    """The first job of a heap that is still queued by its item; the items before it are removed."""
    while heap and heap[0][3].entry != heap[0][2]:
        heapq.heappop(heap)
    return heap[0][3] if heap else None


class ReadyQueue:
    """Jobs that wait for a source.

    Order: rank, then precedence (`Job.precedence`, higher first), then submission. Single jobs go in order of
    submission while more of them are being submitted. For a source and priority in `by_deadline`, jobs go by deadline,
    whatever batch they belong to; `Job.tie_break` decides between equal deadlines.
    """

    def __init__(self) -> None:
        self._shelves: dict[tuple[Rank, frozenset[str]], Shelf] = {}
        self._ranked: list[Shelf] = []
        self._of: dict[int, Shelf] = {}
        self._entries = itertools.count(1)
        self._total_size = 0
        self.by_deadline: frozenset[tuple[str, int]] = frozenset()
        """Pairs of a source and a `Rank.priority` for whose jobs time is short."""

    def __len__(self) -> int:
        return len(self._of)

    @property
    def mean_size(self) -> float:
        """Mean size of the queued jobs, in bytes; 0 without any."""
        return self._total_size / max(1, len(self))

    def push(self, job: Job, eligible: frozenset[str]) -> None:
        """Queue `job`, which is not in the queue, for the sources of `eligible`."""
        rank = job.rank
        shelf = self._shelves.get((rank, eligible))
        if shelf is None:
            shelf = self._shelves[rank, eligible] = Shelf(eligible, rank)
            bisect.insort(self._ranked, shelf, key=lambda shelf: shelf.rank)
        job.entry = next(self._entries)
        self._of[job.entry] = shelf
        self._total_size += job.size
        shelf.add(job)

    def discard(self, job: Job) -> None:
        """Take `job` out of the queue, if it is in."""
        shelf = self._of.pop(job.entry, None)
        if shelf is None:
            return
        job.entry = 0
        self._total_size -= job.size
        shelf.take()
        if not shelf.live:
            del self._shelves[shelf.rank, shelf.eligible]
            self._ranked.remove(shelf)

    def demote(self, job: Job) -> None:
        """Move a queued job that cannot meet its deadline behind all others."""
        eligible = self._of[job.entry].eligible
        self.discard(job)
        job.go_last(harmless=True)
        self.push(job, eligible)

    def count(self, source: str) -> int:
        """Number of jobs that `source` may serve."""
        return sum(shelf.live for shelf in self._ranked if source in shelf.eligible)

    def first(self, source: str) -> Job | None:
        """The first job that `source` may serve, left in the queue."""
        best: Job | None = None
        for shelf in self._ranked:
            by_deadline = (source, shelf.rank.priority) in self.by_deadline
            if best is not None and (shelf.rank[:2] > best.rank[:2] if by_deadline else shelf.rank > best.rank):
                break
            if source in shelf.eligible:
                job = shelf.first(by_deadline=by_deadline)
                if job is not None and (best is None or self.order(job, source) < self.order(best, source)):
                    best = job
        return best

    def order(self, job: Job, source: str) -> tuple[float, ...]:
        """The sort key of a queued job for `source`: the lowest goes first."""
        rank = job.rank
        if (source, rank.priority) in self.by_deadline:
            return (*rank[:2], job.deadline_at, job.tie_break)
        if rank.single and self._of[job.entry].coming:
            return (*rank, job.sequence)
        return (*rank, -job.precedence, job.sequence)

    def look(self, now: float) -> None:
        """Update which shelves are still getting single jobs."""
        for shelf in self._ranked:
            if shelf.rank.single:
                job = shelf.first_come()
                shelf.coming = job is not None and not job.batch.quiet(now)

    def largest_within(self, source: str, precedence: float) -> Job | None:
        """The first job that `source` may serve among those of at most `precedence`, rank by rank."""
        found = self._of_first_rank(source, lambda shelf: shelf.largest_within(precedence))
        return max(found, key=_by_precedence, default=None)

    def smallest(self, source: str) -> Job | None:
        """The last job by precedence that `source` may serve, of those that rank first."""
        return min(self._of_first_rank(source, Shelf.tail), key=_by_precedence, default=None)

    def _of_first_rank(self, source: str, find: Callable[[Shelf], Job | None]) -> list[Job]:
        """The jobs that `find` finds on the shelves of `source`, of the first rank where it finds any."""
        found: list[Job] = []
        for shelf in self._ranked:
            if found and shelf.rank > found[0].rank:
                break
            if source in shelf.eligible and (job := find(shelf)) is not None:
                found.append(job)
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

    @property
    def shelves(self) -> Sequence[Shelf]:
        """The queued jobs, by rank and by the sources that they may go to."""
        return self._ranked


def _by_precedence(job: Job) -> tuple[float, int]:
    return job.precedence, -job.sequence


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


def _question(job: Job) -> Hashable | None:
    """What `job` asks, and how the reply is read; None if that is not compared."""
    call, texts = job.call, [message["content"] for message in job.request.messages]
    if not (call.identity and texts) or call.on_text is not None or call.once:
        return None
    return (call.read, call.identity, call.sources, *texts) if all(isinstance(text, str) for text in texts) else None
