"""An attempt: one try of one job at one source. It holds a reservation of the source's quota until it is concluded.

One with a request of its own has a task, which may go on for a while after it is cancelled. One that shares a request
has none: its batch concludes it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..errors import (
    InvalidReply,
    NotStarted,
    PermanentError,
    SampleFault,
    SourceError,
    SourceHeld,
    Throttled,
    TransientError,
)
from ..observers import AttemptEnded, Observers
from ..observers.events import DETAIL_CHARS, AttemptResult, short
from ..quotas.budgets import UNITS
from ..quotas.quota import Reservation
from ..samples.spent import NO_USAGE
from ..sources.base import Reply

if TYPE_CHECKING:
    from ..sources.base import Request
    from .jobs import Job
    from .request_batches import RequestBatch
    from .timers import Alarms
    from .upstream import Upstream

_log = logging.getLogger("qreward_plugins.scheduling")

START_WITHIN_S = 120.0
"""Seconds that a source may take to begin an attempt, in addition to its time limit: an import can be slow."""

Result = Literal["", "valid", "invalid", "throttled", "failed", "cancelled"]
AttemptError: TypeAlias = InvalidReply | SourceError
"""Why an attempt gave no answer."""


@dataclass(eq=False, slots=True)
class Attempt:
    """One try of one job at one source. Times are seconds of the event loop's clock."""

    job: Job
    upstream: Upstream
    request: Request
    reservation: Reservation
    started_at: float
    expected_s: float
    """Expected latency, in seconds."""
    probe: bool
    """Whether the source's breaker was open when this attempt started, so that its end decides about the source."""
    hedge: bool
    """Whether another attempt of the same job was under way."""
    number: int = 0
    """Number of the attempt within its job, from 0."""
    order: int = 0
    """Number of the attempt at its source, from 1."""
    superseded: bool = False
    """Whether it is an overdue probe: another probe may decide about the source now."""
    uncalibrated: bool = False
    """Whether its source's latency model was not calibrated yet when it started, so that `expected_s` is corrected."""
    reply: Reply | None = None
    value: Any = None
    """What `Call.read` made of the reply, if that is valid."""
    result: Result = ""
    """How it ended; "" while it is under way."""
    ended_at: float = 0.0
    late: bool = False
    """Whether its age has reached `hedging.LATE_AT`."""
    overdue: bool = False
    """Whether its age has reached `hedging.OVERDUE_AT`."""
    given_up: bool = False
    """Whether the scheduler gave it up, so that its end says nothing about its job any more."""
    problem: str = ""
    """Why it gave no answer; "" for an answer."""
    said: str = ""
    """What its server said instead of an answer, without secrets; "" if that is not known."""
    cost_usd: float = 0.0
    answered_with_error: bool = False
    """Whether its source answered with an error, for which nobody is charged."""
    timed_out: bool = False
    counts: bool = False
    """Whether it is a failure of its job that counts."""
    sent_at: float = math.inf
    """Time at which the source reported that the request was sent; infinity if it has not."""
    together_with: tuple[Request, ...] = ()
    """All that was sent in one request with it, its own included; empty if it was sent alone, or is not sent."""
    request_batch: RequestBatch | None = None
    """The request that carries it with others; None if it has a request of its own."""
    withheld: bool = False
    """Whether it was not sent because this process's share of the source's limits had ended."""
    due_at: float = math.inf
    """Time at which its time limit is up."""
    set_aside: tuple[Reservation, ...] = ()
    """The most that it can cost, in each of its source's budgets."""
    task: asyncio.Task[None] | None = None
    limit_at: float = math.inf
    """When its time limit is looked at; infinity if it has none."""
    loop: asyncio.AbstractEventLoop = field(init=False)
    on_end: Callable[[Attempt, AttemptError | None], None] = field(init=False)

    @property
    def service_s(self) -> float:
        """Seconds from sending the request to the end of the attempt."""
        sent_at = self.reservation.sent_at
        return max(0.0, self.ended_at - (sent_at if sent_at > -math.inf else self.started_at))

    @property
    def sent(self) -> bool:
        """Whether its source reported that the request was sent."""
        return self.reservation.sent_at > -math.inf

    @property
    def gone(self) -> bool:
        """Whether its end says nothing about its job any more."""
        return self.given_up or self.job.ended

    @property
    def decides(self) -> bool:
        """Whether it is the probe whose end decides about the source."""
        return self.probe and not self.superseded

    def age(self, now: float) -> float:
        """How long it has run, as a multiple of its expected latency."""
        return (now - self.started_at) / self.expected_s

    @property
    def longest_s(self) -> float:
        """Longest latency that the answers of its source leave possible."""
        return max(self.expected_s, self.upstream.speed.longest_s(self.size))

    @property
    def size(self) -> int:
        """Bytes of everything that its request carries: this determines the latency."""
        return self.request.size if self.request_batch is None else self.request_batch.size

    @property
    def together(self) -> int:
        """Number of calls whose common request ends with it; 1 if its end is its own."""
        return 1 if self.request_batch is None or self.request_batch.answered else self.request_batch.count

    @property
    def samples(self) -> frozenset[int]:
        """The numbers of the samples whose requests end as it does: those of its request, or its own."""
        carried = self.request_batch.carried if self.request_batch is not None and self.together > 1 else ()
        return frozenset(other.job.sequence for other in carried) or frozenset((self.job.sequence,))

    @property
    def speaks(self) -> bool:
        """Whether its end counts for its source. Of several calls in one request, only one does, the first to end."""
        return self.request_batch is None or self.request_batch.speaks(self)

    def lateness(self, now: float) -> float:
        """How long it has run, as a multiple of `longest_s`."""
        return (now - self.started_at) / self.longest_s

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        now: float,
        limits: Alarms[Attempt],
        on_end: Callable[[Attempt, AttemptError | None], None],
    ) -> None:
        """Begin it, with a task if it has a request of its own. `on_end` is called with its end, and has to `leave`.

        The time limit runs from when the request is sent; connecting or starting a worker process is not part of it.
        """
        timeout_s = self.upstream.timeout_s
        self.due_at = now + START_WITHIN_S + timeout_s
        if timeout_s < math.inf:
            # The earliest time at which the limit can be up. `expire` waits longer if the request was sent later.
            self.limit_at = now + timeout_s
            limits.set(self, self.limit_at)
        self.loop, self.on_end = loop, on_end
        if self.request_batch is None:
            self.task = asyncio.Task(self._run(), loop=loop, name="qreward attempt")
            self.task.add_done_callback(self._broke)

    def cancel(self) -> None:
        """End it without an answer. If it has a task, it ends when that has ended."""
        if self.task is not None:
            self.task.cancel()
        elif self.request_batch is not None:
            self.conclude(self._no_answer())

    def abandon(self) -> None:
        """End it although its task goes on, because the source swallows its cancellation."""
        self.conclude(asyncio.CancelledError())

    def leave(self) -> None:
        """Release what it holds at its end."""
        if self.set_aside:
            usd = self._spent_usd()
            for reservation in self.set_aside:
                reservation.release(self.ended_at, completion_tokens=None if usd is None else usd * UNITS)
        self.upstream.live.pop(self, None)
        if self.task is not None:
            # The callback would cost another step of the event loop. A cancelled task keeps its error, which holds this
            # object by its traceback.
            self.task.remove_done_callback(self._broke)
            self.task = None
        if self.request_batch is not None:
            self.request_batch.leave(self)

    def _spent_usd(self) -> float | None:
        """What it did cost; None if that is not known."""
        if self.reply is not None:
            price = self.upstream.price
            by_tokens = price.input_per_million or price.output_per_million
            return None if by_tokens and self.reply.usage is None else self.cost_usd
        return 0.0 if self.answered_with_error or not self.sent else None

    async def _run(self) -> None:
        result: Reply | BaseException
        try:
            result = await self.upstream.source.send(self._request(), on_sent=self._sent)
        except Exception as error:
            # Sources report the cancellation inside of `on_sent` as a failure of their own.
            result = self._no_answer() if self.withheld else error
        if self.task is not None:
            self.conclude(result)
        # An error holds this frame by its traceback.
        del result

    def _broke(self, task: asyncio.Task[None]) -> None:
        """End it as its task did not, because that was cancelled or broke."""
        error = None if task.cancelled() else task.exception()
        if self.task is not None:
            self.conclude(error if isinstance(error, Exception) else self._no_answer())

    def conclude(self, result: Reply | BaseException) -> None:
        """End it with what came of its request. CancelledError: nobody needs an answer."""
        upstream = self.upstream
        failure: AttemptError | None = None
        try:
            if not isinstance(result, Reply):
                if isinstance(result, BaseException):
                    raise result
                raise PermanentError(f"its `send` returned a {type(result).__name__}; it must return a Reply")
            self.reply = upstream.credible(self.request, result)
            self.value, self.result = self.job.call.read(self.request, self.reply), "valid"
        except asyncio.CancelledError:
            self.result = "cancelled"
        except InvalidReply as error:
            failure, self.result = error, "invalid"
        except Throttled as error:
            failure, self.result, self.answered_with_error = error, "throttled", True
        except SourceHeld as error:
            failure, self.result = error, "cancelled"
        except SourceError as error:
            failure, self.result, self.answered_with_error = error, "failed", (error.status or 0) >= 400
        except Exception as error:
            # A bug in a judge or a source must cost this sample, not the run.
            origin = f"source {upstream.name} or judge {self.job.call.name}"
            failure, self.result = PermanentError(upstream.bugs.log(error, origin, _log)), "failed"
        self.ended_at = self.loop.time()
        if failure is not None:
            self.problem, self.said = str(failure), failure.said
        usage = None if self.reply is None else self.reply.usage
        self.reservation.release(
            self.ended_at,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            rejected=self.result == "throttled",
        )
        try:
            self.on_end(self, failure)
        finally:
            # An error holds this frame by its traceback: without this, frame, error and attempt would hold each other.
            # A source may hold the error in a frame of its own.
            if failure is not None:
                failure.__traceback__ = None
            del failure, result

    def _request(self) -> Request:
        """What its source is asked, with the way back for the pieces of a stream."""
        return self.request if self.job.call.on_text is None else replace(self.request, on_text=self._pass_on)

    def _pass_on(self, text: str) -> None:
        """Pass on a piece of the answer. A piece that comes after its end, or after that of its job, is dropped."""
        job, on_text = self.job, self.job.call.on_text
        if not text or on_text is None or self.result or self.gone or self.timed_out:
            return
        job.begun = True
        # A long text is no silence.
        self.upstream.health.heard(self.loop.time())
        on_text(text)

    def _sent(self) -> None:
        """Stamp the quota with the time at which the request is really written, and start the time limit.

        Raises CancelledError, and cancels the attempt, if its job has ended or this process's share of the source's
        limits has ended. A process that was stopped resumes here before its timers run, so only this check stops it.
        """
        now = self.loop.time()
        if not self.sent and (self.job.ended or now >= self.upstream.quota.valid_until):
            self.withhold()
            raise asyncio.CancelledError
        self.note_sent(now)

    def withhold(self) -> None:
        """Cancel it because it must not be sent any more."""
        self.withheld = True
        # Not every source passes on the error that `on_sent` raises.
        self.cancel()

    def note_sent(self, now: float) -> None:
        """Note that its request was written, and start its time limit."""
        self.reservation.sent(now)
        self.sent_at = now
        self.due_at = now + self.upstream.timeout_s
        self.job.begun |= self.job.call.once

    def _no_answer(self) -> BaseException:
        """Why it ends without an answer; CancelledError if nobody needs one."""
        upstream = self.upstream
        if self.withheld:
            return SourceHeld("it was not sent, because the share of its limits had ended")
        if not self.timed_out:
            # A cancellation by anything else (a function, a library) is a failure.
            error = TransientError(f"the call at {upstream.name} was cancelled by another task")
            return asyncio.CancelledError() if self.gone else error
        # A function that was called hangs because of its arguments.
        if self.sent_at == math.inf:
            problem = f"{upstream.name} could not begin within {START_WITHIN_S + upstream.timeout_s:g} s"
            return NotStarted(problem) if upstream.local else TransientError(problem)
        problem = f"{upstream.name} gave no answer within {upstream.timeout_s:g} s"
        return SampleFault(problem, reason="hung") if upstream.local else TransientError(problem)

    def expire(self, now: float) -> float:
        """End the attempt if its time limit is up. Return when to check again; infinity: not again."""
        if now < self.due_at:
            # A request that is not sent yet may be sent right after this, and its time is up before `due_at` then.
            self.limit_at = self.due_at if self.sent_at < math.inf else min(self.due_at, now + self.upstream.timeout_s)
            return self.limit_at
        self.timed_out = True
        self.cancel()
        return math.inf


def is_one_replicas(attempt: Attempt, error: Exception) -> bool:
    """Whether a failure is that of one replica and not of its source: another replica answers, as far as is known. The
    second failure of a job counts, because an outage meets one replica after the other, and so does that of a probe.
    """
    job = attempt.job
    is_first = not (job.failures or job.excused)
    return isinstance(error, TransientError) and error.of_one_replica and is_first and not attempt.decides


def report_end(observers: Observers, attempt: Attempt, error: AttemptError | None) -> None:
    """Tell observers of the end of an attempt."""
    reply, job, source = attempt.reply, attempt.job, attempt.upstream.name
    result: AttemptResult = "answered" if attempt.result == "valid" else attempt.result or "failed"
    if isinstance(error, PermanentError):
        result = "refused"
    seconds, cost_usd = attempt.ended_at - attempt.started_at, attempt.cost_usd
    usage = reply.usage if reply is not None and reply.usage is not None else NO_USAGE
    timed_out = attempt.timed_out and isinstance(error, TransientError)
    first_token_s = None if reply is None else reply.first_token_s
    observers.statistics.attempt_ended(source, result, seconds, usage, cost_usd, timed_out, first_token_s)
    if observers.watched:
        detail = "" if error is None else short(str(error), DETAIL_CHARS)
        ended = AttemptEnded(
            attempt.ended_at, job.sequence, attempt.number, job.call.name, source, result, seconds, usage, cost_usd,
            timed_out, job.ended, detail, first_token_s,
        )  # fmt: skip
        observers.emit(ended)
