"""The one queue of a process: jobs that wait for a source, in order, whatever sources each of them may go to.

Jobs that may go to the same sources and have the same rank (user's priority, batch, tried before or not) share a shelf,
kept sorted by place. A source looks at the heads of the few shelves that concern it, and finds the largest job that it
could finish in a given time by bisection, so that neither a long queue nor jobs that cannot go anywhere cost anything.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator

from .jobs import Job

Rank = tuple[int, int, bool]
Item = tuple[float, int, int, Job]


class _Shelf:
    """Items in ascending order of place: the last one is served first. What was added is sorted in when asked for."""

    __slots__ = ("_added", "_items", "eligible", "live", "rank")

    def __init__(self, eligible: frozenset[str], rank: Rank) -> None:
        self.eligible = eligible
        self.rank = rank
        self.live = 0
        self._items: list[Item] = []
        self._added: list[Item] = []

    def add(self, item: Item) -> None:
        self._added.append(item)
        self.live += 1

    def head(self) -> Job | None:
        items = self._sorted()
        while items and items[-1][3].entry != items[-1][2]:
            items.pop()
        return items[-1][3] if items else None

    def largest_within(self, place: float) -> Job | None:
        """The first job whose place is at most `place`."""
        items = self._sorted()
        for index in range(bisect.bisect_right(items, (place, math.inf)) - 1, -1, -1):
            if items[index][3].entry == items[index][2]:
                return items[index][3]
        return None

    def tail(self) -> Job | None:
        """The last job."""
        return next((item[3] for item in self._sorted() if item[3].entry == item[2]), None)

    def jobs(self) -> Iterator[Job]:
        """Every job, the first one first."""
        return (item[3] for item in reversed(self._sorted()) if item[3].entry == item[2])

    def _sorted(self) -> list[Item]:
        items, added = self._items, self._added
        if added:
            if len(added) == 1:
                bisect.insort(items, added[0])
            else:
                items += added
                items.sort()
            added.clear()
        if len(items) > 64 and len(items) > 2 * self.live:
            items[:] = [item for item in items if item[3].entry == item[2]]
        return items


class ReadyQueue:
    """Jobs that wait for a source.

    Order: rank, then place (`Job.place`, higher first), then the order of submission.
    """

    def __init__(self) -> None:
        self._shelves: dict[tuple[Rank, frozenset[str]], _Shelf] = {}
        self._ranked: list[_Shelf] = []
        self._of: dict[int, _Shelf] = {}
        self._entries = itertools.count(1)
        self.total_size = 0
        """Sum of the sizes of the queued jobs, in bytes."""

    def __len__(self) -> int:
        return len(self._of)

    def push(self, job: Job, eligible: frozenset[str]) -> None:
        """Queue `job` for the sources of `eligible`; an entry it had before no longer counts."""
        self.discard(job)
        key = (job.rank, eligible)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(eligible, job.rank)
            bisect.insort(self._ranked, shelf, key=lambda shelf: shelf.rank)
        job.entry = next(self._entries)
        self._of[job.entry] = shelf
        self.total_size += job.size
        shelf.add((job.place, -job.sequence, job.entry, job))

    def discard(self, job: Job) -> None:
        """Take `job` out of the queue, if it is in."""
        shelf = self._of.pop(job.entry, None)
        if shelf is None:
            return
        job.entry = 0
        self.total_size -= job.size
        shelf.live -= 1
        if not shelf.live:
            del self._shelves[shelf.rank, shelf.eligible]
            self._ranked.remove(shelf)

    def first(self, source: str) -> Job | None:
        """The first job that `source` may serve, left in the queue."""
        best: _Shelf | None = None
        best_job: Job | None = None
        for shelf in self._ranked:
            if best is not None and shelf.rank > best.rank:
                break
            if source in shelf.eligible:
                job = shelf.head()
                if job is not None and (best_job is None or _before(job, best_job)):
                    best, best_job = shelf, job
        return best_job

    def largest_within(self, source: str, place: float) -> Job | None:
        """The first job that `source` may serve among those whose place is at most `place`, rank by rank."""
        best: Job | None = None
        for shelf in self._ranked:
            if best is not None and shelf.rank > best.rank:
                break
            if source in shelf.eligible:
                job = shelf.largest_within(place)
                if job is not None and (best is None or _before(job, best)):
                    best = job
        return best

    def smallest(self, source: str) -> Job | None:
        """The last job by place that `source` may serve, of those that rank first."""
        best: Job | None = None
        for shelf in self._ranked:
            if best is not None and shelf.rank > best.rank:
                break
            if source in shelf.eligible:
                job = shelf.tail()
                if job is not None and (best is None or _before(best, job)):
                    best = job
        return best

    def jobs(self, source: str) -> Iterator[Job]:
        """The jobs that `source` may serve, shelf by shelf in order of rank."""
        for shelf in list(self._ranked):
            if source in shelf.eligible:
                yield from shelf.jobs()

    def eligible_sets(self) -> Iterator[tuple[frozenset[str], int]]:
        """Each set of sources that jobs wait for, with how many."""
        return ((shelf.eligible, shelf.live) for shelf in self._ranked)


def _before(job: Job, other: Job) -> bool:
    return (job.place, -job.sequence) > (other.place, -other.sequence)
