"""When everything that is queued will be done: the time against which every choice of a source is weighed.

A slow source is worth using as long as what it is given ends before the rest does, and an attempt is worth repeating
when it would end after everything else. Both need a forecast of the end, and a fluid one is enough: how many requests
of average size all sources together finish by a time, given their windows, their concurrency and their speed. It must
not be earlier than the longest single job can be, or small batches go to fast sources only.

The forecast also says for which jobs time is short: those of a priority that may not all end before the earliest of
their deadlines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from .attempts import Attempt
from .jobs import Job
from .lane import Lane
from .queue import ReadyQueue

FIRST_GUESS_S = 3.0
"""Latency to expect where no source has answered anything yet."""
DEAD_WAIT_S = 30.0
RESTING_WAIT_S = 5.0
THRIFTY_PART = 0.5
"""Part of the time to the deadline that cheap sources may take before dearer ones are asked as well."""
PRESSED = 1.2
"""Safety factor on the time that all jobs of a priority will take, compared with the earliest of their deadlines."""
_LOOKED_AT = 8
_STEPS = 14
_FRESH_S = 0.25
_FRESH_SHORT_S = 0.05
_SHORT_QUEUE = 64
_HORIZON_S = 5000.0


class Forecast:
    """Expected latencies and ends, over all lanes of one event loop. Times are seconds of its clock."""

    def __init__(self, lanes: Mapping[str, Lane], queue: ReadyQueue, *, thrifty: bool = False) -> None:
        self._lanes = lanes
        self._queue = queue
        self._thrifty = thrifty
        self._spared: set[str] = set()
        self.tail = next(iter(lanes.values())).silence.tail
        for lane in lanes.values():
            lane.silence.tail = self.tail
        self._ends: dict[str, float] = {}
        self._made_at = -math.inf
        self._made_for = -1
        self._pressed: frozenset[tuple[str, int]] = frozenset()
        self._pressed_at = -math.inf
        self._pressed_for = -1

    def expected_s(self, lane: Lane, size: float) -> float:
        """Latency to expect of a request of `size` bytes at `lane`; where it never answered, what others take."""
        if lane.speed.known:
            return lane.speed.expected_s(size)
        known = [other.speed.expected_s(size) for other in self._lanes.values() if other.speed.known]
        return sum(known) / len(known) if known else FIRST_GUESS_S

    def update(self, attempt: Attempt) -> None:
        """Correct what was expected of an attempt that started when little was known of its source."""
        if attempt.young:
            attempt.expected_s = self.expected_s(attempt.lane, attempt.job.size)

    @property
    def guesses(self) -> bool:
        """Whether no source has answered yet, so that every expected latency is a guess."""
        return not any(lane.speed.known for lane in self._lanes.values())

    def wait_s(self, lane: Lane, job: Job, now: float) -> float:
        """How long `job` would have to wait for `lane`, roughly where it depends on what ends first."""
        if lane.health.unusable:
            return math.inf
        if lane.health.looks_dead(now):
            return DEAD_WAIT_S
        wait = lane.wait_s(lane.tokens(job.request), now)
        if wait < math.inf:
            return max(0.0, wait)
        if not lane.breaker.closed:
            return RESTING_WAIT_S
        left_s = [self.left_s(attempt, now) for attempt in itertools.islice(lane.live, _LOOKED_AT)]
        mean_left_s = sum(left_s) / len(left_s) if left_s else FIRST_GUESS_S
        return mean_left_s / max(1, lane.quota.in_flight)

    def left_s(self, attempt: Attempt, now: float) -> float:
        """How much longer `attempt` will take, by its age."""
        return attempt.expected_s * self.tail.residual(attempt.age(now))

    def end(self, lane: Lane, now: float) -> float:
        """When everything will be done that is queued for `lane` and for the lanes that share its work."""
        self._refresh(now)
        return self._ends.get(lane.name, now)

    def spared(self, lane: Lane, now: float) -> bool:
        """Whether nothing need be sent to `lane`, because cheaper sources end everything early enough."""
        if not self._thrifty:
            return False
        self._refresh(now)
        return lane.name in self._spared

    def attempt_ended(self) -> None:
        """Note that an attempt has ended. Which sources are spared is looked at again then: its job may have to go to
        another one, and nothing else may happen for long.
        """
        if self._thrifty:
            self._made_at = -math.inf

    def pressed(self, now: float) -> frozenset[tuple[str, int]]:
        """Pairs of a source and a `Rank.priority` whose waiting jobs may not all end before their earliest deadline."""
        queued = len(self._queue)
        grown = queued > max(self._pressed_for + 1, 1.02 * self._pressed_for)
        if now - self._pressed_at >= _FRESH_S or grown:
            self._pressed_at, self._pressed_for = now, queued
            self._pressed = frozenset(self._short_of_time(now)) if queued > 1 else frozenset()
        return self._pressed

    def _short_of_time(self, now: float) -> Iterator[tuple[str, int]]:
        mean_size = self._queue.total_size / max(1, len(self._queue))
        levels = list(self._queue.levels())
        for names, _ in _groups(level.eligible for level in levels):
            lanes = [lane for name, lane in self._lanes.items() if name in names and lane.up(now)]
            waiting = 0
            for priority, same in itertools.groupby(levels, key=lambda level: level.priority):
                mine = [level for level in same if not names.isdisjoint(level.eligible)]
                waiting += sum(level.jobs for level in mine)
                due_at = min((level.due_at for level in mine), default=math.inf)
                if due_at < math.inf:
                    end = self._end_of(lanes, waiting, mean_size, now)
                    if now + PRESSED * (end - now) > due_at:
                        yield from ((name, priority) for name in names)

    def _refresh(self, now: float) -> None:
        queued = len(self._queue)
        fresh_s = _FRESH_SHORT_S if queued < _SHORT_QUEUE else _FRESH_S
        if now - self._made_at >= fresh_s or abs(queued - self._made_for) > max(1, 0.02 * queued):
            self._made_at, self._made_for = now, queued
            self._spared.clear()
            self._ends = {name: end for names, end in self._forecasts(now) for name in names}

    def _forecasts(self, now: float) -> Iterable[tuple[set[str], float]]:
        """Each set of lanes that share work, directly or over others, with the end of what waits for them."""
        waiting_for: dict[frozenset[str], int] = {}
        for eligible, jobs in self._queue.eligible_sets():
            waiting_for[eligible] = waiting_for.get(eligible, 0) + jobs
        mean_size = self._queue.total_size / max(1, len(self._queue))
        for names, members in _groups(waiting_for):
            waiting = sum(waiting_for[eligible] for eligible in members)
            lanes = [lane for name, lane in self._lanes.items() if name in names and lane.up(now)]
            if self._thrifty:
                needed = self._needed(lanes, members, waiting, mean_size, now)
                self._spared.update(lane.name for lane in lanes if lane not in needed)
                lanes = needed
            yield names, self._end_of(lanes, waiting, mean_size, now)

    def _needed(
        self, lanes: list[Lane], members: list[frozenset[str]], waiting: int, mean_size: float, now: float
    ) -> list[Lane]:
        """Those of `lanes` that have to be used, if they are to cost as little as the deadlines of what waits permit:
        for each set of sources that jobs may go to, the cheapest that together would end everything in time.
        """
        needed: dict[str, None] = {}
        for eligible in members:
            able = [lane for lane in lanes if lane.name in eligible]
            needed.update(dict.fromkeys(lane.name for lane in self._cheapest(able, waiting, mean_size, now)))
        return [lane for lane in lanes if lane.name in needed]

    def _cheapest(self, lanes: list[Lane], waiting: int, mean_size: float, now: float) -> list[Lane]:
        """The cheapest of `lanes` that together end what waits within half of the time that its deadlines leave."""
        heads = [head for lane in lanes if (head := self._queue.first(lane.name)) is not None]
        if not heads:
            return lanes
        request = heads[0].request
        by_cost = sorted(lanes, key=lambda lane: lane.expected_cost(request))
        due_at = now + THRIFTY_PART * (min(head.deadline_at for head in heads) - now)
        for count in range(1, len(by_cost)):
            if self._end_of(by_cost[:count], waiting, mean_size, now) <= due_at:
                return by_cost[:count]
        return lanes

    def _end_of(self, lanes: list[Lane], waiting: int, mean_size: float, now: float) -> float:
        if not lanes:
            return now
        earliest = now
        each_s = [self.expected_s(lane, mean_size) for lane in lanes]
        if waiting < 400:
            ends = (attempt.started_at + attempt.expected_s for lane in lanes for attempt in lane.live)
            earliest = max((end for end in ends if now < end < math.inf), default=now)
        largest = self._largest(lanes)
        if largest is not None:
            size = largest.size
            earliest = max(
                earliest,
                now + min(self.wait_s(lane, largest, now) + self.expected_s(lane, size) for lane in lanes),
            )
        tokens = [lane.tokens_of(mean_size) for lane in lanes]

        def done_by(end: float) -> float:
            done = 0.0
            for lane, takes_s, each in zip(lanes, each_s, tokens, strict=True):
                by_work = lane.quota.concurrency * (end - now) / takes_s - 0.5 * lane.quota.in_flight
                last_start = end - takes_s
                by_quota = lane.quota.capacity(last_start, each, now) if last_start >= now else 0.0
                done += max(0.0, min(by_work, by_quota))
            return done

        low, high = now, now + 20.0
        while done_by(high) < waiting and high < now + _HORIZON_S:
            low, high = high, now + 2 * (high - now)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if done_by(middle) >= waiting:
                high = middle
            else:
                low = middle
        return max(high, earliest)

    def _largest(self, lanes: list[Lane]) -> Job | None:
        best: Job | None = None
        for lane in lanes:
            job = self._queue.largest_within(lane.name, math.inf)
            if job is not None and (best is None or job.size > best.size):
                best = job
        return best


def _groups(eligible_sets: Iterable[frozenset[str]]) -> list[tuple[set[str], list[frozenset[str]]]]:
    """Groups of sources that share work, directly or through others, each with its sets of eligible sources."""
    groups: list[tuple[set[str], list[frozenset[str]]]] = []
    for eligible in dict.fromkeys(eligible_sets):
        names, members, apart = set(eligible), [eligible], []
        for group in groups:
            if group[0].isdisjoint(names):
                apart.append(group)
            else:
                names |= group[0]
                members += group[1]
        groups = [*apart, (names, members)]
    return groups
