"""The keeper: the books of every limit that the workers of a job share, as a machine without clock, network or loop.

A worker's report is held until there is something to say to it: more of a limit, less of it because others wait, news
of a source, or that it is time to ask again. So whoever has nothing to say still hears at once, and nobody has to ask
twice. What is said is an answer to the latest report only, and the worker heeds no other.

A worker that falls silent is taken to have stopped by itself: its share was valid for `ttl_s` from when it sent the
report that was answered last, and here that long, and a margin, from when it came, which is later. What it may have
spent by then stays spent. A keeper that is not the job's first knows nothing of what was spent, so it takes all of
every limit as spent until a window has passed, less what the workers say they hold.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..quotas import Resource
from .messages import Answer, Grant, Report, SourceAnswer, SourceNews, SourceReport
from .pool import Pool

TTL_S = 10.0
"""Seconds for which a share is valid without another word."""
HOLD_S = 3.0
"""Seconds after which a report is answered whatever there is to say."""
MARGIN_S = 1.0
"""Seconds by which a silent worker is expected to have stopped before its share is given away."""
RECALL_EVERY_S = 0.1
REMEMBERED = 65_536
"""Workers whose last report is remembered, so that an older one that comes late is known to be old."""
LONGEST_NEWS_S = 60.0
"""Longest pause or rest that is passed on, in seconds: what is longer will be found out again."""


class Due(NamedTuple):
    """An answer that is due now. None: another report of the worker came, or it is not heard any more."""

    worker: str
    number: int
    answer: Answer | None


class _Shared:
    """A source: its pools, its workers and what is known of it."""

    def __init__(self) -> None:
        self.pools: dict[Resource, Pool] = {}
        self.workers: dict[str, None] = {}
        self.pause_until = -math.inf
        self.rest_until = -math.inf
        self.recovered_at = -math.inf
        self.typical: tuple[float, float] | None = None
        self.recalled_at = -math.inf


class Keeper:
    """Keeps the shares. Times are seconds of one monotonic clock, its own.

    `boot` names this keeper among those of the job. `first`: no other came before it.
    """

    def __init__(self, now: float, *, boot: str, first: bool, ttl_s: float = TTL_S) -> None:
        self.boot = boot
        self._first = first
        self._started_at = now
        self._ttl_s = ttl_s
        self._sources: dict[str, _Shared] = {}
        self._numbers: dict[str, int] = {}
        self._heard_at: dict[str, float] = {}  # the longest silent is the first
        self._sources_of: dict[str, tuple[str, ...]] = {}
        self._parked: dict[str, tuple[int, float]] = {}
        self._recalled: dict[str, dict[str, set[Resource]]] = {}
        self._to_answer: dict[str, None] = {}
        self._superseded: list[Due] = []

    @property
    def workers(self) -> int:
        """Workers that are heard of."""
        return len(self._heard_at)

    def report(self, report: Report, now: float) -> None:
        """Take in a report; its answer comes out of `due`, now or later."""
        worker, number = report.worker, report.number
        if number <= self._numbers.get(worker, -1):
            self._superseded.append(Due(worker, number, None))
            return
        self._numbers.pop(worker, None)
        self._numbers[worker] = number
        if len(self._numbers) > REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        if worker in self._parked:
            self._superseded.append(Due(worker, self._parked.pop(worker)[0], None))
        self._heard_at.pop(worker, None)
        if report.leaves:
            self._forget(worker, now, silent=False)
            self._superseded.append(Due(worker, number, None))
            return
        self._heard_at[worker] = now
        self._sources_of[worker] = tuple(report.sources)
        for key, said in report.sources.items():
            self._take_in(worker, key, said, now)
        self._parked[worker] = (number, now)

    def due(self, now: float) -> list[Due]:
        """The answers that are due now."""
        self._expire(now)
        for shared in self._sources.values():
            for resource, pool in shared.pools.items():
                for worker in pool.raise_shares(now, self._parked):
                    self._to_answer[worker] = None
                if pool.contended and now - shared.recalled_at >= RECALL_EVERY_S:
                    for worker in pool.recalls(now, self._parked):
                        self._recall(worker, shared, resource)
            if now - shared.recalled_at >= RECALL_EVERY_S:
                shared.recalled_at = now
        for worker, (_, since) in self._parked.items():
            if now - since < HOLD_S:
                break
            self._to_answer[worker] = None
        due, self._superseded = self._superseded, []
        for worker in self._to_answer:
            if worker in self._parked:
                number, _ = self._parked.pop(worker)
                due.append(Due(worker, number, self._answer(worker, number, now)))
        self._to_answer.clear()
        return due

    def wake_at(self, now: float) -> float:
        """When to ask for answers again, at the latest."""
        times = [now + HOLD_S]
        if self._parked:
            times.append(next(iter(self._parked.values()))[1] + HOLD_S)
        for shared in self._sources.values():
            for pool in shared.pools.values():
                if pool.contended:
                    times += [pool.next_change(now), now + RECALL_EVERY_S]
        return max(now, min(times))

    # A worker's report

    def _take_in(self, worker: str, key: str, said: SourceReport, now: float) -> None:
        shared = self._sources.get(key)
        if shared is None:
            shared = self._sources[key] = _Shared()
        new = worker not in shared.workers
        shared.workers[worker] = None
        for resource, (limit, window_s) in said.limits.items():
            pool = shared.pools.get(resource)
            if pool is None:
                pool = shared.pools[resource] = Pool(limit, window_s)
                if not self._first:
                    pool.haunt(self._started_at + window_s + self._ttl_s + MARGIN_S)
            pool.report(worker, said.parts[resource], now, limit=limit, window_s=window_s)
            pool.welcome(worker, now)
            if pool.grant(worker, now).share > said.parts[resource].share:
                self._to_answer[worker] = None
        self._take_in_news(worker, shared, said.news, now)
        if new:
            # It has to hear at once that it is known, whatever there is for it.
            self._to_answer[worker] = None

    def _take_in_news(self, worker: str, shared: _Shared, news: SourceNews, now: float) -> None:
        told = False
        pause_until, rest_until = now + min(news.pause_s, LONGEST_NEWS_S), now + min(news.rest_s, LONGEST_NEWS_S)
        if news.pause_s > 0 and pause_until > shared.pause_until + RECALL_EVERY_S:
            shared.pause_until, told = pause_until, True
        if news.recovered:
            told = shared.rest_until > now
            shared.rest_until, shared.recovered_at = -math.inf, now
        elif news.rest_s > 0 and rest_until > shared.rest_until + RECALL_EVERY_S:
            shared.rest_until, told = rest_until, True
        shared.typical = news.typical or shared.typical
        if told:
            self._to_answer.update(dict.fromkeys(other for other in shared.workers if other != worker))

    def _recall(self, worker: str, shared: _Shared, resource: Resource) -> None:
        key = next(key for key in self._sources_of[worker] if self._sources[key] is shared)
        self._recalled.setdefault(worker, {}).setdefault(key, set()).add(resource)
        self._to_answer[worker] = None

    # Answers

    def _answer(self, worker: str, number: int, now: float) -> Answer:
        recalled = self._recalled.pop(worker, {})
        sources = {}
        for key in self._sources_of[worker]:
            shared = self._sources[key]
            grants: dict[Resource, Grant] = {
                resource: pool.grant(worker, now, recall=resource in recalled.get(key, ()))
                for resource, pool in shared.pools.items()
                if worker in pool
            }
            news = SourceNews(
                max(0.0, shared.pause_until - now),
                max(0.0, shared.rest_until - now),
                now - shared.recovered_at < HOLD_S,
                shared.typical,
            )
            sources[key] = SourceAnswer(len(shared.workers), grants, news)
        return Answer(self.boot, number, sources)

    # Workers that are gone

    def _expire(self, now: float) -> None:
        while self._heard_at:
            worker, heard_at = next(iter(self._heard_at.items()))
            if now - heard_at <= self._ttl_s + MARGIN_S:
                return
            del self._heard_at[worker]
            self._forget(worker, now, silent=True)

    def _forget(self, worker: str, now: float, *, silent: bool) -> None:
        for key in self._sources_of.pop(worker, ()):
            shared = self._sources[key]
            shared.workers.pop(worker, None)
            for pool in shared.pools.values():
                pool.drop(worker, now, silent=silent)
        self._recalled.pop(worker, None)
