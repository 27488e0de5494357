"""Says why no source answered a job, for the detail of its failure."""

from __future__ import annotations

from collections.abc import Mapping

from .jobs import Job
from .upstream import Upstream


def why_not_in_time(job: Job, upstreams: Mapping[str, Upstream], now: float) -> str:
    """Return why a job has no answer at its deadline."""
    asked = " and ".join(attempt.upstream.name for attempt in job.live)
    if job.last_problem or asked:
        return job.last_problem or f"{asked} had not answered"
    problems = filter(None, (upstreams[name].problem(now) for name in job.call.sources))
    return "; ".join(["no source could take it in time", *problems])


def why_no_source(job: Job, upstreams: Mapping[str, Upstream]) -> str:
    """Return why no source can ever take a job."""
    if not job.call.sources:
        return "its sources were removed by a reload of the configuration"
    if job.last_problem:
        return job.last_problem
    barred = [upstreams[name] for name in job.barred]
    reasons = [
        f"{upstream.name}: {upstream.health.unusable or upstream.too_large(job.request) or 'it cannot take it'}"
        for upstream in barred
    ]
    return "no source can take it (" + "; ".join(sorted(reasons)) + ")"
