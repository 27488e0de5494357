"""Decides what the end of an attempt means for its job and its source.

    answer            the job ends, its other attempts are cancelled
    invalid reply     another try, `Call.invalid_retries` times, elsewhere if another source is up. Then the job fails
                      as invalid, or as garbage if its sources give all other jobs invalid replies, too. With
                      `Call.clear_blame` this is decided once another job was answered, or none is left
    throttled         the source pauses, unless it may have throttled this sample only; the job goes to the front of the
                      queue and may go elsewhere at once. Not a failure, until its source is idle, has accepted others
                      and throttles it still: that is a refusal (`ThrottledSamples`)
    sample's fault    the sample hung or crashed a local function: one more try, after all other samples, unless it
                      already had the whole time limit. Does not count against the source
    raised            a local function raised a time-out or lost a connection, because of the sample or of a service
                      behind it: another try after fresh samples, and none if others were answered in between
    transient         another try: elsewhere at once, at the same source after full jitter (AWS Architecture Blog,
                      "Exponential Backoff And Jitter"), anywhere only within the source's retry budget. The job fails
                      after `max_attempts` failures; failures that no sample can have caused do not count
                      (`Health.excuses`). After a time-out that does, it goes after all other samples, for a while
    one replica's     the first failure of a job at one of several servers of a source, while another answers: another
                      try. It counts neither against the job nor against the source
    begun             a job whose caller has a piece of the answer fails (`broken`)
    one server's      a source with several servers says that some of them have refused the request, and another may
    refusal           answer: one more try, there or at another source. Not a failure
    permanent         no further try at this source. With `Call.clear_blame`, a 400, 413 or 422 from all sources is an
                      invalid reply if the sources answer other jobs. A source that refuses many different jobs in a
                      row is unusable: jobs without another source fail at once, and later jobs probe it
    several calls     if a whole request of several calls fails, one of them may be to blame, so none uses up a try:
                      they go again in requests of half the size, or each alone if the results could not be matched to
                      the calls, or after a time limit (another whole limit may be more than the deadlines allow). The
                      source sees one failure. If no sample can be to blame, the requests stay as large as they were.
                      A 429 halves a job's requests every third time: one call, or their number, may be too much

A call with `max_attempts` fails with the error of its last attempt. A job that has another attempt under way
does not fail yet. Its deadline always ends it.

`preemption.py` ends some attempts earlier, `backoff.py` says when the next one may begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import (
    InvalidReply,
    NotStarted,
    PermanentError,
    SampleFault,
    SampleRefused,
    SourceError,
    SourceUnusable,
    Throttled,
    TransientError,
)
from ..observers import Observers
from ..samples.spent import NO_USAGE
from ..sources.base import Reply
from .attempts import Attempt, AttemptError, is_one_replicas, report_end
from .backoff import Backoff
from .health import SLOWED
from .jobs import MAX_FAULTS, Job
from .preemption import Preemption

if TYPE_CHECKING:
    from .dispatcher import Dispatcher
    from .upstream import Upstreams

OF_THE_REQUEST = (400, 413, 422)
"""Statuses of servers that refuse this one request."""
REFUSES_WITHIN_S = 600.0
"""Seconds before a job in which a valid reply shows that its source refuses only this one. A refusal states that it is
about the request, so it needs less than an invalid reply does."""


class RetryPolicy:
    """Decides what happens to jobs when attempts end. Times are seconds of the event loop's clock.

    `max_attempts` bounds a job's failed attempts.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        upstreams: Upstreams,
        backoff: Backoff,
        *,
        max_attempts: int,
        observers: Observers,
    ) -> None:
        self._dispatcher = dispatcher
        self._observers = observers
        self._upstreams = upstreams
        self.max_attempts = max_attempts
        self.backoff = backoff
        self.preemption = Preemption(self, upstreams)
        self.undecided: dict[Job, str] = {}
        """Jobs whose tries are used up by invalid replies or refusals, and whose sources have not answered others; what
        happened to them last."""

    def ended(self, attempt: Attempt, error: AttemptError | None) -> None:
        """Decide what an attempt's end means for its source and its job."""
        job, upstream, now = attempt.job, attempt.upstream, attempt.ended_at
        if attempt.result == "cancelled":  # nobody needs it, or it was held back, so it is no sign of life
            report_end(self._observers, attempt, error)
            upstream.breaker.abandoned(probe=attempt.decides)
            if not attempt.gone:
                self.retry(attempt, str(error))
            return
        upstream.health.heard(now)
        upstream.preempted = 0
        together = error is not None and attempt.together > 1
        if error is None or (isinstance(error, InvalidReply) and (attempt.speaks or not together)):
            self._replied(attempt, error, now)
        else:
            report_end(self._observers, attempt, error)
        if error is None:
            if not job.ended:
                self._dispatcher.finish(job, job.answer(attempt, now), now)
        elif isinstance(error, Throttled):
            self._throttled(attempt, error, now)
        elif together and not (isinstance(error, SourceUnusable) and error.certain):
            self.request_failed(attempt, error, now)
        elif isinstance(error, PermanentError):
            self._permanent(attempt, error, now)
        elif attempt.gone:
            upstream.breaker.abandoned(probe=attempt.decides)
        elif isinstance(error, InvalidReply):
            self._invalid(attempt, error, now)
        elif isinstance(error, SampleFault):
            upstream.breaker.abandoned(probe=attempt.probe)
            self.sample_fault(attempt, error, had_whole_limit=error.reason == "hung")
        elif upstream.local and not isinstance(error, NotStarted):
            upstream.breaker.abandoned(probe=attempt.probe)
            self._raised(attempt, error, now)
        else:
            self._failed(attempt, error, now)
        most = job.call.max_attempts
        last = most is not None and (job.attempts >= most or attempt.timed_out)
        if error is not None and last and not (attempt.gone or job.live):
            self._dispatcher.fail(job, "exhausted", str(error))

    def _replied(self, attempt: Attempt, error: InvalidReply | None, now: float) -> None:
        """Learn from a reply, valid or not: cost, speed and health of its source."""
        job, upstream = attempt.job, attempt.upstream
        was_open = not upstream.breaker.closed
        reply = attempt.reply or Reply()  # a refusal may come without one
        attempt.cost_usd = upstream.answered(attempt, reply, now)
        job.cost_usd += attempt.cost_usd
        if reply.usage is not None:
            job.usage = reply.usage if job.usage is NO_USAGE else job.usage + reply.usage
        report_end(self._observers, attempt, error)
        valid = attempt.result == "valid"
        alternative = not valid and bool(self.backoff.alternatives(job, upstream))
        upstream.health.replied(attempt, now, alternative=alternative, waiting=self._dispatcher.waiting_jobs)
        asked = None if error is None else error.refusal
        if reply.on_judged is not None:
            asked = reply.on_judged(valid, now)
        if asked is not None:
            job.refusals = {**job.refusals, upstream.name: asked}
        if was_open and upstream.breaker.closed:
            if now - attempt.started_at > SLOWED * attempt.expected_s:
                upstream.speed.doubt()
            self.backoff.release(upstream)
            self.preemption.source_recovered(upstream, now - attempt.started_at, now)
        elif upstream.local:
            self.backoff.release(upstream)
        if valid and self.undecided:
            self.decide(others_live=True)

    def _throttled(self, attempt: Attempt, error: Throttled, now: float) -> None:
        job, upstream = attempt.job, attempt.upstream
        speaks, pause_s, problem = attempt.speaks, error.retry_after_s, str(error)
        alone = speaks and upstream.throttled(attempt, pause_s, now, error=problem)
        if upstream.refuses(attempt):
            # Not as by a 413: a 429 gives no sample a floor.
            self._permanent(attempt, PermanentError(f"{problem} (it accepts others)"), now)
            return
        upstream.breaker.abandoned(probe=attempt.decides)
        if upstream.oversize(attempt.request):
            # It went alone. A second try would make all others wait for an empty window again.
            job.barred |= {upstream.name}
            problem += f" (it went alone, because it may take {upstream.tokens(attempt.request):,} tokens)"
        job.throttled += 1
        # A server that throttles a request has done nothing with it.
        job.begun &= not job.call.once
        if attempt.together > 1 and not job.throttled % 3:
            job.go_with(attempt.together // 2)
        self.backoff.after_throttled(job, upstream, pause_s or 0.0, now, alone=alone)
        if not attempt.gone:
            self.retry(attempt, problem)

    def _failed(self, attempt: Attempt, error: SourceError, now: float) -> None:
        job, upstream = attempt.job, attempt.upstream
        if is_one_replicas(attempt, error):
            self.transient(attempt, error, now, excused=True)
            return
        self._source_failed(attempt, error, now)
        # A job that failed just now may have been the last that its batch waited for, which ended this one.
        if not job.ended:
            excused = upstream.health.excuses(attempt)
            if attempt.timed_out and not excused:
                self.backoff.behind_others(job, now)
            self.transient(attempt, error, now, excused=excused)

    def _source_failed(self, attempt: Attempt, error: SourceError, now: float) -> None:
        upstream = attempt.upstream
        if attempt.timed_out:
            upstream.quota.timed_out(now, sent_at=attempt.started_at)
        if upstream.health.failed(attempt, str(error), now):
            self.preemption.source_fails(upstream, now)

    def request_failed(self, attempt: Attempt, error: InvalidReply | SourceError, now: float) -> None:
        """Split the calls of a request that failed with `error`, except a 429 or an error that is certain to concern
        all calls. Called for each of its attempts.
        """
        job, upstream = attempt.job, attempt.upstream
        passes = None if not isinstance(error, TransientError) or isinstance(error, SampleFault) else error
        if attempt.speaks and passes:
            raised = upstream.local and not isinstance(error, NotStarted)  # because of a sample, or a service behind it
            if not (raised or is_one_replicas(attempt, error)):
                self._source_failed(attempt, passes, now)
        elif attempt.speaks and isinstance(error, PermanentError):
            self._source_refused(attempt, error, now)
        if attempt.gone:
            return
        halves = isinstance(error, PermanentError) or (passes and not attempt.timed_out)
        if not (passes and upstream.health.excuses(attempt)):
            job.go_with(attempt.together // 2 if halves else 1)
        if passes:
            self.transient(attempt, passes, now, excused=True)
        else:
            self.retry(attempt, str(error))

    def _source_refused(self, attempt: Attempt, error: PermanentError, now: float) -> None:
        if isinstance(error, SourceUnusable):
            if attempt.upstream.health.refused(attempt, str(error), now, certain=error.certain):
                self._fail_stranded()
        else:
            self._note_refusal(attempt, error)

    def _invalid(self, attempt: Attempt, error: InvalidReply, now: float) -> None:
        job, upstream = attempt.job, attempt.upstream
        job.invalid += 1
        job.invalid_at |= {upstream.name}
        if job.invalid <= job.call.invalid_retries:
            self.backoff.after_invalid(job, upstream, now)
            self.retry(attempt, str(error))
        elif self._others_live(attempt):
            self.retry(attempt, str(error))
        else:
            self._blame(attempt, str(error))

    # Who is to blame for invalid replies and refusals

    def _blame(self, attempt: Attempt, problem: str) -> None:
        """Fail a job that its sources could not judge, now or when it is known whether they judge others: if they do,
        this job provoked what it got, and a floor may stand for its verdict; otherwise they are broken.
        """
        job = attempt.job
        self.undecided[job] = job.last_problem = problem
        if not job.call.clear_blame or self._judges_others(job):
            self.settle(job)
        else:
            job.ended_attempt(attempt)

    def decide(self, *, others_live: bool) -> None:
        """End the jobs for which it is known now who is to blame. `others_live`: other jobs are still under way."""
        for job in list(self.undecided):
            if self._judges_others(job) or (not others_live and self._none_left(job)):
                self.settle(job)

    def settle(self, job: Job) -> bool:
        """End `job` by what is known now; return whether it was undecided."""
        problem = self.undecided.pop(job, None)
        if problem is None:
            return False
        judges = self._judges_others(job)
        if job.refused_at and not job.invalid_at:
            if judges and job.call.clear_blame:
                self._dispatcher.fail(job, "refused", f"{problem} (it answers others)", invalid=True)
            else:
                self._dispatcher.fail(job, "no_source", problem)
        elif not judges and all(self._upstreams[name].health.degraded for name in job.invalid_at | job.refused_at):
            self._dispatcher.fail(job, "garbage", f"{problem} (most replies of this source are invalid)")
        else:
            self._dispatcher.fail(job, "invalid", problem, invalid=True)
        return True

    def _judges_others(self, job: Job) -> bool:
        """Whether one of its sources has given another job a valid reply since `job` was submitted or, if `job` was
        refused, shortly before.
        """
        since = job.submitted_at if job.invalid_at else job.submitted_at - REFUSES_WITHIN_S
        return any(self._upstreams[name].health.judges_since(since) for name in job.invalid_at | job.refused_at)

    def _none_left(self, job: Job) -> bool:
        """Whether no other job is left that the sources of `job` could answer."""
        names = job.invalid_at | job.refused_at
        if any(self._upstreams[name].live for name in names):
            return False
        return not any(names & (set(other.call.sources) - other.barred) for other in self._dispatcher.waiting_jobs())

    # Failures

    def transient(self, attempt: Attempt, error: SourceError, now: float, *, excused: bool) -> None:
        """Try again after a failure that may pass. `excused`: it does not count as a failure of the job."""
        job = attempt.job
        if excused:
            job.excused += 1
        elif attempt.probe and job.probes_left > 0 and not attempt.upstream.health.suspects(job):
            # A probe often fails because of its source, so its failure says little about the sample.
            job.probes_left -= 1
        else:
            attempt.counts = True
            job.failures += 1
        if not excused and job.failures >= self.max_attempts and not self._others_live(attempt):
            self._dispatcher.fail(job, "exhausted", str(error))
            return
        if job.begun:
            self._dispatcher.fail(job, "broken", str(error))
            return
        if job.failures == self.max_attempts - 1 and self.backoff.alternatives(job, attempt.upstream):
            job.barred |= {attempt.upstream.name}  # the last try goes to another source
        self.backoff.after_failure(attempt, now)
        self.retry(attempt, str(error))

    def _raised(self, attempt: Attempt, error: SourceError, now: float) -> None:
        job, upstream = attempt.job, attempt.upstream
        job.failures += 1
        job.go_last()
        name, answers = job.raised_at
        is_to_blame = name == upstream.name and upstream.answers > answers
        job.raised_at = upstream.name, upstream.answers
        if (is_to_blame or job.failures >= self.max_attempts) and not self._others_live(attempt):
            self._dispatcher.fail(job, "exhausted", str(error))
            return
        self.backoff.after_raised(job, upstream, now)
        self.retry(attempt, str(error))

    def sample_fault(self, attempt: Attempt, error: SampleFault, *, had_whole_limit: bool) -> None:
        """Try again, after all other samples, unless the sample has had its tries."""
        job = attempt.job
        job.faults += 1
        job.go_last()
        if (had_whole_limit or job.faults >= MAX_FAULTS) and not self._others_live(attempt):
            self._dispatcher.fail(job, error.reason, str(error))
        else:
            self.retry(attempt, str(error))

    def _permanent(self, attempt: Attempt, error: PermanentError, now: float) -> None:
        job, upstream = attempt.job, attempt.upstream
        if self._is_one_servers(attempt, error):
            job.refused += 1
            job.refusals = {**job.refusals, upstream.name: error.refusal}
            # Like one that throttles a request, the server has done nothing with it.
            job.begun &= not job.call.once
            self._note_refusal(attempt, error)
            # Once for each job, so the retry budget does not count it.
            if not attempt.gone:
                self.retry(attempt, str(error))
            return
        job.barred |= {upstream.name}
        if isinstance(error, SampleRefused):
            job.refused_for = error.reason
        if error.status in OF_THE_REQUEST and not isinstance(error, SourceUnusable):
            job.refused_at |= {upstream.name}
        self._source_refused(attempt, error, now)
        if attempt.gone:
            return
        if job.call.refusal_ends and not isinstance(error, (SourceUnusable, SampleRefused)):
            self._dispatcher.fail(job, "refused", str(error))
        elif job.refused_at.issuperset(job.call.sources) and not self._others_live(attempt) and job.call.clear_blame:
            self._blame(attempt, str(error))
        else:
            self.retry(attempt, str(error))

    def _is_one_servers(self, attempt: Attempt, error: PermanentError) -> bool:
        """Whether another server of the source may answer what one refused. A job whose caller has a piece of an answer
        is not asked again.
        """
        job = attempt.job
        again = not job.begun or job.call.once
        first = not job.refused or attempt.request.refusal is None  # a hedge may have been sent before the refusal
        return error.refusal is not None and first and again

    def _note_refusal(self, attempt: Attempt, error: PermanentError) -> None:
        """Note for its source that it, or one of its servers, refused a request."""
        upstream = attempt.upstream
        if error.status in OF_THE_REQUEST and error.refusal is None:
            # The source is up: it has read the request.
            upstream.breaker.succeeded()
            self.backoff.release(upstream)
        else:
            upstream.breaker.abandoned(probe=attempt.decides)

    def _fail_stranded(self) -> None:
        """Fail the waiting jobs that have no source left."""
        now = self._dispatcher.now()
        for job in list(self._dispatcher.waiting_jobs()):
            left = [self._upstreams[name] for name in job.call.sources if name not in job.barred]
            if left and all(upstream.health.unusable for upstream in left):
                self._dispatcher.fail(job, "no_source", "; ".join(upstream.problem(now) for upstream in left))

    def _others_live(self, attempt: Attempt) -> bool:
        return any(other is not attempt for other in attempt.job.live)

    def retry(self, attempt: Attempt, problem: str) -> None:
        """Queue the job of an attempt that came to nothing because of `problem`, unless another one is under way."""
        job = attempt.job
        job.ended_attempt(attempt)
        job.last_problem = problem
        if job.ended or job.live:
            return
        if job.begun:
            self._dispatcher.fail(job, "broken", problem)
        else:
            self.backoff.enqueue(job)
