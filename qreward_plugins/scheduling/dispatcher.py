"""The dispatcher takes calls and gives answers. It runs the planner's placements and fails calls past their deadline.

A job gets its source only when that source can send it at once. So no job waits behind a source that turns out slow,
throttled or dead while another one idles. There are no locks, because everything runs in steps of the event loop. One
step is a pump: it asks the planner what can be sent now, and sends it. A submission, the end of an attempt and a timer
ask for the next pump. Submissions of one loop iteration share a pump, so that a batch is ordered as a whole.

A job always ends by its deadline. Its attempts are then cancelled; its result never changes. `retry_policy.py` decides
what the end of an attempt means.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..config import Scheduling
from ..errors import input_problem
from ..observers import AttemptStarted, Observers
from ..quotas.budgets import DollarBudget
from ..sources import Source
from ..system.threads import cancel_all
from .attempts import Attempt, AttemptError
from .backoff import Backoff
from .batches import Batch, Batches, Member
from .calls import Answer, Call, Caller, Unanswered
from .jobs import Job, why_not_in_time
from .planner import Planner
from .queue import EqualCalls
from .request_batches import RequestBatch, RequestBatches
from .retry_policy import RetryPolicy
from .timers import Alarms, Pump
from .upstream import Moves, Upstream, Upstreams

_log = logging.getLogger("qreward_plugins.scheduling")

CLOSE_WITHIN_S = 5.0
"""Longest time, in seconds, for which closing waits for requests that were cancelled."""
AGAIN_S = 0.25
"""Seconds from a step that failed because of a bug to the next one."""


class Dispatcher:
    """Serves calls over the upstreams of one event loop, the one that runs when it is made.

    `rng` draws the jitter; with the same seed, replies and submissions in virtual time the schedule is the same.
    `max_attempts` bounds a call's failed attempts; throttled ones and hedges do not count. `on_cutoff` is called with a
    batch that was cut off, after its calls have been failed. `on_pumped` is called after each pump. `observers` get the
    events. `asks_once`: see `EqualCalls`.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        *,
        rng: random.Random,
        max_attempts: int,
        settings: Scheduling,
        asks_once: bool,
        on_cutoff: Callable[[Batch], None],
        on_pumped: Callable[[float], float] | None,
        observers: Observers,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        """The event loop's clock, in seconds."""
        self._upstreams = upstreams
        self._observers = observers
        self._planner = Planner(upstreams, settings)
        self._queue = self._planner.queue
        self.batches = Batches(self.loop, upstreams, on_cutoff=self._cut_off, observers=observers)
        self._jobs: dict[Job, None] = {}
        self._arrived: list[Job] = []
        """Jobs that were submitted and are not queued yet. Some of them may have ended."""
        self._deadlines = Alarms(self.loop, self._due)
        self._pump = Pump(self.loop, self._step, on_stall=self._excuse)
        self._limits = Alarms(self.loop, Attempt.expire)
        self._backoff = Backoff(self, upstreams, self._queue, rng)
        self._retry_policy = RetryPolicy(self, upstreams, self._backoff, max_attempts=max_attempts, observers=observers)
        self._preemption = self._retry_policy.preemption
        self._adopt()
        self._closed = False
        self._equal_calls = EqualCalls(enabled=asks_once)
        self._sequence = itertools.count()
        self._on_cutoff = on_cutoff
        self._on_pumped = on_pumped

    @property
    def waiting(self) -> int:
        """Number of jobs without an attempt under way."""
        return sum(not job.live for job in self._jobs)

    def waiting_jobs(self) -> Iterable[Job]:
        """Jobs that are queued, or avoid all their sources for a while."""
        return (job for job in self._jobs if job.waits)

    def look_again(self) -> None:
        """Pump again, because what a source allows, or what waits, has changed."""
        self._pump.ask()

    def change(
        self, upstreams: Mapping[str, Upstream], moves: Moves, *, max_attempts: int, settings: Scheduling
    ) -> None:
        """Go on with other upstreams and settings. Attempts under way end where they are. Calls that wait go to the
        sources that may answer them now (`moves`); a call that has none left fails (`no_source`).
        """
        gone = self._upstreams.change(upstreams, moves)
        self._adopt()
        self._equal_calls.forget()
        self._planner.change(settings)
        self._retry_policy.max_attempts = max_attempts
        for job in list(self._jobs):
            try:
                waits = job.waits
                job.forget_sources(gone)
                self._upstreams.settle(job.call)
                if not gone.isdisjoint(job.call.sources):
                    # It keeps estimates of its size by the name of the source. The queue counts the old size.
                    self._queue.discard(job)
                    job.asks(job.call.request(job.attempts))
                if waits:
                    self._backoff.enqueue(job)
            except Exception as error:
                self._bug(job, error)
        self._pump.ask()

    def settle(self, call: Call[Any]) -> None:
        """Let `call` name the sources that may answer it now."""
        self._upstreams.settle(call)

    def _adopt(self) -> None:
        """Open the request batches of the sources, and listen to those whose replicas come, go and change."""
        for upstream in self._upstreams.values():
            if upstream.source.batch is not None and upstream.request_batches is None:
                upstream.request_batches = RequestBatches(
                    upstream, upstream.source.batch, self._queue, on_change=self._pump.ask, observers=self._observers
                )
            self._listen(upstream.source)

    def _listen(self, source: Source) -> None:
        """Pump after each change of a source whose replicas come and go: it takes calls again, or takes none."""

        def handle() -> None:
            for change in source.changes():
                self._observers.emit(change)
            self._pump.ask()

        def changed() -> None:  # any thread may call this
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(handle)

        source.listen(changed)

    def waiting_for(self, limited: Upstream | DollarBudget) -> tuple[int, float, float]:
        """What waits for a source: the number of requests, the estimate of their tokens, and the most of the first
        one. For a budget, in its units.
        """
        return self._planner.waiting(limited)

    def call_back(self, upstream: Upstream, *, sent: bool) -> None:
        """Cancel the attempts at a source that have not been sent, with `sent` all, and queue their jobs again."""
        self._preemption.call_back(upstream, sent=sent)

    def _cut_off(self, batch: Batch) -> None:
        """Fail what is left of a batch whose cut-off has come."""
        now = self.loop.time()
        for job in [job for job in self._jobs if job.batch is batch]:
            if self._retry_policy.settle(job):
                continue
            waited = now - job.submitted_at
            self.fail(job, "cutoff", f"the batch stopped waiting after {waited:.1f} s, its quorum was in")
        self._on_cutoff(batch)

    def submit(self, call: Call[Any], caller: Caller, *, member: Member, deadline_at: float) -> Job | None:
        """Accept a call of `member`. `caller` gets its result by `deadline_at`, a time of the event loop's clock.

        Return its job, or None if `caller` has its result already. A caller that does not want the result any more has
        to `drop` the job.
        """
        batch, now = member.batch, self.loop.time()
        self._upstreams.settle(call)
        try:
            request = call.request(0)
        except Exception as error:
            caller.ended(Unanswered("input", input_problem(error)))
            return None
        if deadline_at <= now:
            caller.ended(Unanswered("deadline", "its deadline had come before it was asked"))
            return None
        if batch.cut:
            caller.ended(Unanswered("cutoff", "the batch had stopped waiting already"))
            return None
        if self._closed:
            caller.ended(Unanswered("closed", "the engine was closed before the sample was scored"))
            return None
        job = Job(call, caller, member, batch, now, deadline_at, request, next(self._sequence))
        job.after = self.batches.newest
        job.probes_left = self._retry_policy.max_attempts
        self._jobs[job] = None
        batch.add(job)
        if deadline_at < math.inf:
            self._deadlines.set(job, deadline_at)
        self._arrived.append(job)
        self._pump.ask()
        return job

    def safely(self, act: Callable[[Job], None], job: Job) -> None:
        """Do something with `job`. If that fails because of a bug, end the job, so that the others go on."""
        try:
            act(job)
        except Exception as error:
            self._bug(job, error)

    def drop(self, job: Job) -> None:
        """End a job whose caller does not want the result any more, and cancel its attempts."""
        if not self.loop.is_closed():
            self.finish(job, None, self.loop.time())

    def close(self) -> None:
        """Fail every job (`closed`), and refuse further calls."""
        self._closed = True
        self._pump.close()
        self.batches.close()
        for job in list(self._jobs):
            self.fail(job, "closed", "the engine was closed before the sample was scored")

    async def aclose(self) -> None:
        """Fail every job, and wait until every attempt has released its quota (`close_all`). May be repeated."""
        self.close()
        await close_all(self._upstreams.all)
        self._limits.clear()
        self._upstreams.let_drained_go()
        self._planner.hedges.close()

    # Steps

    def _step(self, now: float) -> float:
        """Send what can be sent now; return the time of the next step."""
        try:
            due_at = self._place(now)
            if self._on_pumped is not None:
                due_at = min(due_at, self._on_pumped(now))
        except Exception as error:
            _log.error("planning failed: this is a bug", exc_info=error)
            due_at = now + AGAIN_S
        for upstream in self._upstreams.all:
            if upstream.request_batches is not None:
                due_at = min(due_at, upstream.request_batches.send_ready(now))
        self._upstreams.let_drained_go()
        if self._observers.watched:
            for upstream in self._upstreams.values():
                self._observers.state(now, upstream.name, upstream.state(now), upstream.problem(now))
        return due_at

    def _place(self, now: float) -> float:
        """Start everything that may go now; return the time by which to do it again."""
        if not (self._jobs or any(upstream.live for upstream in self._upstreams.all)):
            self._limits.clear()
            if self._planner.rests(now):
                return math.inf
        if self._arrived:
            ready, self._arrived = self._planner.arrange(self._arrived)
            for job in ready:
                if not (job.ended or self._equal_calls.joins(job)):
                    self.safely(self._backoff.enqueue, job)
        for attempt in self._planner.hedges.advance(now):
            self._preemption.check_age(attempt, now)
        for job, upstream, hedge in self._planner.placements(now):
            try:
                self._start_attempt(job, upstream, now, hedge=hedge)
            except Exception as error:
                self._bug(job, error)
        if self._retry_policy.undecided:
            self._retry_policy.decide(others_live=False)
        wake_at = self._planner.wake_at
        has_functions = any(upstream.local for upstream in self._upstreams.values())
        return min(wake_at, self._preemption.end_slices(now)) if has_functions else wake_at

    def _bug(self, job: Job, error: Exception) -> None:
        """End a job that the scheduler cannot handle, so that the others go on."""
        _log.error("the scheduler failed on a sample: this is a bug", exc_info=error)
        self.fail(job, "bug", f"unexpected {type(error).__name__}; see the log")

    def _excuse(self, since: float, now: float) -> None:
        """Do not count the time in which the event loop was blocked as latency or silence."""
        for upstream in self._upstreams.all:
            upstream.excuse(since=since, now=now)

    # Attempts

    def _start_attempt(self, job: Job, upstream: Upstream, now: float, *, hedge: bool) -> None:
        if upstream.budgets and not hedge and upstream.over_budget(job.request, now) is not None:
            self._backoff.enqueue(job)
            return
        if job.attempts:
            try:
                job.asks(job.call.request(job.attempts))
            except Exception as error:
                # The objects of a sample may behave differently the second time. That must not stop the pump.
                self.fail(job, "input", input_problem(error))
                return
        self._backoff.no_longer_waits(job)
        batches = upstream.request_batches
        batch = batches.place(job, now) if batches is not None else None
        attempt = Attempt(
            job,
            upstream,
            job.request_to(upstream.name),
            upstream.reserve(job.request, now, shares_request=batch is not None),
            now,
            expected_s=self._planner.forecast.expected_s(upstream, job.size),
            probe=not upstream.breaker.closed,
            hedge=hedge,
            uncalibrated=not upstream.speed.settled,
            number=job.attempts,
            request_batch=batch,
            set_aside=upstream.set_aside(job.request, now) if upstream.budgets else (),
        )
        job.attempts += 1
        job.last_source = upstream.name
        job.live.append(attempt)
        upstream.started(attempt)
        name, in_flight = upstream.name, upstream.quota.in_flight
        self._observers.statistics.attempt_started(name, hedge=hedge, in_flight=in_flight)
        if self._observers.watched:
            self._observers.emit(
                AttemptStarted(now, job.sequence, attempt.number, job.call.name, name, hedge, in_flight)
            )
        attempt.start(self.loop, now, self._limits, self._ended)
        if batches is not None and batch is not None:
            batches.join(batch, attempt, now)
        self._planner.hedges.watch(attempt, now)

    def _ended(self, attempt: Attempt, error: AttemptError | None) -> None:
        """Decide what becomes of an attempt's job, and clean up: nothing that the attempt held may outlive it."""
        try:
            try:
                self._retry_policy.ended(attempt, error)
            finally:
                self._pump.ask()
                self._limits.cancel(attempt, attempt.limit_at)
                attempt.leave()
            self._planner.ended(attempt)
        except Exception as bug:
            attempt.upstream.breaker.abandoned(probe=attempt.decides)
            self._bug(attempt.job, bug)
        # It refers to the other attempts that it carried, and with them to their samples.
        attempt.request_batch = None

    # Ends

    def _due(self, job: Job, now: float) -> float:
        self.safely(self.expire, job)
        return math.inf

    def expire(self, job: Job) -> None:
        """Fail a job whose deadline has come."""
        if job.ended or self._retry_policy.settle(job):
            return
        now = self.loop.time()
        waited, detail = now - job.submitted_at, why_not_in_time(job, self._upstreams, now)
        self.fail(job, "deadline", f"no answer within {waited:.1f} s: {detail}")

    def fail(self, job: Job, reason: str, detail: str, *, invalid: bool = False) -> None:
        """End a job without an answer. `invalid`: its sources answered, but never validly."""
        now = self.loop.time()
        self.finish(job, Unanswered(reason, detail, invalid, job.last_source, job.spent(now)), now)

    def finish(self, job: Job, result: Answer[Any] | Unanswered | None, now: float) -> None:
        """End a job at `now`: cancel its attempts and tell its caller the result. None: it was dropped, and nobody is
        told. Nothing happens if it has ended already.
        """
        if job.ended:
            return
        job.ended = True
        del self._jobs[job]
        self._retry_policy.undecided.pop(job, None)
        self._backoff.forget(job)
        self._deadlines.cancel(job, job.deadline_at)
        if not self._jobs:
            self._deadlines.clear()
        for attempt in job.live:
            if not attempt.result:
                attempt.cancel()
        self.batches.ended(job, result, now)
        if result is not None:
            try:
                job.caller.ended(result)
            except Exception as error:
                _log.error("a caller failed on its result: this is a bug", exc_info=error)
        for other in self._equal_calls.ended(job) if job.question is not None else ():
            if isinstance(result, Answer):
                # Nothing was spent for it.
                self.finish(other, replace(result, spent=other.spent(now), service_s=0.0), now)
            elif result is not None or not self._equal_calls.joins(other):  # one that was dropped says nothing
                self.safely(self._backoff.enqueue, other)


async def close_all(upstreams: Sequence[Upstream]) -> None:
    """Cancel the attempts at `upstreams`, and wait until all their requests have ended. One that swallows its
    cancellation is abandoned after `CLOSE_WITHIN_S`, with a warning that names its source.
    """
    requests: list[Attempt | RequestBatch] = [attempt for upstream in upstreams for attempt in upstream.live]
    for upstream in upstreams:
        for attempt in list(upstream.live):
            attempt.cancel()
        if upstream.request_batches is not None:
            requests += upstream.request_batches.under_way
    await asyncio.sleep(0)
    tasks = {request.task: request for request in requests if request.task is not None}
    for task in await cancel_all(tasks, within_s=CLOSE_WITHIN_S):
        tasks[task].abandon()
        _log.warning(
            "source %s: a request did not end within %g s of being cancelled, and is abandoned",
            tasks[task].upstream.name,
            CLOSE_WITHIN_S,
        )
    # The callbacks of the ended tasks run in the next step of the event loop.
    await asyncio.sleep(0)
