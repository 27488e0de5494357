"""The dispatcher: one queue for the whole process, and a job is bound to a source only when that source can send it.

Binding late is what makes batches finish early: nothing waits behind a source that turned out slow, throttled or dead
while another one idles. Everything happens in steps of the event loop, without locks: `_pump` looks at all sources and
hands out jobs until no open source has anything to do, and whatever changes the picture (a submission, the end of an
attempt, a timer) asks for the next pump. Submissions of one loop iteration are pumped together, so that a batch is
ordered as a whole.

How an attempt's end is treated:

    valid verdict     the job is done
    invalid verdict   another try elsewhere, as many as the judge allows; then the failure is `verdict`, unless the
                      sources answer everybody else with garbage too: then it is `infra`
    throttled         the source pauses, the job goes back to the front and may go elsewhere at once; not a failure
    transient         elsewhere at once, to the same source after full jitter (AWS Architecture Blog, "Exponential
                      Backoff And Jitter"); `max_attempts` failures end the job
    permanent         never again at this source; source unusable: nobody's job goes there any more

A job's deadline timer ends it whatever its attempts are doing, and whoever comes late finds the future done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
from collections.abc import Mapping

from ..errors import InputError, InvalidVerdict, PermanentError, SourceUnusable, Throttled, TransientError
from ..judges.base import Judge
from ..samples import Cause, Failed, Outcome, Sample, Scored, Verdict
from ..sources.base import Reply
from .attempts import Attempt
from .jobs import Job, ReadyQueue
from .lane import Lane

_log = logging.getLogger("qreward_plugins.scheduling")

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 20.0
SHORTEST_WAKE_S = 1e-4
SHORTEST_INVALID_REST_S = 0.5
"""The least time for which a job keeps away from a source that gave it an invalid verdict, if there is another one."""


class Dispatcher:
    """Serves jobs over the lanes of one event loop, the one that runs when it is made.

    `rng` draws the jitter; with the same seed, replies and submissions in virtual time the schedule is the same.
    `max_attempts` bounds a sample's failed attempts; throttled ones do not count.
    """

    def __init__(self, lanes: Mapping[str, Lane], *, rng: random.Random, max_attempts: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._lanes = lanes
        self._rng = rng
        self._max_attempts = max_attempts
        self._queue = ReadyQueue()
        self._jobs: dict[Job, None] = {}
        self._attempts: dict[Job, Attempt] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._sequence = itertools.count()
        self._pump_due = False
        self._wake: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Jobs without an attempt under way."""
        return len(self._jobs) - len(self._attempts)

    def now(self) -> float:
        """The event loop's clock, in seconds."""
        return self._loop.time()

    def submit(self, sample: Sample, judge: Judge, *, deadline_s: float) -> asyncio.Future[Outcome]:
        """Take a sample in; the future has its outcome at the latest `deadline_s` seconds from now, and never an
        exception.

        Cancelling the future drops the job and cancels its attempt.
        """
        future: asyncio.Future[Outcome] = self._loop.create_future()
        screened = judge.screen(sample)
        if screened is not None:
            future.set_result(screened)
            return future
        try:
            request = judge.request(sample, attempt=0)
        except InputError as error:
            future.set_result(Failed(Cause.INFRA, "input", str(error), judge=judge.name))
            return future
        now = self._loop.time()
        sequence = next(self._sequence)
        job = Job(sample, judge, future, now, now + deadline_s, request, sequence, size=request.size)
        self._jobs[job] = None
        job.deadline_timer = self._loop.call_at(job.deadline_at, self._deadline, job)
        future.add_done_callback(lambda _: self._forget(job))
        self._enqueue(job)
        return future

    async def aclose(self) -> None:
        """End every job as failed (`infra/closed`), and wait until every attempt has given back what it held."""
        for job in list(self._jobs):
            self._fail(job, Cause.INFRA, "closed", "the engine was closed before the sample was scored")
        await asyncio.sleep(0)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)
        if self._wake is not None:
            self._wake.cancel()

    # Placing jobs

    def _enqueue(self, job: Job) -> None:
        """Put a job where it has to wait: into the queue, to rest, or out as failed."""
        now = self._loop.time()
        self._queue.discard(job)
        if job.rest_timer is not None:
            job.rest_timer.cancel()
            job.rest_timer = None
        for name in job.judge.sources:
            lane = self._lanes[name]
            if lane.unusable or not lane.quota.fits_ever(lane.tokens(job.request)):
                job.barred.add(name)
        live = [name for name in job.judge.sources if name not in job.barred]
        if not live:
            self._fail(job, Cause.INFRA, "no_source", self._why_no_source(job))
            return
        eligible = job.eligible(now)
        if eligible:
            self._queue.push(job, eligible)
            self._ask_for_pump()
        resting = [job.rested_at[name] for name in live if job.rested_at.get(name, now) > now]
        if resting:
            job.rest_timer = self._loop.call_at(min(resting), self._rested, job)

    def _rested(self, job: Job) -> None:
        if job not in self._attempts and not job.future.done():
            self._enqueue(job)

    def _ask_for_pump(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        now = self._loop.time()
        open_lanes = {name: lane for name, lane in self._lanes.items() if lane.wait_s(0, now) <= 0}
        while open_lanes:
            popped = self._queue.pop(open_lanes)
            if popped is None:
                break
            job, eligible = popped
            candidates = [lane for name, lane in open_lanes.items() if name in eligible]
            ready = [lane for lane in candidates if lane.wait_s(lane.tokens(job.request), now) <= 0]
            if ready:
                lane = min(ready, key=lambda lane: (lane.expected_s(), lane.quota.in_flight / lane.quota.concurrency))
                self._start(job, lane, now)
                if lane.wait_s(0, now) > 0:
                    del open_lanes[lane.name]
            elif all(lane.quota.fits_ever(lane.tokens(job.request)) for lane in candidates):
                # The job's tokens do not fit yet. Smaller jobs must not overtake it for ever, so these sources wait for
                # it.
                self._queue.push(job, eligible)
                for lane in candidates:
                    del open_lanes[lane.name]
            else:
                self._enqueue(job)
        self._set_wake(now)

    def _set_wake(self, now: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        wait = float("inf")
        for name, lane in self._lanes.items():
            job = self._queue.waiting_for(name)
            if job is not None:
                wait = min(wait, lane.wait_s(lane.tokens(job.request), now))
        if wait < float("inf"):
            self._wake = self._loop.call_at(now + max(wait, SHORTEST_WAKE_S), self._ask_for_pump)

    # Attempts

    def _start(self, job: Job, lane: Lane, now: float) -> None:
        if job.attempts:
            job.request = job.judge.request(job.sample, attempt=job.attempts)
        if job.rest_timer is not None:
            job.rest_timer.cancel()
        reservation = lane.reserve(job.request, now)
        attempt = Attempt(job, lane, job.request, reservation, now, probe=not lane.breaker.closed)
        lane.breaker.started()
        lane.counters.requests += 1
        lane.counters.peak_in_flight = max(lane.counters.peak_in_flight, lane.quota.in_flight)
        job.attempts += 1
        job.last_source = lane.name
        self._attempts[job] = attempt
        attempt.task = self._loop.create_task(self._run(attempt))
        self._ending.add(attempt.task)
        attempt.task.add_done_callback(lambda task: self._ended(attempt, task))
        attempt.start_timer(self._loop)

    async def _run(self, attempt: Attempt) -> None:
        job, lane = attempt.job, attempt.lane
        reply: Reply | None = None
        try:
            reply = await lane.source.send(attempt.request, on_sent=attempt.on_sent)
            verdict = job.judge.verdict(attempt.request, reply)
        except asyncio.CancelledError:
            if not attempt.timed_out:
                raise
            lane.counters.timeouts += 1
            self._transient(attempt, TransientError(f"{lane.name} gave no answer within {lane.timeout_s:g} s"))
        except InvalidVerdict as error:
            self._reply_came(attempt, reply)
            self._invalid(attempt, error)
        except Throttled as error:
            # Nothing was written; but providers count the prompts that they reject, too.
            attempt.reservation.release(self._loop.time(), completion_tokens=0)
            self._throttled(attempt, error)
        except TransientError as error:
            self._transient(attempt, error)
        except PermanentError as error:
            self._permanent(attempt, error)
        except Exception as error:
            # A bug in a judge or a source must cost this sample, not the run.
            _log.exception("unexpected %s from source %s or judge %s", type(error).__name__, lane.name, job.judge.name)
            self._permanent(attempt, PermanentError(f"unexpected {type(error).__name__}; see the log"))
        else:
            self._reply_came(attempt, reply)
            lane.judged(True)
            self._scored(attempt, verdict, reply)

    def _ended(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        """Clean up after an attempt, however it ended: nothing it held may outlive its task."""
        self._ending.discard(task)
        attempt.reservation.release(self._loop.time())
        if attempt.timer is not None:
            attempt.timer.cancel()
        if task.cancelled():
            attempt.lane.counters.cancelled += 1
            attempt.lane.breaker.abandoned(probe=attempt.probe)
        elif task.exception() is not None:
            _log.error("an attempt at %s broke the dispatcher", attempt.lane.name, exc_info=task.exception())
            self._fail(attempt.job, Cause.INFRA, "bug", f"unexpected {type(task.exception()).__name__}; see the log")
        self._ask_for_pump()

    def _reply_came(self, attempt: Attempt, reply: Reply | None) -> None:
        job, lane = attempt.job, attempt.lane
        now = self._loop.time()
        usage = reply.usage if reply is not None else None
        if usage is None:
            attempt.reservation.release(now)
        else:
            attempt.reservation.release(
                now, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
            )
            job.usage += usage
        job.cost_usd += lane.answered(attempt.request, usage, now - attempt.started_at)

    # What the end of an attempt means for its job

    def _scored(self, attempt: Attempt, verdict: Verdict, reply: Reply) -> None:
        job = attempt.job
        self._finish(
            job,
            Scored(
                dataclasses.replace(
                    verdict,
                    judge=job.judge.name,
                    source=attempt.lane.name,
                    model=reply.model or attempt.lane.source.model,
                    attempts=job.attempts,
                    usage=job.usage,
                    latency_s=self._loop.time() - job.submitted_at,
                    cost_usd=job.cost_usd,
                )
            ),
        )

    def _invalid(self, attempt: Attempt, error: InvalidVerdict) -> None:
        job, lane = attempt.job, attempt.lane
        lane.judged(False)
        job.invalid += 1
        job.invalid_at.add(lane.name)
        if job.invalid <= job.judge.invalid_retries:
            others = set(job.judge.sources) - job.barred - {lane.name}
            # Another source first, but not for longer than it might take: the others may be out of quota for minutes.
            rest_s = max(SHORTEST_INVALID_REST_S, 2 * lane.expected_s()) if others else 0.0
            self._rest_and_retry(attempt, str(error), rest_s)
        elif all(self._lanes[name].answers_garbage() for name in job.invalid_at):
            self._fail(job, Cause.INFRA, "garbage", f"{error} (most replies of this source are invalid)")
        else:
            self._fail(job, Cause.VERDICT, "invalid", str(error))

    def _throttled(self, attempt: Attempt, error: Throttled) -> None:
        lane = attempt.lane
        lane.throttled(error.retry_after_s, attempt.started_at, self._loop.time())
        lane.breaker.abandoned(probe=attempt.probe)
        self._retry(attempt, str(error))

    def _transient(self, attempt: Attempt, error: TransientError) -> None:
        job = attempt.job
        attempt.lane.failed(self._loop.time(), probe=attempt.probe)
        job.failures += 1
        if job.failures >= self._max_attempts:
            self._fail(job, Cause.INFRA, "exhausted", str(error))
            return
        longest = min(FIRST_BACKOFF_S * 2 ** (job.failures - 1), LONGEST_BACKOFF_S)
        self._rest_and_retry(attempt, str(error), self._rng.uniform(0, longest))

    def _permanent(self, attempt: Attempt, error: PermanentError) -> None:
        job, lane = attempt.job, attempt.lane
        lane.counters.permanent += 1
        lane.breaker.abandoned(probe=attempt.probe)
        job.barred.add(lane.name)
        if isinstance(error, SourceUnusable) and not lane.unusable:
            lane.take_out(str(error))
            for waiting in [job for job in self._jobs if job not in self._attempts]:
                self._enqueue(waiting)
        self._retry(attempt, str(error))

    def _rest_and_retry(self, attempt: Attempt, problem: str, rest_s: float) -> None:
        attempt.job.rested_at[attempt.lane.name] = self._loop.time() + rest_s
        self._retry(attempt, problem)

    def _retry(self, attempt: Attempt, problem: str) -> None:
        job = attempt.job
        self._attempts.pop(job, None)
        job.last_problem = problem
        if not job.future.done():
            self._enqueue(job)

    # Ends

    def _deadline(self, job: Job) -> None:
        detail = job.last_problem or (
            f"{job.last_source} had not answered" if job in self._attempts else "no source could take it in time"
        )
        waited = self._loop.time() - job.submitted_at
        self._fail(job, Cause.INFRA, "deadline", f"no verdict within {waited:.1f} s: {detail}")

    def _why_no_source(self, job: Job) -> str:
        if job.last_problem:
            return job.last_problem
        reasons = [
            f"{name}: {self._lanes[name].unusable or 'larger than its tokens_per_minute'}" for name in job.barred
        ]
        return "no source can take it (" + "; ".join(sorted(reasons)) + ")"

    def _fail(self, job: Job, cause: Cause, reason: str, detail: str) -> None:
        self._finish(
            job,
            Failed(
                cause,
                reason,
                detail,
                floor=job.judge.floor(cause),
                judge=job.judge.name,
                source=job.last_source,
                attempts=job.attempts,
                usage=job.usage,
                latency_s=self._loop.time() - job.submitted_at,
                cost_usd=job.cost_usd,
            ),
        )

    def _finish(self, job: Job, outcome: Outcome) -> None:
        if not job.future.done():
            job.future.set_result(outcome)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """Let go of a job that has its outcome or was cancelled by its caller."""
        if job not in self._jobs:
            return
        del self._jobs[job]
        self._queue.discard(job)
        for timer in (job.deadline_timer, job.rest_timer):
            if timer is not None:
                timer.cancel()
        attempt = self._attempts.pop(job, None)
        if attempt is not None and attempt.task is not asyncio.current_task(self._loop):
            attempt.cancel()
