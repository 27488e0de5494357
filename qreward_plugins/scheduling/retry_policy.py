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
                      (`Health.excuses`). After a time-out that does, it goes after all other samples
    permanent         no further try at this source. With `Call.clear_blame`, a 400, 413 or 422 from all sources is an
                      invalid reply if the sources answer other jobs. A source that refuses many different jobs in a
                      row is out: jobs without another source fail at once, and later jobs probe it

A job with another attempt under way does not end. The deadline of a job always ends it. Its attempts are then
cancelled, or left to end if late answers are wanted; the result never changes.

An attempt that takes far too long is looked at before it ends. If its source has fallen silent, the jobs of all its
attempts are queued again. Otherwise only this attempt is given up.
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
from ..observers import AttemptEnded, Observers
from ..observers.events import DETAIL_CHARS, AttemptResult, short
from ..sources.base import Reply
from ..spent import NO_USAGE
from .attempts import Attempt, Ending
from .jobs import MAX_FAULTS, MAX_RESCUES, MAX_RESTARTS, Job, JobHost
from .undecided import Undecided
from .upstream import Upstream

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 20.0
OF_THE_REQUEST = (400, 413, 422)
"""Statuses of servers that refuse this one request."""
RAISED_BACKOFF_S = 3.0
LONGEST_RAISED_BACKOFF_S = 60.0
THROTTLED_TO_REST = 3
"""Throttled attempts of one sample from which on others go first, each time for as long as the pause, within bounds."""
SHORTEST_THROTTLED_REST_S = 0.5
LONGEST_REST_S = 10.0
SHORTEST_INVALID_REST_S = 0.5
"""Shortest time, in seconds, for which a job avoids a source that gave it an invalid verdict, if it has another."""
RESCUE_SILENT_FROM = 1.0
"""Age, as a multiple of the expected latency, from which an attempt is given up when its source fell silent."""
RESCUE_FAILING_FROM = 1.5
"""The same for a source that errs: what it has not refused at once, it may still answer."""
GIVE_UP_AT = 8.0
"""Age from which an attempt is given up and its job starts anew, if it could not be hedged: even if it were a straggler
that ends at ten times the usual time, nothing would be lost."""
GIVE_UP_AFTER_S = 5.0
LOST_AT = 2.0
"""Age of an overdue probe, as a multiple of what an answered one took, from which on it will not be answered."""


class RetryPolicy:
    """Decides what happens to jobs when attempts end. Times are seconds of the event loop's clock.

    `max_attempts` bounds a job's failed attempts. `keeps_late`: attempts of a failed job that have been sent are left
    to end, and its caller is told the answer.
    """

    def __init__(
        self,
        host: JobHost,
        upstreams: Mapping[str, Upstream],
        *,
        rng: random.Random,
        max_attempts: int,
        keeps_late: bool,
        observers: Observers,
    ) -> None:
        self._host = host
        self._observers = observers
        self._upstreams = upstreams
        self._rng = rng
        self._max_attempts = max_attempts
        self.keeps_late = keeps_late
        self._resting: dict[str, dict[Job, None]] = {name: {} for name in upstreams}
        self.undecided = Undecided(host, upstreams)

    def _rest(self, job: Job, upstream: Upstream, until: float) -> None:
        """Keep `job` away from a source that failed it, until `until` or the source's next answer."""
        job.rested_at[upstream.name] = until
        self._resting[upstream.name][job] = None

    def _release(self, upstream: Upstream) -> None:
        """Queue the jobs again that avoid the source because it failed them: it has answered."""
        resting, self._resting[upstream.name] = self._resting[upstream.name], {}
        for job in resting:
            if not job.ended and job.rested_at.pop(upstream.name, None) is not None and not job.live:
                self._host.enqueue(job)

    def older(self, attempt: Attempt, now: float) -> None:
        """Look at an attempt that has grown older: its source may have fallen silent, or it may be hopeless itself."""
        job, upstream = attempt.job, attempt.upstream
        if upstream.health.silent(attempt, now) or upstream.health.resting_in_silence:
            self._rescue(upstream, now, RESCUE_SILENT_FROM)
        if (
            not attempt.rescued
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
        """End a call of a local function that keeps others waiting; its sample is tried once more, after them."""
        if attempt.result or attempt.rescued or attempt.job.ended:
            return
        attempt.upstream.set_aside += 1
        attempt.rescued = True
        attempt.cancel()
        took_s = now - attempt.sent_at
        error = SampleFault(f"{attempt.upstream.name} had not ended after {took_s:.1f} s, others waited")
        self._fault(attempt, error, had_whole_limit=False)

    def lost(self, attempt: Attempt, now: float) -> None:
        """Give up an overdue probe that takes the place of the next one."""
        if not attempt.job.ended:
            self._give_up(attempt, now, f"{attempt.upstream.name} did not answer a probe")

    def call_back(self, upstream: Upstream, *, sent: bool) -> None:
        """Take back the attempts at a source that have not been sent, and with `sent` the others, too: their jobs wait
        again, and nothing is held against anybody.
        """
        for attempt in list(upstream.live):
            unsent = attempt.reservation.sent_at == -math.inf
            if (sent or unsent) and not (attempt.result or attempt.rescued or attempt.job.ended):
                attempt.rescued = True
                attempt.cancel()
                self._retry(attempt, "it was called back, because the share of its limits had ended")

    def cancelled(self, attempt: Attempt, now: float) -> None:
        """Draw the consequences of an attempt that was cancelled, though not by us: it failed, or was never sent."""
        if attempt.rescued or attempt not in attempt.job.live:
            return
        if attempt.withheld:
            attempt.rescued = True
            self._retry(attempt, "it was not sent, because the share of its limits had ended")
        else:
            attempt.result = "failed"
            self.take(
                attempt, TransientError(f"the call at {attempt.upstream.name} was cancelled by another task"), now
            )

    def _rescue(self, upstream: Upstream, now: float, from_age: float) -> None:
        """Give up the older attempts of a source that is given a rest, and let their jobs go elsewhere."""
        for attempt in list(upstream.live):
            # A probe is given the time to answer: how else could a source prove that it is well, only slower?
            spared = attempt.probe and not (attempt.superseded and self._alternative(attempt.job, upstream))
            # That the source is down is certain by now, so what was expected counts, not what is still possible.
            if attempt.age(now) >= from_age and not spared and not attempt.job.ended:
                self._give_up(attempt, now, f"{upstream.name} fell silent")

    def _give_up(self, attempt: Attempt, now: float, why: str, *, for_age: bool = False) -> None:
        """End an attempt that might still be answered. That is our choice, so it does not end the sample."""
        if attempt.result or attempt.rescued:
            return
        attempt.rescued = True
        attempt.cancel()
        job = attempt.job
        probes = attempt.probe and job.probes_left > 0
        excused = False
        if not probes and job.failures + 1 >= self._max_attempts:
            excused = for_age or job.rescues < MAX_RESCUES
            job.rescues += not for_age
        self._transient(attempt, TransientError(why), now, excused=excused)

    def take(self, attempt: Attempt, ending: Ending, now: float) -> None:
        """Draw the consequences of an attempt's end."""
        job, upstream = attempt.job, attempt.upstream
        upstream.heard(now)
        was_open = not upstream.breaker.closed
        if ending is None or isinstance(ending, InvalidReply):
            reply = attempt.reply or Reply()  # a refusal may come without one
            cost_usd = upstream.answered(attempt, reply, now)
            job.cost_usd += cost_usd
            if reply.usage is not None:
                job.usage = reply.usage if job.usage is NO_USAGE else job.usage + reply.usage
            self.tell(attempt, ending, now, cost_usd)
            valid = attempt.result == "valid"
            alternative = not valid and self._alternative(job, upstream)
            upstream.health.judged(valid, now, probe=attempt.decides, alternative=alternative)
            if was_open and upstream.breaker.closed:
                self._recovered(upstream, now - attempt.started_at, now)
            elif upstream.local:
                self._release(upstream)
            if attempt.result == "valid":
                self.undecided.decide(others_live=True)
        else:
            self.tell(attempt, ending, now)
        late = job.ended
        gone = late or attempt.rescued
        if ending is None:
            answer = job.answer(attempt, now)
            if not late:
                self._host.finish(job, answer)
            elif self.keeps_late:
                job.caller.late(answer)
        elif isinstance(ending, Throttled):
            upstream.throttled(ending.retry_after_s, attempt.started_at, now, error=str(ending))
            upstream.breaker.abandoned(probe=attempt.decides)
            problem = str(ending)
            if upstream.oversize(attempt.request):
                # It went alone; once more, and everybody else would wait for an empty window again.
                job.barred |= {upstream.name}
                problem += f" (it went alone, because it may take {upstream.tokens(attempt.request):,} tokens)"
            job.throttled += 1
            if job.throttled >= THROTTLED_TO_REST and self._delays_others(job, upstream):
                # It may be this sample that is throttled, as a request too large for a limit is: the others go first.
                pause_s = upstream.pauses.left_s(now)
                job.rested_at[upstream.name] = (
                    now + pause_s + min(max(SHORTEST_THROTTLED_REST_S, pause_s), LONGEST_REST_S)
                )
            if not gone:
                self._retry(attempt, problem)
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
            if attempt.timed_out:
                upstream.quota.timed_out(now, sent_at=attempt.started_at)
            if upstream.health.failed(now, probe=attempt.decides, sample=job.sequence, error=str(ending)):
                self._rescue(upstream, now, RESCUE_FAILING_FROM)
            # A job that failed in the rescue may have been the last that its batch waited for, which ended this one.
            if not job.ended:
                excused = upstream.health.excuses(attempt)
                # Its next try may take a place for as long again: only when no other sample needs it.
                job.suspect = job.suspect or (attempt.timed_out and not excused)
                self._transient(attempt, ending, now, excused=excused)

    def tell(self, attempt: Attempt, ending: Ending | Literal["cancelled"], now: float, cost_usd: float = 0.0) -> None:
        """Tell observers, once, that an attempt has ended."""
        if attempt.told:
            return
        attempt.told = True
        job, reply = attempt.job, attempt.reply
        self._observers.emit(
            AttemptEnded(
                now,
                job.sequence,
                attempt.number,
                job.call.name,
                attempt.upstream.name,
                _result(ending),
                now - attempt.started_at,
                reply.usage if reply is not None and reply.usage is not None else NO_USAGE,
                cost_usd,
                attempt.timed_out and isinstance(ending, TransientError),
                job.ended,
                "" if ending is None or ending == "cancelled" else short(str(ending), DETAIL_CHARS),
            )
        )

    def _delays_others(self, job: Job, upstream: Upstream) -> bool:
        """Whether others wait for `upstream` that were throttled less often than `job`."""
        others = (
            other for other in self._host.waiting_jobs() if other is not job and upstream.name in other.call.sources
        )
        return any(other.throttled < job.throttled for other in others)

    def _recovered(self, upstream: Upstream, took_s: float, now: float) -> None:
        """Use a source that is well again at once. The probe that it answered took `took_s`; those that it should have
        answered by now are lost.
        """
        self._release(upstream)
        for attempt in list(upstream.live):
            lost = attempt.superseded and now - attempt.started_at > LOST_AT * took_s
            if lost and not attempt.job.ended:
                self._give_up(attempt, now, f"{upstream.name} was down when it was sent")

    def _alternative(self, job: Job, upstream: Upstream, *, untried: bool = False) -> bool:
        """Whether another source could serve `job` that does not answer with garbage; `untried`: nor did so to it."""
        without = job.barred | {upstream.name} | (job.invalid_at if untried else set())
        others = (self._upstreams[name] for name in job.call.sources if name not in without)
        return any(not other.health.unusable and other.breaker.closed and not other.health.garbled for other in others)

    def _invalid(self, attempt: Attempt, error: InvalidReply, now: float) -> None:
        job, upstream = attempt.job, attempt.upstream
        job.invalid += 1
        job.invalid_at |= {upstream.name}
        if job.invalid <= job.call.invalid_retries:
            others = set(job.call.sources) - job.barred - {upstream.name}
            # Another source first, but not for longer than it might take: the others may be out of quota for minutes.
            rest_s = max(SHORTEST_INVALID_REST_S, 2 * upstream.speed.expected_s(job.size)) if others else 0.0
            job.rested_at[upstream.name] = now + rest_s
            self.keep_away(job, now)
            self._retry(attempt, str(error))
        elif self._others_live(attempt):
            self._retry(attempt, str(error))
        else:
            self._blame(attempt, str(error))

    def keep_away(self, job: Job, now: float) -> None:
        """Keep `job` from sources that answered it with garbage while another one, however busy, may judge it."""
        if now > (job.submitted_at + job.deadline_at) / 2:
            return
        for name in job.invalid_at - job.barred:
            upstream = self._upstreams[name]
            if job.rested_at.get(name, -math.inf) <= now and self._alternative(job, upstream, untried=True):
                rest_s = max(SHORTEST_INVALID_REST_S, 2 * upstream.speed.expected_s(job.size))
                job.rested_at[name] = now + rest_s

    def _blame(self, attempt: Attempt, problem: str) -> None:
        """End a job that its sources could not judge, once it is known whether they judge others."""
        job = attempt.job
        job.last_problem = problem
        if self.undecided.add(job, problem):
            job.live.remove(attempt)
            job.past.append(attempt)

    def forget(self, job: Job) -> None:
        """Forget a job that has ended."""
        self.undecided.discard(job)
        for name in job.rested_at:
            self._resting[name].pop(job, None)

    def _transient(self, attempt: Attempt, error: SourceError, now: float, *, excused: bool) -> None:
        job, upstream = attempt.job, attempt.upstream
        job.failed_at = min(job.failed_at, now)
        if excused:
            job.excused += 1
        elif attempt.probe and job.probes_left > 0:
            # A probe is a risk that was known; its failure says little about the sample.
            job.probes_left -= 1
        else:
            job.failures += 1
        if not excused and job.failures >= self._max_attempts and not self._others_live(attempt):
            self._host.fail(job, "exhausted", str(error))
            return
        if not attempt.probe:
            # A probe needs no backoff: the next one waits for its turn.
            doublings = min(max(0, job.failures + job.excused - 1), 10)
            longest = min(FIRST_BACKOFF_S * 2**doublings, LONGEST_BACKOFF_S)
            self._rest(job, upstream, now + self._rng.uniform(0, longest))
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
            self._host.fail(job, "exhausted", str(error))
            return
        # The tries are to outlast the outage of a service behind the function, as its breaker does not open.
        backoff_s = min(RAISED_BACKOFF_S * 2 ** (job.failures - 1), LONGEST_RAISED_BACKOFF_S)
        self._rest(job, upstream, now + self._rng.uniform(0.75, 1.25) * backoff_s)
        self._retry(attempt, str(error))

    def _fault(self, attempt: Attempt, error: SampleFault, *, had_whole_limit: bool) -> None:
        job = attempt.job
        job.faults += 1
        job.suspect = True
        if (had_whole_limit or job.faults >= MAX_FAULTS) and not self._others_live(attempt):
            self._host.fail(job, error.reason, str(error))
        else:
            self._retry(attempt, str(error))

    def _permanent(self, attempt: Attempt, error: PermanentError, now: float, *, gone: bool) -> None:
        job, upstream = attempt.job, attempt.upstream
        job.barred |= {upstream.name}
        if isinstance(error, SampleRefused):
            job.refused_for = error.reason
        if isinstance(error, SourceUnusable):
            if upstream.health.refused(attempt, str(error), now, certain=error.certain):
                self._strand()
        else:
            if error.status in OF_THE_REQUEST:
                job.refused_at |= {upstream.name}
                # It is up: it has read this request, and answers others.
                upstream.breaker.succeeded()
                self._release(upstream)
            else:
                upstream.breaker.abandoned(probe=attempt.decides)
        if gone or job.ended:
            return
        if job.refused_at.issuperset(job.call.sources) and not self._others_live(attempt) and job.call.clear_blame:
            self._blame(attempt, str(error))
        else:
            self._retry(attempt, str(error))

    def _strand(self) -> None:
        """Fail what waits for nothing but sources that are out."""
        for job in list(self._host.waiting_jobs()):
            names = [name for name in job.call.sources if name not in job.barred]
            reasons = [
                f"{name}: {self._upstreams[name].health.unusable}"
                for name in names
                if self._upstreams[name].health.unusable
            ]
            if names and len(reasons) == len(names):
                self._host.fail(job, "no_source", f"no source can take it ({'; '.join(reasons)})")

    def _others_live(self, attempt: Attempt) -> bool:
        return any(other is not attempt for other in attempt.job.live)

    def _retry(self, attempt: Attempt, problem: str) -> None:
        job = attempt.job
        job.live.remove(attempt)
        job.past.append(attempt)
        job.last_problem = problem
        if not job.ended and not job.live:
            self._host.enqueue(job)


def _result(ending: Ending | Literal["cancelled"]) -> AttemptResult:
    if ending is None:
        return "answered"
    if ending == "cancelled":
        return "cancelled"
    if isinstance(ending, InvalidReply):
        return "invalid"
    if isinstance(ending, Throttled):
        return "throttled"
    return "refused" if isinstance(ending, PermanentError) else "failed"
