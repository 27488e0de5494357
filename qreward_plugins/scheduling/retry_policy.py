"""Decides what the end of an attempt means for its job and its source.

    answer            the job ends, its other attempts are cancelled
    invalid reply     another try elsewhere, `Call.invalid_retries` times. Then the job fails as invalid, or as garbage
                      if its sources give all other jobs invalid replies, too. With `Call.clear_blame` this is decided
                      once another job was answered, or none is left
    throttled         the source pauses; the job goes to the front of the queue and may go elsewhere at once. Not a
                      failure
    sample's fault    the sample hung or crashed a local function: one more try, after all other samples, unless it
                      already had the whole time limit. Does not count against the source
    raised            a local function raised a time-out or lost a connection, because of the sample or of a service
                      behind it: another try after fresh samples, and none if others were answered in between
    transient         another try: elsewhere at once, at the same source after full jitter (AWS Architecture Blog,
                      "Exponential Backoff And Jitter"), anywhere only within the source's retry budget. The job fails
                      after `max_attempts` failures; failures that no sample can have caused do not count
                      (`Health.excuses`). After a time-out that does, it goes after all other samples, for a while
    permanent         no further try at this source. With `Call.clear_blame`, a 400, 413 or 422 from all sources is an
                      invalid reply if the sources answer other jobs. A source that refuses many different jobs in a
                      row is out: jobs without another source fail at once, and later jobs probe it

A job that has another attempt under way does not fail yet. Its deadline always ends it. Its attempts are then
cancelled, or left to end if late answers are wanted; the result never changes.

An attempt may also be given up before it ends. If its source is silent, all older attempts there are given up and their
jobs are queued again. If the source answers others, only an attempt that takes far too long is given up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Literal

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
from ..sources.base import Reply
from ..spent import NO_USAGE
from .attempts import Attempt, Ending, attempt_ended
from .backoff import Backoff
from .jobs import MAX_FAULTS, MAX_RESTARTS, MAX_UNCOUNTED, Job, Jobs
from .undecided import Undecided
from .upstream import Upstream

OF_THE_REQUEST = (400, 413, 422)
"""Statuses of servers that refuse this one request."""
GIVE_UP_SILENT_FROM = 1.0
"""`Attempt.age` from which an attempt is given up if its source is silent."""
GIVE_UP_FAILING_FROM = 1.5
"""The same if its source fails others. It is higher, because an attempt that did not fail at once may be answered."""
GIVE_UP_AT = 8.0
"""`Attempt.lateness` from which an attempt without a hedge is given up and its job starts anew. A straggler that would
end at ten times the usual latency loses nothing by that."""
GIVE_UP_AFTER_S = 5.0
"""Least age, in seconds, of such an attempt."""
OVERDUE_FROM = 2.0
"""Age from which an overdue probe is given up once a later one is answered, as a multiple of what that one took."""


class RetryPolicy:
    """Decides what happens to jobs when attempts end. Times are seconds of the event loop's clock.

    `max_attempts` bounds a job's failed attempts. `keeps_late`: attempts of a failed job that have been sent are left
    to end, and its caller is told the answer.
    """

    def __init__(
        self,
        jobs: Jobs,
        upstreams: Mapping[str, Upstream],
        *,
        rng: random.Random,
        max_attempts: int,
        keeps_late: bool,
        observers: Observers,
    ) -> None:
        self._jobs = jobs
        self._observers = observers
        self._upstreams = upstreams
        self._max_attempts = max_attempts
        self.keeps_late = keeps_late
        self.backoff = Backoff(jobs, upstreams, rng)
        self.undecided = Undecided(jobs, upstreams)

    def check_age(self, attempt: Attempt, now: float) -> None:
        """Give up an attempt for its age if it has no hedge, and all older attempts of a source that is silent."""
        job, upstream = attempt.job, attempt.upstream
        if upstream.health.silent(attempt, now) or upstream.health.resting_in_silence:
            self._give_up_old(upstream, now, GIVE_UP_SILENT_FROM, f"{upstream.name} fell silent")
        if (
            not attempt.given_up
            and not job.ended
            and not (upstream.local or (attempt.probe and not upstream.breaker.closed))
            and upstream.speed.known
            and attempt.lateness(now) >= GIVE_UP_AT
            and now - attempt.started_at >= GIVE_UP_AFTER_S
            and job.restarts < MAX_RESTARTS
            and len(job.live) == 1
        ):
            job.restarts += 1
            why = f"{upstream.name} took {attempt.lateness(now):.0f} times longer than expected"
            self._give_up(attempt, now, why, for_age=True)

    def set_aside(self, attempt: Attempt, now: float) -> None:
        """End a call of a local function that keeps others waiting. Its sample is tried once more, after them."""
        if attempt.result or attempt.given_up or attempt.job.ended:
            return
        attempt.upstream.set_aside += 1
        attempt.given_up = True
        attempt.cancel()
        took_s = now - attempt.sent_at
        error = SampleFault(f"{attempt.upstream.name} had not ended after {took_s:.1f} s, others waited")
        self._fault(attempt, error, had_whole_limit=False)

    def give_up_probe(self, attempt: Attempt, now: float) -> None:
        """Give up an overdue probe, so that the next one has room."""
        if not attempt.job.ended:
            self._give_up(attempt, now, f"{attempt.upstream.name} did not answer a probe")

    def call_back(self, upstream: Upstream, *, sent: bool) -> None:
        """Cancel the attempts at a source that have not been sent; `sent`: the others, too. Their jobs are queued
        again. This counts neither against the jobs nor against the source.
        """
        for attempt in list(upstream.live):
            unsent = attempt.reservation.sent_at == -math.inf
            if (sent or unsent) and not (attempt.result or attempt.given_up or attempt.job.ended):
                attempt.given_up = True
                attempt.cancel()
                self._retry(attempt, "it was called back, because the share of its limits had ended")

    def cancelled(self, attempt: Attempt, now: float) -> None:
        """Treat an attempt that something else cancelled as failed. If it was withheld, queue its job again."""
        if attempt.given_up or attempt not in attempt.job.live:
            return
        if attempt.withheld:
            attempt.given_up = True
            self._retry(attempt, "it was not sent, because the share of its limits had ended")
        else:
            attempt.result = "failed"
            self.ended(
                attempt, TransientError(f"the call at {attempt.upstream.name} was cancelled by another task"), now
            )

    def _give_up_old(self, upstream: Upstream, now: float, from_age: float, why: str) -> None:
        """Give up the attempts of a source whose `age` is at least `from_age`, so that their jobs go elsewhere."""
        for attempt in list(upstream.live):
            # A probe gets time to answer, because a source that is only slower could not recover otherwise.
            kept = attempt.probe and not (attempt.superseded and self.backoff.alternative(attempt.job, upstream))
            # The source is certainly down, so the expected latency counts, not the longest possible one.
            if attempt.age(now) >= from_age and not kept and not attempt.job.ended:
                self._give_up(attempt, now, why)

    def _give_up(self, attempt: Attempt, now: float, why: str, *, for_age: bool = False) -> None:
        """Cancel an attempt that might still be answered, and treat it as failed. Where that failure would end the job,
        it does not count: always `for_age`, otherwise `MAX_UNCOUNTED` times.
        """
        if attempt.result or attempt.given_up:
            return
        attempt.given_up = True
        attempt.cancel()
        job = attempt.job
        probes = attempt.probe and job.probes_left > 0
        excused = False
        if not probes and job.failures + 1 >= self._max_attempts:
            excused = for_age or job.uncounted < MAX_UNCOUNTED
            job.uncounted += not for_age
        self._transient(attempt, TransientError(why), now, excused=excused)

    def ended(self, attempt: Attempt, ending: Ending, now: float) -> None:
        """Decide what an attempt's end means for its source and its job."""
        job, upstream = attempt.job, attempt.upstream
        upstream.heard(now)
        if ending is None or isinstance(ending, InvalidReply):
            self._replied(attempt, ending, now)
        else:
            self.report_end(attempt, ending, now)
        gone = job.ended or attempt.given_up
        if ending is None:
            answer = job.answer(attempt, now)
            if not job.ended:
                self._jobs.finish(job, answer)
            elif self.keeps_late:
                job.caller.late(answer)
        elif isinstance(ending, Throttled):
            self._throttled(attempt, ending, now, gone=gone)
        elif isinstance(ending, PermanentError):
            self._permanent(attempt, ending, now, gone=gone)
        elif gone:
            upstream.breaker.abandoned(probe=attempt.decides)
        elif isinstance(ending, InvalidReply):
            self._invalid(attempt, ending, now)
        elif isinstance(ending, SampleFault):
            upstream.breaker.abandoned(probe=attempt.probe)
            self._fault(attempt, ending, had_whole_limit=ending.reason == "hung")
        elif upstream.local and not isinstance(ending, NotStarted):
            upstream.breaker.abandoned(probe=attempt.probe)
            self._raised(attempt, ending, now)
        else:
            self._failed(attempt, ending, now)

    def _replied(self, attempt: Attempt, ending: InvalidReply | None, now: float) -> None:
        """Learn from a reply, valid or not: cost, speed and health of its source."""
        job, upstream = attempt.job, attempt.upstream
        was_open = not upstream.breaker.closed
        reply = attempt.reply or Reply()  # a refusal may come without one
        cost_usd = upstream.answered(attempt, reply, now)
        job.cost_usd += cost_usd
        if reply.usage is not None:
            job.usage = reply.usage if job.usage is NO_USAGE else job.usage + reply.usage
        self.report_end(attempt, ending, now, cost_usd)
        valid = attempt.result == "valid"
        alternative = not valid and self.backoff.alternative(job, upstream)
        upstream.health.judged(valid, now, probe=attempt.decides, alternative=alternative)
        if was_open and upstream.breaker.closed:
            self._recovered(upstream, now - attempt.started_at, now)
        elif upstream.local:
            self.backoff.release(upstream)
        if valid:
            self.undecided.decide(others_live=True)

    def _throttled(self, attempt: Attempt, error: Throttled, now: float, *, gone: bool) -> None:
        job, upstream = attempt.job, attempt.upstream
        upstream.throttled(error.retry_after_s, attempt.started_at, now, error=str(error))
        upstream.breaker.abandoned(probe=attempt.decides)
        problem = str(error)
        if upstream.oversize(attempt.request):
            # It went alone. A second try would make all others wait for an empty window again.
            job.barred |= {upstream.name}
            problem += f" (it went alone, because it may take {upstream.tokens(attempt.request):,} tokens)"
        job.throttled += 1
        self.backoff.after_throttling(job, upstream, now)
        if not gone:
            self._retry(attempt, problem)

    def _failed(self, attempt: Attempt, error: SourceError, now: float) -> None:
        job, upstream = attempt.job, attempt.upstream
        if attempt.timed_out:
            upstream.quota.timed_out(now, sent_at=attempt.started_at)
        if upstream.health.failed(now, probe=attempt.decides, sample=job.sequence, error=str(error)):
            self._give_up_old(upstream, now, GIVE_UP_FAILING_FROM, f"{upstream.name} failed other samples")
        # A job that failed just now may have been the last that its batch waited for, which ended this one.
        if not job.ended:
            excused = upstream.health.excuses(attempt)
            if attempt.timed_out and not excused:
                self.backoff.after_timeout(job, now)
            self._transient(attempt, error, now, excused=excused)

    def report_end(
        self, attempt: Attempt, ending: Ending | Literal["cancelled"], now: float, cost_usd: float = 0.0
    ) -> None:
        """Emit `AttemptEnded`, once for each attempt."""
        if not attempt.told:
            attempt.told = True
            self._observers.emit(attempt_ended(attempt, ending, now, cost_usd))

    def _recovered(self, upstream: Upstream, took_s: float, now: float) -> None:
        """Use a source again that has answered a probe, after `took_s` seconds. Overdue probes that had more than
        `OVERDUE_FROM` times as long are given up.
        """
        self.backoff.release(upstream)
        for attempt in list(upstream.live):
            overdue = attempt.superseded and now - attempt.started_at > OVERDUE_FROM * took_s
            if overdue and not attempt.job.ended:
                self._give_up(attempt, now, f"{upstream.name} was down when it was sent")

    def _invalid(self, attempt: Attempt, error: InvalidReply, now: float) -> None:
        job, upstream = attempt.job, attempt.upstream
        job.invalid += 1
        job.invalid_at |= {upstream.name}
        if job.invalid <= job.call.invalid_retries:
            self.backoff.after_invalid(job, upstream, now)
            self._retry(attempt, str(error))
        elif self._others_live(attempt):
            self._retry(attempt, str(error))
        else:
            self._blame(attempt, str(error))

    def _blame(self, attempt: Attempt, problem: str) -> None:
        """Fail a job that its sources could not judge, now or when it is known whether they judge others."""
        job = attempt.job
        job.last_problem = problem
        if self.undecided.add(job, problem):
            job.live.remove(attempt)
            job.past.append(attempt)

    def forget(self, job: Job) -> None:
        """Forget `job`, which has ended."""
        self.undecided.discard(job)
        self.backoff.forget(job)

    def _transient(self, attempt: Attempt, error: SourceError, now: float, *, excused: bool) -> None:
        job, upstream = attempt.job, attempt.upstream
        job.failed_at = min(job.failed_at, now)
        if excused:
            job.excused += 1
        elif attempt.probe and job.probes_left > 0:
            # A probe often fails because of its source, so its failure says little about the sample.
            job.probes_left -= 1
        else:
            job.failures += 1
        if not excused and job.failures >= self._max_attempts and not self._others_live(attempt):
            self._jobs.fail(job, "exhausted", str(error))
            return
        if not attempt.probe:
            # Probes need no backoff, because `probing` sets their pace.
            self.backoff.after_failure(job, upstream, now)
        job.rests_until = now + upstream.retries.withdraw(now)
        self._retry(attempt, str(error))

    def _raised(self, attempt: Attempt, error: SourceError, now: float) -> None:
        job, upstream = attempt.job, attempt.upstream
        job.failures += 1
        job.suspect = True
        before = job.answers_before.get(upstream.name)
        job.answers_before.setdefault(upstream.name, upstream.answers)
        is_to_blame = before is not None and upstream.answers > before
        if (is_to_blame or job.failures >= self._max_attempts) and not self._others_live(attempt):
            self._jobs.fail(job, "exhausted", str(error))
            return
        self.backoff.after_raised(job, upstream, now)
        self._retry(attempt, str(error))

    def _fault(self, attempt: Attempt, error: SampleFault, *, had_whole_limit: bool) -> None:
        job = attempt.job
        job.faults += 1
        job.suspect = True
        if (had_whole_limit or job.faults >= MAX_FAULTS) and not self._others_live(attempt):
            self._jobs.fail(job, error.reason, str(error))
        else:
            self._retry(attempt, str(error))

    def _permanent(self, attempt: Attempt, error: PermanentError, now: float, *, gone: bool) -> None:
        job, upstream = attempt.job, attempt.upstream
        job.barred |= {upstream.name}
        if isinstance(error, SampleRefused):
            job.refused_for = error.reason
        if isinstance(error, SourceUnusable):
            if upstream.health.refused(attempt, str(error), now, certain=error.certain):
                self._fail_stranded()
        else:
            if error.status in OF_THE_REQUEST:
                job.refused_at |= {upstream.name}
                # The source is up: it has read the request.
                upstream.breaker.succeeded()
                self.backoff.release(upstream)
            else:
                upstream.breaker.abandoned(probe=attempt.decides)
        if gone or job.ended:
            return
        if job.refused_at.issuperset(job.call.sources) and not self._others_live(attempt) and job.call.clear_blame:
            self._blame(attempt, str(error))
        else:
            self._retry(attempt, str(error))

    def _fail_stranded(self) -> None:
        """Fail the waiting jobs that have no source left."""
        for job in list(self._jobs.waiting_jobs()):
            names = [name for name in job.call.sources if name not in job.barred]
            reasons = [
                f"{name}: {self._upstreams[name].health.unusable}"
                for name in names
                if self._upstreams[name].health.unusable
            ]
            if names and len(reasons) == len(names):
                self._jobs.fail(job, "no_source", f"no source can take it ({'; '.join(reasons)})")

    def _others_live(self, attempt: Attempt) -> bool:
        return any(other is not attempt for other in attempt.job.live)

    def _retry(self, attempt: Attempt, problem: str) -> None:
        job = attempt.job
        job.live.remove(attempt)
        job.past.append(attempt)
        job.last_problem = problem
        if not job.ended and not job.live:
            self._jobs.enqueue(job)
