"""The clairvoyant bound: the shortest time for a batch if all sizes, speeds and faults were known beforehand.

It is the smallest time T that satisfies these necessary conditions, and at least the time of the longest single request
on the fastest server. Stragglers, lost work and the constant part of latency are not counted, so a schedule may not
reach 1.0 times the bound.

1. Count, work and tokens together. Let the credit of a request be min(1, work / a, tokens / b) for any a, b > 0. In one
   window a server admits N requests, W of work and K tokens, so the credit that it earns is at most min(N, W / a,
   K / b), and all windows of all servers that begin before T must earn the credit of all requests. (These are the
   duals of the fractional assignment problem in which every window charges what is scarcest in it.)
2. Recycling. Where servers count sliding windows, a request that is sent at t takes a place until t + window. With
   T = k windows + x, the places of the first x seconds are those of the first x seconds of every later window, so the
   total is at most k limits and the least that any of these k + 1 stretches took in; averaged, the credit
   (k + min(1, work / a)) / (k + 1) is bounded by k limits + W(x) / a + k places / (k + 1).
3. Arrivals. The first stretch can take in only what has arrived by x.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeAlias

from .servers import Phase, Server, phases

ENDLESS = 1e18
_LONGEST_S = 1e6
_PRECISION = 1e-6
_BINS = 256
_FIRST_PRICES = 24
_REFINEMENTS = 4
_SPREAD = 0.02, 30.0
"""The range of the thresholds a and b, as parts of the mean."""
_ERROR_PART = 0.3


Prices: TypeAlias = tuple[float, float]
"""The credit of a unit of work and of a token."""
Window: TypeAlias = tuple[float, float, float]
"""Requests, work and tokens that one server can handle in one window."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request, with its hidden properties."""

    work: float
    tokens: float = 0.0
    arrives_s: float = 0.0


def makespan_bound_s(servers: Sequence[Server], jobs: Sequence[Job]) -> float:
    """The lower bound in seconds for `servers` to answer all `jobs`; infinity if that is impossible (or not within a
    million seconds).

    Errors count with their expected share, and service noise with its mean, which is 1.
    """
    if not jobs:
        return 0.0
    supplies = [_Supply(server) for server in servers]
    longest_s = max(min(supply.alone_s(job) for supply in supplies) for job in jobs)
    if longest_s == math.inf:
        return math.inf
    tokens_matter = any(server.tokens_per_minute is not None for server in servers)
    search = _Search(supplies, _Batch(jobs, tokens_matter=tokens_matter))
    prices, spacing = search.batch.first_prices()
    bound_s = search.least_time_s(longest_s, prices)
    for _ in range(_REFINEMENTS):
        if bound_s in (longest_s, math.inf):
            break
        # The bound is the highest over all prices; the best prices lie between the tried ones.
        work_price, token_price = search.tightest(bound_s, prices)[1]
        steps = [spacing ** (step / 3) for step in (-2, -1, 0, 1, 2)]
        spacing = spacing ** (1 / 3)
        prices = [
            (work_price * up, token_price * down) for up in steps for down in (steps if tokens_matter else (1.0,))
        ]
        bound_s = search.least_time_s(bound_s, prices)
    return bound_s


class _Batch:
    """The jobs, in bins of similar ones, and what credit they need at which prices (1 / a and 1 / b) of work and
    tokens.
    """

    def __init__(self, jobs: Sequence[Job], *, tokens_matter: bool) -> None:
        self.count = len(jobs)
        self.tokens_matter = tokens_matter
        self.arrivals = sorted(job.arrives_s for job in jobs)
        self.bins = list(_bins(jobs, tokens_matter=tokens_matter))
        self.credit = cache(self._credit)

    def first_prices(self) -> tuple[list[Prices], float]:
        """Prices to try first, and the factor between neighbours."""
        mean_work = sum(work * weight for work, _, weight in self.bins) / self.count or 1.0
        mean_tokens = sum(tokens * weight for _, tokens, weight in self.bins) / self.count or 1.0
        low, high = _SPREAD
        spacing = (high / low) ** (1 / (_FIRST_PRICES - 1))
        parts = [low * spacing**index for index in range(_FIRST_PRICES)]
        work_prices = [1 / (mean_work * part) for part in parts]
        token_prices = [1 / (mean_tokens * part) for part in parts] if self.tokens_matter else []
        return [(work, tokens) for work in (*work_prices, ENDLESS) for tokens in (*token_prices, ENDLESS)], spacing

    def _credit(self, prices: Prices, windows: int = 0) -> float:
        """The credit of all jobs under condition 1, or under condition 2 after so many whole windows."""
        a, b = prices
        if not windows:
            return sum(weight * min(1.0, work * a, tokens * b) for work, tokens, weight in self.bins)
        # Tokens are not charged there.
        kept, part = windows / (windows + 1), a / (windows + 1)
        return sum(weight * min(1.0, kept + part * work) for work, _, weight in self.bins)


class _Supply:
    """The capacity of one server, window by window."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.window_s = server.window_s
        self.phases = phases(server.faults)
        self.success = 1.0 - server.error_share
        # A failed request has occupied its place for a part of its service time.
        wasted = _ERROR_PART * server.error_share / self.success if self.success > 0 else 0.0
        places = server.concurrency if server.concurrency is not None else ENDLESS
        self.work_per_s = places / server.seconds_per_unit / (1 + wasted)
        self.even = server.window == "sliding" and not server.faults
        self.recycles = server.window == "sliding" and server.requests_per_window is not None
        self.requests_per_window = self.success * (server.requests_per_window or 0)
        self.places = places
        self._whole: list[Window] = []

    @cached_property
    def dies_s(self) -> float:
        """When it dies permanently; infinity: never."""
        last = self.phases[-1]
        return last.start_s if last.dead else math.inf

    def alone_s(self, job: Job) -> float:
        """When a job would end if it had the server for itself; infinity: never."""
        done_s = job.arrives_s + self.server.seconds_per_unit * job.work
        return done_s if done_s <= self.dies_s else math.inf

    def windows(self, until_s: float) -> Iterator[Window]:
        """Each window until then; the last one may be shorter."""
        whole = int(until_s // self.window_s)
        while len(self._whole) < whole:
            start_s = len(self._whole) * self.window_s
            self._whole.append(self._window(start_s, start_s + self.window_s))
        yield from self._whole[:whole]
        if whole * self.window_s < until_s:
            yield self._window(whole * self.window_s, until_s)

    def recycled(self, whole: int, rest_s: float, work_price: float) -> float:
        """The most credit under condition 2, `rest_s` seconds after so many whole windows."""
        time_s = whole * self.window_s + rest_s
        begun = int(min(time_s, self.dies_s) // self.window_s) + 1
        at_most = begun * self.requests_per_window
        if self.dies_s < time_s:
            return at_most
        stretch = self.work_per_s * rest_s * work_price
        return min(at_most, whole * self.requests_per_window + stretch + whole * self.places / (whole + 1))

    def _window(self, start_s: float, end_s: float) -> Window:
        open_s = _measure(self.phases, start_s, end_s, lambda phase: 0.0 if phase.closed else 1.0)
        working_s = _measure(self.phases, start_s, end_s, lambda phase: phase.speed)
        server = self.server
        if open_s <= 1e-9:
            return 0.0, self.work_per_s * working_s, 0.0
        requests: float = ENDLESS
        if server.requests_per_minute is not None and server.requests_per_window is not None:
            requests = server.requests_per_window * self.success
            if server.window == "bucket":
                # The bucket refills, up to the burst, while the server is closed.
                rested = start_s == 0 or open_s < end_s - start_s - 1e-9
                requests = server.requests_per_minute / 60.0 * open_s + (server.burst if rested else 0)
                requests *= self.success
        tokens = ENDLESS if server.tokens_per_window is None else server.tokens_per_window * self.success
        return requests, self.work_per_s * working_s, tokens


def _with_carry_over(windows: Sequence[Window], places: float, work_price: float, token_price: float) -> float:
    """The most credit of one server with different windows.

    A request that is charged to the work of its window may be worked on in later ones. That matters only where the next
    one charges requests or tokens instead, and concerns at most as many requests as there are places. (Sliding windows
    of a server without faults are alike, but for the last, which is short of work if of anything.)
    """
    by_count, by_work = 0.0, math.inf
    for requests, work, tokens in windows:
        by_count, by_work = (
            min(requests, tokens * token_price) + min(by_count, by_work + places),
            work * work_price + min(by_count, by_work),
        )
    return min(by_count, by_work)


class _Search:
    """Finds the smallest time that satisfies all conditions."""

    def __init__(self, supplies: Sequence[_Supply], batch: _Batch) -> None:
        self.supplies = supplies
        self.even = [supply for supply in supplies if supply.even]
        self.uneven = [supply for supply in supplies if not supply.even]
        self.batch = batch
        window_s = supplies[0].window_s
        self._window_s = window_s
        self._recycle = all(supply.recycles and supply.window_s == window_s for supply in supplies)

    def least_time_s(self, low_s: float, prices: Sequence[Prices]) -> float:
        """The smallest time from `low_s` on that is feasible at all prices; infinity if none is."""
        if self._feasible(low_s, prices):
            return low_s
        high_s = max(60.0, 2 * low_s)
        while not self._feasible(high_s, prices):
            low_s, high_s = high_s, 2 * high_s
            if high_s > _LONGEST_S:
                return math.inf
        while high_s - low_s > _PRECISION * high_s:
            middle_s = (low_s + high_s) / 2
            if self._feasible(middle_s, prices):
                high_s = middle_s
            else:
                low_s = middle_s
        return high_s

    def tightest(self, time_s: float, prices: Sequence[Prices]) -> tuple[float, Prices]:
        """The prices at which the least credit is left at that time, and how much."""
        return min((slack, pair) for pair, slack in self._slacks(time_s, prices))

    def _feasible(self, time_s: float, prices: Sequence[Prices]) -> bool:
        return self._arrive_in_time(time_s) and all(slack >= -_ROUNDING for _, slack in self._slacks(time_s, prices))

    def _slacks(self, time_s: float, prices: Sequence[Prices]) -> Iterator[tuple[Prices, float]]:
        """For each of the prices, the credit that could be earned beyond what is needed, by either condition."""
        windows = [window for supply in self.even for window in supply.windows(time_s)]
        uneven = [(list(supply.windows(time_s)), supply.places) for supply in self.uneven]
        for pair in prices:
            work_price, token_price = pair
            earned = 0.0
            for requests, work, tokens in windows:
                earned += min(requests, work * work_price, tokens * token_price)
            for theirs, places in uneven:
                earned += _with_carry_over(theirs, places, work_price, token_price)
            yield pair, earned - self.batch.credit(pair)
        whole = int(time_s // self._window_s)
        if whole and self._recycle:
            rest_s = time_s - whole * self._window_s
            for pair in {(work_price, ENDLESS) for work_price, _ in prices}:
                earned = sum(supply.recycled(whole, rest_s, pair[0]) for supply in self.supplies)
                yield pair, earned - self.batch.credit(pair, whole)

    def _arrive_in_time(self, time_s: float) -> bool:
        whole = int(time_s // self._window_s)
        if not (whole and self._recycle and self.batch.arrivals[-1] > 0):
            return True
        admitted = whole * sum(supply.requests_per_window for supply in self.supplies)
        arrived = bisect_right(self.batch.arrivals, time_s - whole * self._window_s)
        return admitted + arrived >= self.batch.count - _ROUNDING


def _measure(stretches: Sequence[Phase], start_s: float, end_s: float, value: Callable[[Phase], float]) -> float:
    """The integral of `value` over the phases from start to end."""
    total = 0.0
    for phase in stretches:
        overlap_s = min(end_s, phase.end_s) - max(start_s, phase.start_s)
        if overlap_s > 0:
            total += value(phase) * overlap_s
    return total


def _bins(jobs: Sequence[Job], *, tokens_matter: bool) -> Iterator[tuple[float, float, float]]:
    """(mean work, mean tokens, how many) of groups of similar jobs: the credit is concave, so few groups are enough."""
    ordered = sorted(jobs, key=lambda job: job.work)
    strata, within = (_BINS // 4, 8) if tokens_matter else (_BINS, 1)
    for stratum in _parts_of(ordered, strata):
        for group in _parts_of(sorted(stratum, key=lambda job: job.tokens) if within > 1 else stratum, within):
            count = len(group)
            work, tokens = sum(job.work for job in group) / count, sum(job.tokens for job in group) / count
            # A job without work or tokens still costs a request.
            yield max(work, _LEAST), max(tokens, _LEAST), float(count)


def _parts_of(jobs: list[Job], parts: int) -> Iterator[list[Job]]:
    edges = [len(jobs) * part // parts for part in range(parts + 1)]
    for first, last in itertools.pairwise(edges):
        if last > first:
            yield jobs[first:last]


_ROUNDING = 1e-9
_LEAST = 1e-9
