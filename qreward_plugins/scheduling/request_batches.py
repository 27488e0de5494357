"""Request batches: requests that carry several calls each, at sources that take lists (`batch` of the configuration).

Each call keeps an attempt of its own, with its own time limit, retries and hedges. The request has a reservation of its
own: one request and one unit of concurrency, whatever it carries. Its attempts reserve tokens only.

Attempts join the open batch of their source as long as the planner places calls there. It is sent

- at once when it is full: it has `max_size` calls, or the next one would exceed `max_tokens`, or it has its part of
  the calls that wait. That part is equal for all free places of a
  source that declares its concurrency; otherwise all calls would go to one place while the others idle. At a source
  that does not, it is everything that waits;
- at the end of the pump, because nothing else can join it now;
- at most `max_wait_s` after it was opened, if another request of the source is under way and more calls may come: some
  wait for tokens, or single samples are still being submitted. A source without a request under way never waits.

If a request of several calls fails, one of them may be to blame. So these calls go in smaller batches afterwards
(`Job.most_together`), apart from other calls, until the one to blame is alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..config import Batch
from ..errors import InvalidReply, PermanentError, QRewardError, SourceError, Throttled, TransientError
from ..observers import Observers, RequestBatchSent
from ..quotas.quota import Reservation
from ..sources.base import Reply
from .jobs import Job
from .queue import ReadyQueue

if TYPE_CHECKING:
    from .attempts import Attempt
    from .upstream import Upstream

_log = logging.getLogger("qreward_plugins.scheduling")


@dataclass(eq=False)
class RequestBatch:
    """One request for several calls. Its task concludes the attempts that are still its members when it ends. Times are
    seconds of the event loop's clock.
    """

    upstream: Upstream
    reservation: Reservation
    part: int
    """Calls that it should carry while others wait."""
    most_together: int
    """The `Job.most_together` of its calls."""
    opened_at: float
    on_ended: Callable[[RequestBatch], None]
    """Called when its request has ended."""
    size: int = 0
    """Bytes of the calls that it carries, as in `Request.size`."""
    tokens: int = 0
    """Estimate of their tokens."""
    members: dict[Attempt, None] = field(default_factory=dict)
    """Its attempts that still wait for an answer."""
    carried: tuple[Attempt, ...] = ()
    """The attempts of the request that is under way. Empty once it has ended, because a job that goes again would keep
    all these samples in memory."""
    answered: bool = False
    """Whether each of its calls has a result of its own."""
    again: tuple[float, float] | None = None
    """Time until which its calls avoid the source after it failed, and when the retry budget lets them go again; None
    if it has not failed."""
    task: asyncio.Task[Sequence[Reply | QRewardError]] | None = None
    spokesman: Attempt | None = None

    @property
    def count(self) -> int:
        """Number of calls that its request carries, whether they still wait for an answer or not."""
        return len(self.carried or self.members)

    @cached_property
    def uniform(self) -> bool:
        """Whether all its calls have texts of the same kind, so that each takes about the same tokens per byte. Asked
        once the request was sent.
        """
        source = self.upstream.source
        return len({attempt.request.demand(source).kind for attempt in self.carried}) == 1

    def leave(self, attempt: Attempt) -> None:
        """Remove an attempt, which has ended. The last one to leave cancels the request."""
        del self.members[attempt]
        if self.task is not None and not self.members:
            self.task.cancel()
        elif not self.members:
            self._finish()

    def abandon(self) -> None:
        """Release the reservation although the request goes on, because the source swallows its cancellation."""
        self._finish()

    def speaks(self, attempt: Attempt) -> bool:
        """Whether the end of `attempt` tells about the source what the end of the request tells: true for one attempt,
        the first that is asked about.
        """
        if self.spokesman is None:
            self.spokesman = attempt
        return self.spokesman is attempt

    def send(self, now: float, expected_s: float) -> None:
        """Send the request, which is expected to take `expected_s` seconds. The attempts begin now."""
        for attempt in self.members:
            attempt.started_at, attempt.expected_s = now, expected_s
        self.carried = tuple(self.members)
        self.task = asyncio.get_running_loop().create_task(self._exchange())
        self.task.add_done_callback(self._settle)

    async def _exchange(self) -> Sequence[Reply | QRewardError]:
        requests = [attempt.request for attempt in self.carried]
        source = self.upstream.source
        if len(requests) == 1:
            return [await source.send(requests[0], on_sent=self._sent)]
        results: Sequence[Reply | QRewardError] = await source.send_batch(requests, on_sent=self._sent)
        if len(results) != len(requests):
            raise InvalidReply(f"source {source.name!r} gave {len(results)} results for {len(requests)} calls")
        return results

    def _sent(self) -> None:
        """Note that the request is written. If it carries a call that must not be sent any more, cancel it and withhold
        its calls, so that they go again in other requests. Raises CancelledError then.
        """
        now = asyncio.get_running_loop().time()
        must_not = now >= self.upstream.quota.valid_until or len(self.members) < len(self.carried)
        if must_not and self.reservation.sent_at == -math.inf:
            for attempt in tuple(self.members):
                attempt.withhold()
            raise asyncio.CancelledError
        self.reservation.sent(now)
        requests = tuple([attempt.request for attempt in self.carried])
        for attempt in self.members:
            attempt.together_with = requests
            attempt.note_sent(now)

    def _settle(self, task: asyncio.Task[Sequence[Reply | QRewardError]]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            error = TransientError(f"the call at {self.upstream.name} was cancelled by another task")
        elif error is not None and not isinstance(error, (SourceError, InvalidReply)):
            error = PermanentError(self.upstream.bugs.log(error, f"source {self.upstream.name}", _log))
        self._finish(rejected=isinstance(error, Throttled))
        self.answered = error is None or len(self.carried) == 1
        for number, attempt in enumerate(self.carried):
            if attempt in self.members:
                attempt.conclude(task.result()[number] if error is None else error)
        if error is not None:
            # A source may keep the error in a frame of its traceback. All samples would stay in memory with that cycle.
            error.__traceback__ = None
        # Its error refers to this object by its traceback, and so to all samples.
        self.task, self.carried = None, ()

    def _finish(self, *, rejected: bool = False) -> None:
        self.reservation.release(asyncio.get_running_loop().time(), rejected=rejected)
        self.on_ended(self)


class RequestBatches:
    """The request batches of one source in one event loop. `queue` holds the calls that wait. `on_change` is called
    when a place of the source has become free. Times are seconds of the event loop's clock.
    """

    def __init__(
        self,
        upstream: Upstream,
        limits: Batch,
        queue: ReadyQueue,
        *,
        on_change: Callable[[], None],
        observers: Observers,
    ) -> None:
        self._upstream = upstream
        self._limits = limits
        self._queue = queue
        self._on_change = on_change
        self._observers = observers
        self._open: dict[int, RequestBatch] = {}
        self.under_way: dict[RequestBatch, None] = {}
        """The open batches, and those that were sent and have not ended."""

    @property
    def open(self) -> Sequence[RequestBatch]:
        """The batches that calls may join."""
        return tuple(self._open.values())

    def admitting(self, job: Job) -> RequestBatch | None:
        """The open batch that `job` may join; None if there is none."""
        batch = self._open.get(job.most_together)
        if batch is None or self._alone(job) or self._exceeds(batch, self._upstream.tokens(job.request)):
            return None
        # A hedge must not stand in the same request as the attempt that it is for.
        return None if any(attempt.request_batch is batch for attempt in job.live) else batch

    def place(self, job: Job, now: float) -> RequestBatch | None:
        """The batch that `job` joins now, opened if necessary; None if it must go alone."""
        if self._alone(job):
            return None
        batch = self.admitting(job)
        if batch is not None:
            return batch
        previous = self._open.get(job.most_together)
        if previous is not None:
            self._send(previous, now)
        part = self._part(now)
        batch = RequestBatch(
            self._upstream,
            self._upstream.quota.reserve(0, 0, now),
            part=part,
            most_together=job.most_together,
            opened_at=now,
            on_ended=self._ended,
        )
        self._open[job.most_together] = batch
        self.under_way[batch] = None
        return batch

    def join(self, batch: RequestBatch, attempt: Attempt, now: float) -> None:
        """Add an attempt, which ends as the request does if it has not left before. Send the request if it is full, or
        has its part while others wait.
        """
        batch.members[attempt] = None
        batch.size += attempt.request.size
        batch.tokens += self._upstream.tokens(attempt.job.request)
        most = min(self._limits.max_size, batch.most_together)
        if batch.count >= most or (batch.count >= batch.part and self._queue.count(self._upstream.name)):
            self._send(batch, now)

    def send_ready(self, now: float) -> float:
        """Send the open batches that need not wait. Return the time by which to call this again."""
        due_at = math.inf
        for batch in self.open:
            latest_at = batch.opened_at + self._limits.max_wait_s
            if now < latest_at and self._may_wait(batch, now):
                due_at = min(due_at, latest_at)
            else:
                self._send(batch, now)
        return due_at

    def usual(self, waiting: int, each_tokens: float) -> int:
        """Number of calls that a request carries if `waiting` calls of `each_tokens` wait for the source."""
        quota = self._upstream.quota
        places = quota.concurrency if quota.declares_concurrency else 1
        most = min(self._limits.max_size, math.ceil(waiting / max(1, places)))
        if self._limits.max_tokens is not None and each_tokens > 0:
            most = min(most, int(self._limits.max_tokens / each_tokens))
        return max(1, most)

    def _alone(self, job: Job) -> bool:
        """Whether `job` must not share a request. A probe goes alone, because its end decides about the source, and a
        call for which a server was asked in vain, because its end decides about the call.
        """
        upstream = self._upstream
        if job.most_together < 2 or upstream.name in job.refusals:
            return True
        return not upstream.breaker.closed or upstream.oversize(job.request)

    def _exceeds(self, batch: RequestBatch, tokens: int) -> bool:
        most = self._limits.max_tokens
        return most is not None and bool(batch.count) and batch.tokens + tokens > most

    def _part(self, now: float) -> int:
        """The part of what waits, and of the call that is placed, that each free place of the source gets."""
        quota = self._upstream.quota
        waiting = self._queue.count(self._upstream.name) + 1
        if not quota.declares_concurrency:
            return waiting
        places = min(quota.concurrency - quota.in_flight, quota.capacity(now, 0.0, now))
        return math.ceil(waiting / max(1.0, places))

    def _may_wait(self, batch: RequestBatch, now: float) -> bool:
        """Whether it costs no time of the source to wait for more calls, and more may come."""
        if self._upstream.quota.in_flight <= len(self._open):
            return False
        waiting = self._queue.first(self._upstream.name)
        if waiting is not None and self.admitting(waiting) is batch:
            return True
        return any(not each.quiet(now) for each in {attempt.job.batch for attempt in batch.members})

    def _send(self, batch: RequestBatch, now: float) -> None:
        del self._open[batch.most_together]
        self._observers.statistics.request_batch_sent(self._upstream.name, batch.count)
        if self._observers.watched:
            self._observers.emit(RequestBatchSent(now, self._upstream.name, batch.count))
        batch.send(now, self._upstream.speed.expected_s(batch.size) or next(iter(batch.members)).expected_s)

    def _ended(self, batch: RequestBatch) -> None:
        self.under_way.pop(batch, None)
        if self._open.get(batch.most_together) is batch:
            del self._open[batch.most_together]
        self._on_change()
