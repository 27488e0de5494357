"""Rests: for how long a job avoids a source that failed it, while other sources may take it at once."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .jobs import Job, Jobs
from .upstream import Upstream

THROTTLED_TO_REST = 3
"""Throttled attempts of one sample from which other samples go first."""
SHORTEST_THROTTLED_REST_S = 0.5
LONGEST_REST_S = 10.0
"""Bounds, in seconds, of the time after the pause for which they go first. In between it is as long as the pause."""
SHORTEST_INVALID_REST_S = 0.5
"""Shortest time, in seconds, for which a job avoids a source that gave it an invalid verdict, if it has another."""


class Rests:
    """The rests of all jobs of an event loop. Times are seconds of its clock."""

    def __init__(self, jobs: Jobs, upstreams: Mapping[str, Upstream]) -> None:
        self._jobs = jobs
        self._upstreams = upstreams
        self._resting: dict[str, dict[Job, None]] = {name: {} for name in upstreams}

    def until_answer(self, job: Job, upstream: Upstream, until: float) -> None:
        """Keep `job` away from a source until `until`, or until the source answers another sample."""
        job.rested_at[upstream.name] = until
        self._resting[upstream.name][job] = None

    def release(self, upstream: Upstream) -> None:
        """End the rests of `until_answer` at a source that has answered: queue their jobs again."""
        resting, self._resting[upstream.name] = self._resting[upstream.name], {}
        for job in resting:
            if not job.ended and job.rested_at.pop(upstream.name, None) is not None and not job.live:
                self._jobs.enqueue(job)

    def after_throttling(self, job: Job, upstream: Upstream, now: float) -> None:
        """Let other samples go first if `job` was throttled often. It may be the only one that is throttled, because it
        is too large for a limit.
        """
        if job.throttled >= THROTTLED_TO_REST and self._delays_others(job, upstream):
            pause_s = upstream.pauses.left_s(now)
            job.rested_at[upstream.name] = now + pause_s + min(max(SHORTEST_THROTTLED_REST_S, pause_s), LONGEST_REST_S)

    def after_invalid(self, job: Job, upstream: Upstream, now: float) -> None:
        """Let other sources, if there are any, take `job` first after an invalid reply of `upstream`."""
        others = set(job.call.sources) - job.barred - {upstream.name}
        job.rested_at[upstream.name] = now + (_invalid_rest_s(job, upstream) if others else 0.0)
        self.renew(job, now)

    def renew(self, job: Job, now: float) -> None:
        """Prolong the rests after invalid replies while another source may judge `job`. This lasts for the first half
        of its time: it still gets an answer if the other source stays busy.
        """
        if now > (job.submitted_at + job.deadline_at) / 2:
            return
        for name in job.invalid_at - job.barred:
            upstream = self._upstreams[name]
            if job.rested_at.get(name, -math.inf) <= now and self.alternative(job, upstream, untried=True):
                job.rested_at[name] = now + _invalid_rest_s(job, upstream)

    def alternative(self, job: Job, upstream: Upstream, *, untried: bool = False) -> bool:
        """Whether another source could serve `job` and is not garbled. `untried`: and gave it no invalid reply yet."""
        without = job.barred | {upstream.name} | (job.invalid_at if untried else set())
        others = (self._upstreams[name] for name in job.call.sources if name not in without)
        return any(not other.health.unusable and other.breaker.closed and not other.health.garbled for other in others)

    def forget(self, job: Job) -> None:
        """Forget `job`, which has ended."""
        for name in job.rested_at:
            self._resting[name].pop(job, None)

    def _delays_others(self, job: Job, upstream: Upstream) -> bool:
        """Whether others wait for `upstream` that were throttled less often than `job`."""
        others = (other for other in self._jobs.waiting_jobs() if other is not job)
        return any(upstream.name in other.call.sources and other.throttled < job.throttled for other in others)


def _invalid_rest_s(job: Job, upstream: Upstream) -> float:
    # Not longer: the other sources may be out of quota for minutes.
    return max(SHORTEST_INVALID_REST_S, 2 * upstream.speed.expected_s(job.size))
