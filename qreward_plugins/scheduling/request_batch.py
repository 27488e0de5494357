"""One request that carries several calls: the attempts that wait for it, its reservation and its answers.

`request_batches.py` says when it is sent.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ..errors import InvalidReply, PermanentError, QRewardError, SourceError, Throttled, TransientError
from ..quotas.reservation import Reservation
from ..sources.base import Reply

if TYPE_CHECKING:
    from .attempts import Attempt
    from .upstream import Upstream

_log = logging.getLogger("qreward_plugins.scheduling")

Result: TypeAlias = Reply | QRewardError


class RequestBatch:
    """One request for several calls. Times are seconds of the event loop's clock.

    `most`: calls that it may carry. `part`: calls that it should carry while others wait. `most_together`: the
    `Job.most_together` of its calls. `on_ended` is called when its request has ended.
    """

    def __init__(
        self,
        upstream: Upstream,
        reservation: Reservation,
        *,
        most: int,
        part: int,
        most_together: int,
        opened_at: float,
        on_ended: Callable[[RequestBatch], None],
    ) -> None:
        self.most_together = most_together
        self.most = most
        self.part = part
        self.opened_at = opened_at
        self.size = 0
        """Bytes of the calls that it carries, as in `Request.size`."""
        self.tokens = 0
        """Estimate of their tokens."""
        self.carried: tuple[Attempt, ...] = ()
        """The attempts of the request that is under way. Empty once all have left it, because a job that goes again
        would keep all these samples in memory."""
        self.again_at: float | None = None
        """Time until which its calls avoid the source after it failed; None if it has not."""
        self.retry_number: int | None = None
        """Number of its retry in the source's retry budget; None if none was taken for it."""
        self.task: asyncio.Task[Sequence[Result]] | None = None
        self._upstream = upstream
        self._reservation = reservation
        self._on_ended = on_ended
        self._answers: dict[Attempt, asyncio.Future[tuple[Result, bool]]] = {}
        self._spokesman: Attempt | None = None
        self._outdated = False
        self._sent_count = 0

    @property
    def abandoned(self) -> bool:
        """Whether all its attempts have left it."""
        return not self._answers

    @property
    def members(self) -> Sequence[Attempt]:
        """Its attempts that still wait for an answer."""
        return tuple(self._answers)

    @property
    def count(self) -> int:
        """Number of calls that its request carries, whether they still wait for an answer or not."""
        return self._sent_count or len(self._answers)

    @property
    def uniform(self) -> bool:
        """Whether all its calls have texts of the same kind, so that each takes about the same tokens per byte."""
        source = self._upstream.source
        return len({attempt.request.demand(source).kind for attempt in self.carried}) == 1

    def join(self, attempt: Attempt, tokens: int) -> None:
        """Add an attempt that will wait in `answer`."""
        self._answers[attempt] = asyncio.get_running_loop().create_future()
        self.size += attempt.request.size
        self.tokens += tokens

    def has_answered(self, attempt: Attempt) -> bool:
        """Whether the answer to `attempt` is here, which `answer` will return in the next steps of the event loop."""
        answer = self._answers.get(attempt)
        return answer is not None and answer.done()

    def leave(self, attempt: Attempt) -> None:
        """Remove an attempt. The last one to leave cancels the request. Does nothing if it left before."""
        if self._answers.pop(attempt, None) is None or self._answers:
            return
        if self.task is None:
            self._finish(rejected=False)
        elif self.task.done():
            # Its error refers to this object by its traceback, and so to all samples.
            self.task = None
            self.carried = ()
        else:
            self.task.cancel()

    def abandon(self) -> None:
        """Release the reservation although the request goes on, because the source swallows its cancellation."""
        self._finish(rejected=False)

    def speaks(self, attempt: Attempt) -> bool:
        """Whether the end of `attempt` tells about the source what the end of the request tells: true for one attempt,
        the first that is asked about.
        """
        if self._spokesman is None:
            self._spokesman = attempt
        return self._spokesman is attempt

    def send(self, now: float, expected_s: float) -> None:
        """Send the request, which is expected to take `expected_s` seconds. The attempts begin now."""
        for attempt in self._answers:
            attempt.started_at, attempt.expected_s = now, expected_s
        self._send()

    async def answer(self, attempt: Attempt) -> Reply:
        """Wait for the reply to `attempt`. Raises its error, or a copy of the error of the whole request."""
        result, attempt.own = await self._answers[attempt]
        if isinstance(result, Reply):
            return result
        try:
            raise result
        finally:
            # Error, traceback and frame would keep each other in memory.
            del result

    def _send(self) -> None:
        self._outdated = False
        self.carried = tuple(self._answers)
        self._sent_count = len(self.carried)
        self.task = asyncio.get_running_loop().create_task(self._exchange())
        self.task.add_done_callback(self._settle)

    async def _exchange(self) -> Sequence[Result]:
        requests = [attempt.request for attempt in self.carried]
        source = self._upstream.source
        if len(requests) == 1:
            return [await source.send(requests[0], on_sent=self._sent)]
        results: Sequence[Result] = await source.send_batch(requests, on_sent=self._sent)  # type: ignore[attr-defined]
        if len(results) != len(requests):
            raise InvalidReply(f"source {source.name!r} gave {len(results)} results for {len(requests)} calls")
        return results

    def _sent(self) -> None:
        """Note that the request is written. If it carries calls that must not be sent any more, cancel it: `_settle`
        sends the others. Raises CancelledError then.
        """
        now = asyncio.get_running_loop().time()
        expired = now >= self._upstream.quota.valid_until
        if self._reservation.sent_at == -math.inf:
            for attempt in self.members:
                if expired or attempt.job.ended:
                    del self._answers[attempt]
                    attempt.withhold()
            if len(self._answers) < len(self.carried):
                self._outdated = True
                if self.task is not None:
                    self.task.cancel()
                raise asyncio.CancelledError
        self._reservation.sent(now)
        requests = tuple([attempt.request for attempt in self.carried])
        for attempt in self._answers:
            attempt.together_with = requests
            attempt.note_sent(now)

    def _settle(self, task: asyncio.Task[Sequence[Result]]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._outdated and self._answers:
            self._send()
            return
        results: Sequence[Result | None] = ()
        if task.cancelled():
            error = TransientError(f"the call at {self._upstream.name} was cancelled by another task")
        elif error is None:
            results = task.result()
        elif not isinstance(error, (SourceError, InvalidReply)):
            error = self._bug(error)
        own = error is None or len(self.carried) == 1
        for number, attempt in enumerate(self.carried):
            answer = self._answers.get(attempt)
            if answer is not None and not answer.done():
                result = results[number] if error is None else _copy(error)
                if not isinstance(result, (Reply, QRewardError)):
                    result = self._bug(TypeError(f"a result of type {type(result).__name__}"))
                answer.set_result((result, own))
        # After the answers: otherwise the pump that this asks for would run before the attempts know them, and could
        # give them up for their age.
        self._finish(rejected=isinstance(error, Throttled))
        if error is not None:
            # A source may keep the error in a frame of its traceback. All samples would stay in memory with that cycle.
            error.__traceback__ = None
        if self.abandoned:
            self.carried = ()

    def _finish(self, *, rejected: bool) -> None:
        self._reservation.release(asyncio.get_running_loop().time(), rejected=rejected)
        self._on_ended(self)

    def _bug(self, error: BaseException) -> PermanentError:
        kind = type(error).__name__
        _log.error("unexpected %s from source %s", kind, self._upstream.name, exc_info=error)
        return PermanentError(f"unexpected {kind}; see the log")


def _copy(error: BaseException) -> QRewardError:
    """A copy of `error` for one of several tasks that raise it: each adds its traceback to what it raises."""
    try:
        copied = copy.copy(error)
    except Exception:  # an error of another package, whose constructor takes other arguments
        copied = error
    assert isinstance(copied, QRewardError)
    return copied.with_traceback(None)
