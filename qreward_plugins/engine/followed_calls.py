"""Defines `FollowedCall`: a call of the scheduler for whoever waits for its result.

A sample whose judge is a leaf needs none (`Calling` in outcomes.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..scheduling.batches import Batch, Member

if TYPE_CHECKING:
    from ..scheduling.calls import Answer, Call, Unanswered
    from ..scheduling.dispatcher import Dispatcher
    from ..scheduling.jobs import Job

END_WITHIN_S = 2.0
"""Most seconds for which closing waits until the connection to the source is closed."""


class FollowedCall:
    """One call of a member of a batch. `result` is cancelled if nobody wants it any more."""

    def __init__(self, dispatcher: Dispatcher, member: Member) -> None:
        self._dispatcher = dispatcher
        self._member = member
        self._job: Job | None = None
        self.result: asyncio.Future[Answer[Any] | Unanswered] = dispatcher.loop.create_future()

    @property
    def over(self) -> bool:
        """Whether the call has ended."""
        return self.result.done()

    def start(self, call: Call[Any], due_at: float) -> None:
        """Make the call. It ends by `due_at`, on the event loop's clock."""
        self._job = self._dispatcher.submit(call, self, member=self._member, deadline_at=due_at)

    def ended(self, result: Answer[Any] | Unanswered) -> None:
        """Take in the end of the call. Called by the scheduler."""
        # The job refers to this object; memory must not wait for the garbage collector.
        self._job = None
        if not self.over:
            self.result.set_result(result)

    def drop(self) -> None:
        """End the call, because nobody wants its result any more. Idempotent."""
        job, self._job = self._job, None
        if job is not None:
            self._dispatcher.drop(job)
        self.result.cancel()

    async def aclose(self) -> None:
        """End the call, and wait until its attempts have ended."""
        live = [] if self._job is None else self._job.live
        tasks = [attempt.task for attempt in live if attempt.task is not None]
        self.drop()
        if tasks:
            await asyncio.wait(tasks, timeout=END_WITHIN_S)


async def answers_of(
    dispatcher: Dispatcher, batch: Batch, calls: Sequence[Call[Any]], due_at: float
) -> list[Answer[Any] | Unanswered]:
    """Make all calls at once; item i is what came of call i. Cancelling ends all of them."""
    followed = [FollowedCall(dispatcher, Member(batch)) for _ in calls]
    try:
        for each, call in zip(followed, calls, strict=True):
            each.start(call, due_at)
        return [await each.result for each in followed]
    finally:
        await asyncio.gather(*(each.aclose() for each in followed))
