"""Undecided jobs: their tries are used up by invalid replies or refusals, and it is not known yet who is to blame.

If the sources give valid replies to other jobs, this job provoked what it got, and a floor may stand for its verdict.
If they give none to anybody, they are broken, and the job failed for infrastructure. So a job whose outcome depends on
that (`Call.clear_blame`) waits until another job was answered, or none is left that could be.
"""

from __future__ import annotations

from collections.abc import Mapping

from .jobs import Job, Jobs
from .upstream import Upstream

REFUSES_WITHIN_S = 600.0
"""Seconds before a job in which a valid reply shows that its source refuses only this one. A refusal states that it is
about the request, so it needs less than an invalid reply does."""


class Undecided:
    """The undecided jobs of an event loop."""

    def __init__(self, jobs: Jobs, upstreams: Mapping[str, Upstream]) -> None:
        self._jobs = jobs
        self._upstreams = upstreams
        self._problems: dict[Job, str] = {}

    def __bool__(self) -> bool:
        return bool(self._problems)

    def add(self, job: Job, problem: str) -> bool:
        """Let `job` wait until it is known who is to blame; end it if that is known. Return whether it waits."""
        if not job.call.clear_blame or self._judges_others(job):
            self._end(job, problem)
            return False
        job.undecided = True
        self._problems[job] = problem
        return True

    def decide(self, *, others_live: bool) -> None:
        """End the jobs for which it is known now who is to blame. `others_live`: other jobs are still under way."""
        if not self._problems:  # mostly, and each attempt asks
            return
        for job, problem in list(self._problems.items()):
            if self._judges_others(job) or (not others_live and self._none_left(job)):
                self._end(job, problem)

    def settle(self, job: Job) -> bool:
        """End `job` by what is known now; return whether it was undecided."""
        problem = self._problems.get(job)
        if problem is not None:
            self._end(job, problem)
        return problem is not None

    def discard(self, job: Job) -> None:
        """Forget `job`, if it is undecided."""
        self._problems.pop(job, None)

    def _judges_others(self, job: Job) -> bool:
        """Whether one of its sources has given another job a valid reply since `job` was submitted or, if `job` was
        refused, shortly before.
        """
        since = job.submitted_at if job.invalid_at else job.submitted_at - REFUSES_WITHIN_S
        return any(upstream.health.judges_since(since) for upstream in self._asked(job))

    def _asked(self, job: Job) -> list[Upstream]:
        return [self._upstreams[name] for name in job.invalid_at | job.refused_at]

    def _none_left(self, job: Job) -> bool:
        """Whether no other job is left that the sources of `job` could answer."""
        names = job.invalid_at | job.refused_at
        if any(self._upstreams[name].live for name in names):
            return False
        return not any(names & (set(other.call.sources) - other.barred) for other in self._jobs.waiting_jobs())

    def _end(self, job: Job, problem: str) -> None:
        job.undecided = False
        self._problems.pop(job, None)
        judges = self._judges_others(job)
        if job.refused_at and not job.invalid_at:
            if judges and job.call.clear_blame:
                self._jobs.fail(job, "refused", f"{problem} (it answers others)", invalid=True)
            else:
                self._jobs.fail(job, "no_source", problem)
        elif not judges and all(upstream.health.degraded for upstream in self._asked(job)):
            self._jobs.fail(job, "garbage", f"{problem} (most replies of this source are invalid)")
        else:
            self._jobs.fail(job, "invalid", problem, invalid=True)
