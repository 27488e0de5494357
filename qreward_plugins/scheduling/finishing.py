"""Compares when sources would finish a job: the wait for each, and its expected latency there.

A source that is slower than others should take a job only if no other one would finish it earlier.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from .forecast import Forecast
from .jobs import Job
from .queue import ReadyQueue, Waiting
from .upstream import Upstream

FAILED_HERE = 1.5
"""Factor on the expected latency at the source that has just failed the job."""
_MOST_ASKED = 16
"""Most jobs of one rank that are asked, one by one, whether a slow source would finish them first."""


class Finishing:
    """Tells which source would finish a job first. Times are seconds of the event loop's clock."""

    def __init__(self, upstreams: Mapping[str, Upstream], queue: ReadyQueue, forecast: Forecast) -> None:
        self._upstreams = upstreams
        self._queue = queue
        self._forecast = forecast

    def first(self, upstream: Upstream, job: Job, now: float) -> bool:
        """Whether no other source would finish `job` before `upstream` does."""
        return all(wait_s + gain_s >= 0 for _, wait_s, gain_s in self._alternatives(upstream, job, now))

    def one_of(self, upstream: Upstream, waiting: Waiting, now: float) -> Job | None:
        """One of the jobs of a rank that no other source would finish before `upstream` does.

        Expected latencies are lines over the size, so the sizes of these jobs are an interval, which the first and the
        least job tell. The wait for tokens grows with the size; the longest one makes the interval too wide at most, so
        a few jobs in it are asked.
        """
        first, least = waiting.first, waiting.least
        low, high = float(least.size), float(first.size)
        at_least = {name: gain_s for name, _, gain_s in self._alternatives(upstream, least, now)}
        for name, wait_s, gain_s in self._alternatives(upstream, first, now):
            lead_first_s, lead_least_s = wait_s + gain_s, wait_s + at_least.get(name, gain_s)
            if lead_first_s < 0 and lead_least_s < 0:
                return None
            if lead_first_s < 0 or lead_least_s < 0:
                share = lead_least_s / (lead_least_s - lead_first_s)
                equal = least.size + share * (first.size - least.size)
                low, high = (low, min(high, equal)) if lead_first_s < 0 else (max(low, equal), high)
        able = itertools.islice(waiting.between(low, high), _MOST_ASKED)
        return next((job for job in able if self.first(upstream, job, now)), None)

    def expected_s(self, upstream: Upstream, job: Job) -> float:
        """Latency to expect of the request that `job` would go in."""
        return self._forecast.expected_s(upstream, upstream.joined_size(job) + job.size)

    def mean_s(self, upstream: Upstream) -> float:
        """Latency to expect of a request of average size."""
        waiting = len(self._queue)
        mean_size = self._queue.total_size / max(1, waiting)
        return self._forecast.expected_s(upstream, mean_size * upstream.calls_per_request(waiting, mean_size))

    def _alternatives(self, upstream: Upstream, job: Job, now: float) -> Iterator[tuple[str, float, float]]:
        """Each other source that `job` may go to: its name, the seconds until it could take the job, and by how many
        seconds its latency is longer than that of `upstream`.
        """

        def takes_s(other: Upstream) -> float:
            factor = FAILED_HERE if job.failures and job.last_source == other.name else 1.0
            return factor * self.expected_s(other, job)

        here_s = takes_s(upstream)
        for name in job.call.sources:
            other = self._upstreams[name]
            if other is upstream or name in job.barred or self._forecast.unneeded(other, now):
                continue
            wait_s = max(self._forecast.wait_s(other, job, now), job.backoff_until.get(name, now) - now)
            yield name, wait_s, takes_s(other) - here_s
