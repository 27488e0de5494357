"""The keeper: the books of every limit that the workers of a job share, as a machine without clock, network or loop.

A worker's report is held until there is something to say to it: more of a limit, less of it because others wait, news
of a source, or that it is time to ask again. So whoever has nothing to say still hears at once, and nobody has to ask
twice. What is said is an answer to the latest report only, and the worker heeds no other.

A worker that falls silent is taken to have stopped by itself: its share was valid for `ttl_s` from when it sent the
report that was answered last, and here that long, and a margin, from when it came, which is later. What it may have
spent by then stays spent. A keeper that is not the job's first knows nothing of what was spent, so it takes all of
every limit as spent until nobody can have spent anything without having told it (two times `ttl_s`, see member.py) and
a window has passed since, less what the workers say they hold.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..quotas import Resource
from .messages import Answer, Grant, Report, SourceAnswer, SourceNews, SourceReport
from .pool import Line, Pool

TTL_S = 10.0
"""Seconds for which a share is valid without another word."""
HOLD_S = 3.0
"""Seconds after which a report is answered whatever there is to say."""
MARGIN_S = 1.0
"""Seconds by which a silent worker is expected to have stopped before its share is given away."""
RECALL_EVERY_S = 0.1
"""Seconds between two looks at who holds too much; with many workers, so much more for each `MANY` of them."""
MANY = 256
BACK_WITHIN_S = 0.5
"""Seconds within which who was answered is expected to report again."""
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
        self.line: dict[str, None] = {}
        """Workers that can do nothing for want of some limit; who came first is the first."""

    def has_news(self, now: float) -> bool:
        """Whether there is something that all should know."""
        return max(self.pause_until, self.rest_until) > now or now - self.recovered_at < HOLD_S

    def report(self, worker: str, now: float) -> None:
        """Let a worker that reported stand in line if it has to."""
        if any(pool.lacks(worker, now) for pool in self.pools.values()):
            self.line.setdefault(worker)
        else:
            self.line.pop(worker, None)

    def raised(self, worker: str, now: float) -> None:
        """Let a worker go whose share was raised, if it has all that it needs: its turn begins, with all of it."""
        if worker in self.line and not any(pool.lacks(worker, now) for pool in self.pools.values()):
            del self.line[worker]
            for pool in self.pools.values():
                pool.begin_turn(worker, now)


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
        self._recalled: dict[str, dict[str, dict[Resource, Grant]]] = {}
        self._to_answer: dict[str, None] = {}
        self._superseded: list[Due] = []
        self._news = 0  # counts what all should know
        self._told: dict[str, tuple[int, int]] = {}  # with the answer to which report, how much of it
        self._expected: dict[str, float] = {}  # since when; whoever was answered first is the first

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
        self._expected.pop(worker, None)
        self._heard_at[worker] = now
        self._sources_of[worker] = tuple(report.sources)
        told, news = self._told.get(worker, (0, 0))
        # If it asked again before it heard the last answer, it did not hear it.
        behind = told > report.heeded or news < self._news
        for key, said in report.sources.items():
            self._take_in(worker, key, said, now)
            if behind and self._sources[key].has_news(now):
                self._to_answer[worker] = None
        if not behind:
            self._told[worker] = told, self._news  # what is new since is its own
        if report.leaves:
            del self._heard_at[worker]
            self._forget(worker, now, silent=False)
            self._superseded.append(Due(worker, number, None))
            return
        self._parked[worker] = (number, now)

    def due(self, now: float) -> list[Due]:
        """The answers that are due now."""
        self._expire(now)
        for key, shared in self._sources.items():
            line = Line(shared.line, self._parked, self._expected)
            for pool in shared.pools.values():
                for worker in pool.raise_shares(now, line):
                    self._to_answer[worker] = None
                    shared.raised(worker, now)
            if now - shared.recalled_at >= RECALL_EVERY_S * max(1.0, len(shared.workers) / MANY):
                shared.recalled_at = now
                self._recall(key, shared, line, now)
        for worker, (_, since) in self._parked.items():
            if now - since < HOLD_S:
                break
            self._to_answer[worker] = None
        due, self._superseded = self._superseded, []
        for worker in self._to_answer:
            if worker in self._parked:
                number, _ = self._parked.pop(worker)
                self._expected.pop(worker, None)
                self._expected[worker] = now
                self._told[worker] = number, self._news
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
                if pool.contended(now):
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
                    pool.hold(self._started_at + window_s + 2 * self._ttl_s + MARGIN_S)
            pool.report(worker, said.parts[resource], now, limit=limit, window_s=window_s)
            pool.welcome(worker, now)
            if pool.share(worker) > said.parts[resource].share:
                self._to_answer[worker] = None
        shared.report(worker, now)
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
            told = told or shared.rest_until > now
            shared.rest_until, shared.recovered_at = -math.inf, now
        elif news.rest_s > 0 and rest_until > shared.rest_until + RECALL_EVERY_S:
            shared.rest_until, told = rest_until, True
        shared.typical = news.typical or shared.typical
        if told:
            self._news += 1
            self._to_answer.update(dict.fromkeys(other for other in shared.workers if other != worker))

    def _recall(self, key: str, shared: _Shared, line: Line, now: float) -> None:
        for resource, pool in shared.pools.items():
            if pool.contended(now):
                for worker, grant in pool.recalls(now, line).items():
                    self._recalled.setdefault(worker, {}).setdefault(key, {})[resource] = grant
                    self._to_answer[worker] = None

    # Answers

    def _answer(self, worker: str, number: int, now: float) -> Answer:
        recalled = self._recalled.pop(worker, {})
        sources = {}
        for key in self._sources_of[worker]:
            shared = self._sources[key]
            grants: dict[Resource, Grant] = {
                resource: recalled.get(key, {}).get(resource) or pool.grant(worker, now)
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
        while self._expected:
            worker, since = next(iter(self._expected.items()))
            if now - since < BACK_WITHIN_S:
                break
            del self._expected[worker]
        while self._heard_at:
            worker, heard_at = next(iter(self._heard_at.items()))
            if now - heard_at <= self._ttl_s + MARGIN_S:
                return
            del self._heard_at[worker]
            if worker in self._parked:  # the keeper itself was stopped for that long
                self._superseded.append(Due(worker, self._parked.pop(worker)[0], None))
            self._forget(worker, now, silent=True)

    def _forget(self, worker: str, now: float, *, silent: bool) -> None:
        for key in self._sources_of.pop(worker, ()):
            shared = self._sources[key]
            shared.workers.pop(worker, None)
            shared.line.pop(worker, None)
            for pool in shared.pools.values():
                pool.drop(worker, now, silent=silent)
        self._recalled.pop(worker, None)
        self._told.pop(worker, None)
        self._to_answer.pop(worker, None)
        self._expected.pop(worker, None)
