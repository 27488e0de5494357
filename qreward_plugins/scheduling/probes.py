"""Probes: which sample probes a source with an open circuit breaker, and how fast probes follow each other.

A source is probed as long as samples wait for it, whatever other sources there are. Probes take a small part of the
source's limits. Each is a different sample where possible, because one sample may have caused the failures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .jobs import Job
from .queue import ReadyQueue
from .upstream import Upstream

SHORTEST_PACE_S = 0.5
"""Pace of the first probes: seconds from one to the next. It doubles with each probe that fails."""
LONGEST_PACE_S = 10.0
LONGEST_FREE_PACE_S = 1.0
"""Longest pace while no sample can be to blame (nothing was sent, or several samples failed and none was answered). A
refused connection a second costs nothing, and a source that recovers shortly before a deadline must still be used."""
SHARE_OF_LIMIT = 0.2
"""Share of the source's request limit that probes may take. The rest is left for the moment when it recovers."""


def pace(upstreams: Mapping[str, Upstream], queue: ReadyQueue) -> None:
    """Update which open sources are needed, and how fast they are probed."""
    for upstream in upstreams.values():
        if not upstream.breaker.closed:
            upstream.breaker.needed = _needed(upstream, upstreams, queue)
            upstream.breaker.pace_s = _pace_s(upstream)


def probing_job(upstream: Upstream, queue: ReadyQueue, now: float) -> Job | None:
    """The sample that probes `upstream`, None if none waits: one that does not go last and has not failed there, if
    there is one, then the most free tries left, then the shortest. If its tokens do not fit yet, the one that fits
    first.
    """
    failing = upstream.breaker.failing

    def order(job: Job) -> tuple[object, ...]:
        return job.last, job.sequence in failing, -job.probes_left, job.excused, job.size, job.sequence

    def wait_s(job: Job) -> float:
        return upstream.quota.wait_s(min(upstream.tokens(job.request), upstream.quota.most_tokens), now)

    job = min(queue.jobs(upstream.name), key=order, default=None)
    if job is None or wait_s(job) <= 0:
        return job
    return min(queue.jobs(upstream.name), key=lambda other: (wait_s(other), *order(other)))


def _needed(upstream: Upstream, upstreams: Mapping[str, Upstream], queue: ReadyQueue) -> bool:
    """Whether a job waits for `upstream`. One that answers mostly nonsense is left alone if another can take it."""
    job = queue.first(upstream.name)
    if job is None or not upstream.health.degraded:
        return job is not None
    others = (upstreams[name] for name in set(job.call.sources) - job.barred - {upstream.name})
    return not any(other.breaker.closed and not other.health.unusable for other in others)


def _pace_s(upstream: Upstream) -> float:
    if upstream.health.refusing:
        return 0.0
    rate_per_s = upstream.quota.rate_per_s * SHARE_OF_LIMIT
    least_s = min(max(SHORTEST_PACE_S, 1 / rate_per_s if rate_per_s > 0 else math.inf), LONGEST_PACE_S)
    longest_s = LONGEST_FREE_PACE_S if upstream.health.down_for_all else LONGEST_PACE_S
    return float(max(least_s, min(SHORTEST_PACE_S * 2.0 ** min(upstream.breaker.probes, 10), longest_s)))
