"""The order of a batch that needs several windows: which jobs each window should serve.

A slot of a sliding window that is used s seconds into one window is free again s seconds into the next. If a batch
overflows its last full window by a few jobs, these can start when the first slots of that window are free again. That
is early if the first jobs of every window are short. So each window begins with as many short jobs as overflow at the
end, and continues with the longest that are left. The shortest of all come last. Within each part the longest goes
first. If one window suffices, or speeds differ, longest first is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .forecast import Forecast
from .jobs import Job
from .upstream import Upstream

MOST_SHORT = 0.9
"""Largest share of a batch that counts as short jobs."""
SLOW = 2.0
"""A source is slow, for the order of a batch, if it takes more than this multiple of the fastest one's latency."""
SLOW_SHARE = 0.1
"""Largest share of the requests of a window that slow sources may have, for an order by windows."""
OVERDECLARED = 1.25
"""Largest factor by which the declared requests of a window may exceed those that tokens and concurrency leave
possible, for an order by windows: otherwise these set the pace, and not the windows."""


def windows_order(jobs: Sequence[Job], per_window: float) -> list[Job] | None:
    """The best order for `jobs` if `per_window` of them can go in a window; None if that is longest first."""
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


def per_window_of(jobs: Sequence[Job], among: Mapping[str, Upstream], forecast: Forecast, now: float) -> float | None:
    """Return how many of `jobs` all of their sources together can send in one window. None if the jobs have different
    sources, or the sources have different windows or are not limited by them.
    """
    first = jobs[0].call.sources
    names = set(first)
    if len(jobs) < 2 or any(job.call.sources != first and set(job.call.sources) != names for job in jobs):
        return None
    upstreams = [among[name] for name in sorted(names) if among[name].up(now)]
    if not upstreams:
        return None
    mean_size = sum(job.size for job in jobs) / len(jobs)
    calls = [upstream.calls_per_request(len(jobs), mean_size) for upstream in upstreams]
    each_s = [forecast.expected_s(upstream, many * mean_size) for upstream, many in zip(upstreams, calls, strict=True)]
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
