"""Forecasts when everything that is queued will be done.

The planner uses a slow source for a job only if the job then ends before everything else, and hedges an attempt that
would end after everything else. A rough forecast is enough for both: the number of requests of average size that all
sources together finish by a time, by their windows, their concurrency and their speed. It is never earlier than the
end of the longest single job; otherwise small batches would go to fast sources only.

The forecast also tells which jobs are under deadline pressure: those of a priority that may not all end before the
earliest of their deadlines. And it tells how many jobs of a batch go in one window, which decides their order
(`windows_order`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from .attempts import Attempt
from .jobs import Job
from .queue import ReadyQueue, Shelf
from .upstream import Upstream, Upstreams

FIRST_GUESS_S = 3.0
"""Latency to expect where no source has answered anything yet."""
OPEN_WAIT_S = 5.0
"""Wait, in seconds, to expect of a source with an open circuit."""
CHEAP_PART = 0.5
"""Part of the time to the deadline that cheap sources may need; if they need more, the next expensive one is used."""
DEADLINE_MARGIN = 1.2
"""Safety factor on the time that all jobs of a priority will take, compared with the earliest of their deadlines."""
MOST_SHORT = 0.9
"""Largest share of a batch that counts as short jobs."""
SLOW = 2.0
"""A source is slow, for the order of a batch, if it takes more than this multiple of the fastest one's latency."""
SLOW_SHARE = 0.1
"""Largest share of the requests of a window that slow sources may have, for an order by windows."""
OVERDECLARED = 1.25
"""Largest factor by which the declared requests of a window may exceed those that tokens and concurrency leave
possible, for an order by windows: otherwise these set the pace, and not the windows."""
_LONG_QUEUE = 400
"""Number of queued jobs from which the ends of attempts under way are not looked at, because others end later."""
_HALF_DONE = 0.5
"""Part of an attempt under way that is taken to be still ahead."""
_FIRST_END_S = 20.0
"""First end that is tried, in seconds from now; it doubles until all is done by then."""
_CHANGED = 0.02
"""Share of the queued jobs by which their number has to change before a forecast is made again."""
_LOOKED_AT = 8
"""Attempts of a source whose remaining time is averaged for its wait."""
_STEPS = 14
"""Steps of the bisection that finds an end."""
_FRESH_S = 0.25
"""Seconds for which a forecast is used again."""
_FRESH_SHORT_S = 0.05
"""The same while fewer than `_SHORT_QUEUE` jobs are queued."""
_SHORT_QUEUE = 64
_HORIZON_S = 5000.0
"""Ends later than this, in seconds from now, are not told apart."""


class Forecast:
    """Expected latencies and ends for all upstreams of one event loop. Times are seconds of its clock."""

    def __init__(self, upstreams: Upstreams, queue: ReadyQueue) -> None:
        self._upstreams = upstreams
        self._queue = queue
        self.prefer_cost = False
        """Whether expensive upstreams are used only if the deadlines require it."""
        self._unneeded: set[str] = set()
        self.tail = upstreams.tail
        self._ends: dict[str, float] = {}
        self._made_at = -math.inf
        self._made_for = -1
        self._under_pressure: frozenset[tuple[str, int]] = frozenset()
        self._pressure_at = -math.inf
        self._pressure_for = -1

    def change(self, *, prefer_cost: bool) -> None:
        """Forecast anew, because upstreams or settings have changed."""
        self.prefer_cost = prefer_cost
        self._made_at = self._pressure_at = -math.inf

    def expected_s(self, upstream: Upstream, size: float) -> float:
        """Latency to expect of a request of `size` bytes; for a source that has not answered yet, the mean of the
        others. Functions say nothing of services, nor services of functions.
        """
        expected_s = upstream.speed.expected_s(size)
        if expected_s:
            return expected_s
        known = [other.speed.expected_s(size) for other in self._known_like(upstream)]
        return sum(known) / len(known) if known else FIRST_GUESS_S

    def guesses(self, upstream: Upstream) -> bool:
        """Whether the expected latency of a source is a guess, because neither it nor another like it has answered."""
        return not (upstream.speed.known or any(True for _ in self._known_like(upstream)))

    def _known_like(self, upstream: Upstream) -> Iterator[Upstream]:
        for other in self._upstreams.values():
            if other.local is upstream.local and other.speed.known:
                yield other

    def wait_s(self, upstream: Upstream, job: Job, now: float) -> float:
        """Seconds that `job` would have to wait for `upstream`; an estimate if that depends on other attempts."""
        if upstream.health.unusable:
            return math.inf
        wait = upstream.wait_for_s(job, now)
        if wait < math.inf:
            return max(0.0, wait)
        if not upstream.breaker.closed:
            return OPEN_WAIT_S
        left_s = [self.left_s(attempt, now) for attempt in itertools.islice(upstream.live, _LOOKED_AT)]
        mean_left_s = sum(left_s) / len(left_s) if left_s else FIRST_GUESS_S
        return mean_left_s / max(1, upstream.quota.in_flight)

    def left_s(self, attempt: Attempt, now: float) -> float:
        """Seconds that `attempt` will still take, by its age."""
        return attempt.expected_s * self.tail.residual(attempt.age(now))

    def end(self, upstream: Upstream, now: float) -> float:
        """When everything that is queued for `upstream`, and for the upstreams that share its work, will be done."""
        self._refresh(now)
        return self._ends.get(upstream.name, now)

    def unneeded(self, upstream: Upstream, now: float) -> bool:
        """Whether nothing need be sent to `upstream`, because cheaper sources end everything early enough."""
        if not self.prefer_cost:
            return False
        self._refresh(now)
        return upstream.name in self._unneeded

    def attempt_ended(self) -> None:
        """Note that an attempt has ended, and check again which sources are unneeded: its job may need another one, and
        nothing else may trigger that check for long.
        """
        if self.prefer_cost:
            self._made_at = -math.inf

    def under_pressure(self, now: float) -> frozenset[tuple[str, int]]:
        """Pairs of a source and a `Rank.priority` under deadline pressure: their waiting jobs may not all end before
        the earliest of their deadlines.
        """
        queued = len(self._queue)
        grown = queued > self._pressure_for + max(1, _CHANGED * self._pressure_for)
        if now - self._pressure_at >= _FRESH_S or grown:
            self._pressure_at, self._pressure_for = now, queued
            self._under_pressure = frozenset(self._short_of_time(now)) if queued > 1 else frozenset()
        return self._under_pressure

    def per_window(self, jobs: Sequence[Job]) -> float | None:
        """How many of `jobs` all of their sources together can send in one window. None if the jobs have different
        sources, or the sources have different windows or are not limited by them.
        """
        first = jobs[0].call.sources
        names = set(first)
        if len(jobs) < 2 or any(job.call.sources != first and set(job.call.sources) != names for job in jobs):
            return None
        upstreams = [self._upstreams[name] for name in sorted(names) if self._upstreams[name].up]
        if not upstreams:
            return None
        mean_size = sum(job.size for job in jobs) / len(jobs)
        calls = [upstream.calls_per_request(len(jobs), mean_size) for upstream in upstreams]
        each_s = [self.expected_s(upstream, many * mean_size) for upstream, many in zip(upstreams, calls, strict=True)]
        declared, possible, slow = 0.0, 0.0, 0.0
        for upstream, takes_s, many in zip(upstreams, each_s, calls, strict=True):
            requests, window_s = upstream.quota.per_window()
            requests *= many
            if math.isinf(requests) or window_s != upstreams[0].quota.per_window()[1]:
                return None
            tokens = upstream.tokens_of(mean_size)
            declared += requests
            possible += min(
                requests,
                upstream.quota.tokens_per_window() / tokens if tokens else math.inf,
                many * upstream.quota.concurrency * window_s / takes_s,
            )
            slow += requests if takes_s > SLOW * min(each_s) else 0.0
        if slow > SLOW_SHARE * declared or declared > OVERDECLARED * possible:
            return None
        return possible

    def _short_of_time(self, now: float) -> Iterator[tuple[str, int]]:
        for names, upstreams in self._groups():
            waiting = 0
            for priority, same in itertools.groupby(self._queue.shelves, key=lambda shelf: shelf.rank.priority):
                mine = [shelf for shelf in same if not names.isdisjoint(shelf.eligible)]
                waiting += sum(shelf.live for shelf in mine)
                due_at = min((shelf.due_at for shelf in mine), default=math.inf)
                if due_at < math.inf:
                    end = self._end_of(upstreams, waiting, now)
                    if now + DEADLINE_MARGIN * (end - now) > due_at:
                        yield from ((name, priority) for name in names)

    def _refresh(self, now: float) -> None:
        queued = len(self._queue)
        fresh_s = _FRESH_SHORT_S if queued < _SHORT_QUEUE else _FRESH_S
        if now - self._made_at >= fresh_s or abs(queued - self._made_for) > max(1, _CHANGED * queued):
            self._made_at, self._made_for = now, queued
            self._unneeded.clear()
            self._ends = {name: end for names, end in self._forecasts(now) for name in names}

    def _forecasts(self, now: float) -> Iterable[tuple[set[str], float]]:
        """Each set of upstreams that share work, directly or through others, with the end of what waits for them."""
        for names, upstreams in self._groups():
            mine = [shelf for shelf in self._queue.shelves if not names.isdisjoint(shelf.eligible)]
            waiting = sum(shelf.live for shelf in mine)
            if self.prefer_cost:
                needed = self._needed(upstreams, mine, waiting, now)
                self._unneeded.update(upstream.name for upstream in upstreams if upstream not in needed)
                upstreams = needed
            yield names, self._end_of(upstreams, waiting, now)

    def _groups(self) -> Iterator[tuple[set[str], list[Upstream]]]:
        """Groups of sources that share work, directly or through others, each with its upstreams that are up."""
        groups: list[set[str]] = []
        for eligible in dict.fromkeys(shelf.eligible for shelf in self._queue.shelves):
            names, apart = set(eligible), []
            for group in groups:
                if group.isdisjoint(names):
                    apart.append(group)
                else:
                    names |= group
            groups = [*apart, names]
        for names in groups:
            yield names, [upstream for name, upstream in self._upstreams.items() if name in names and upstream.up]

    def _needed(self, upstreams: list[Upstream], shelves: list[Shelf], waiting: int, now: float) -> list[Upstream]:
        """The cheapest of `upstreams` that keep the deadlines of what waits: for each set of sources that jobs may go
        to, the cheapest that together end everything in time.
        """
        needed: set[Upstream] = set()
        for eligible in {shelf.eligible for shelf in shelves}:
            able = [upstream for upstream in upstreams if upstream.name in eligible]
            needed.update(self._cheapest(able, waiting, now))
        return [upstream for upstream in upstreams if upstream in needed]

    def _cheapest(self, upstreams: list[Upstream], waiting: int, now: float) -> list[Upstream]:
        """The cheapest of `upstreams` that together end what waits in `CHEAP_PART` of the time to its deadlines."""
        heads = [head for upstream in upstreams if (head := self._queue.first(upstream.name)) is not None]
        if not heads:
            return upstreams
        request = heads[0].request
        by_cost = sorted(upstreams, key=lambda upstream: upstream.expected_cost(request))
        due_at = now + CHEAP_PART * (min(head.deadline_at for head in heads) - now)
        for count in range(1, len(by_cost)):
            if self._end_of(by_cost[:count], waiting, now) <= due_at:
                return by_cost[:count]
        return upstreams

    def _end_of(self, upstreams: list[Upstream], waiting: int, now: float) -> float:
        """When `upstreams` will have done `waiting` requests of mean size, and the largest single one."""
        if not upstreams:
            return now
        earliest, mean_size = now, self._queue.mean_size
        calls = [upstream.calls_per_request(waiting, mean_size) for upstream in upstreams]
        each_s = [self.expected_s(upstream, many * mean_size) for upstream, many in zip(upstreams, calls, strict=True)]
        if waiting < _LONG_QUEUE:
            ends = (attempt.started_at + attempt.expected_s for upstream in upstreams for attempt in upstream.live)
            earliest = max((end for end in ends if now < end < math.inf), default=now)
        largest = self._largest(upstreams)
        if largest is not None:
            each_takes_s = (
                self.wait_s(upstream, largest, now) + self.expected_s(upstream, largest.size) for upstream in upstreams
            )
            earliest = max(earliest, now + min(each_takes_s))
        tokens = [many * upstream.tokens_of(mean_size) for upstream, many in zip(upstreams, calls, strict=True)]

        def done_by(end: float) -> float:
            done = 0.0
            for upstream, takes_s, each, many in zip(upstreams, each_s, tokens, calls, strict=True):
                by_work = upstream.quota.concurrency * (end - now) / takes_s - _HALF_DONE * upstream.quota.in_flight
                last_start = end - takes_s
                by_quota = upstream.quota.capacity(last_start, each, now) if last_start >= now else 0.0
                done += many * max(0.0, min(by_work, by_quota))
            return done

        low, high = now, now + _FIRST_END_S
        while done_by(high) < waiting and high < now + _HORIZON_S:
            low, high = high, now + 2 * (high - now)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if done_by(middle) >= waiting:
                high = middle
            else:
                low = middle
        return max(high, earliest)

    def _largest(self, upstreams: list[Upstream]) -> Job | None:
        found = [self._queue.largest_within(upstream.name, math.inf) for upstream in upstreams]
        return max((job for job in found if job is not None), key=lambda job: job.size, default=None)


def windows_order(jobs: Sequence[Job], per_window: float) -> list[Job] | None:
    """The best order for `jobs` if `per_window` of them can go in a window; None if that is longest first.

    A slot of a sliding window that is used s seconds into one window is free again s seconds into the next. If a batch
    overflows its last full window by a few jobs, these can start when the first slots of that window are free again.
    That is early if the first jobs of every window are short. So each window begins with as many short jobs as overflow
    at the end, and continues with the longest that are left. The shortest of all come last. Within each part the
    longest goes first. If one window suffices, or speeds differ, longest first is better.
    """
    count = len(jobs)
    windows = math.floor((count - 1) / per_window) if per_window > 0 else 0
    if windows < 1:
        return None
    overflow = min(math.floor(count - windows * per_window) + 1, int(MOST_SHORT * count / (windows + 1)))
    if overflow < 1:
        return None
    ascending = sorted(jobs, key=lambda job: (job.size, -job.sequence))
    short, long = ascending[: overflow * (windows + 1)], ascending[overflow * (windows + 1) :]
    chunk = len(long) // windows + 1
    order: list[Job] = []
    for window in range(windows):
        end = len(short) - window * overflow
        order += reversed(short[end - overflow : end])
        end = len(long) - window * chunk
        order += reversed(long[max(0, end - chunk) : max(0, end)])
    order += reversed(short[:overflow])
    return order
