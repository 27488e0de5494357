"""Defines `FollowedCall`: a call of the scheduler that no sample makes, and whose reply may be read while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ..scheduling.batches import Batch
from ..scheduling.calls import Answer, Call, Unanswered
from ..scheduling.dispatcher import Dispatcher
from ..scheduling.jobs import Job

END_WITHIN_S = 2.0
"""Most seconds for which closing waits until the connection to the source is closed."""


class FollowedCall:
    """One call of one reader. `on_change` is called when it is over, and by subclasses for pieces of the reply."""

    def __init__(self, dispatcher: Dispatcher, batch: Batch, on_change: Callable[[], None]) -> None:
        self._dispatcher = dispatcher
        self._member = dispatcher.batches.join(batch)
        self._on_change = on_change
        self._job: Job | None = None
        self.over = False
        """Whether the call has ended."""
        self.answer: Any = None
        """The answer, once there is one."""
        self.unanswered: Unanswered | None = None
        """Why there is no answer; None if there is one, or nobody wants it."""

    def start(self, call: Call[Any], due_at: float) -> None:
        """Make the call. It ends by `due_at`, on the event loop's clock."""
        self._job = self._dispatcher.submit(call, self, member=self._member, deadline_at=due_at)
        if self.over:  # it has ended already
            self._job = None

    def ended(self, result: Answer[Any] | Unanswered) -> None:
        """Take in the end of the call. Called by the scheduler."""
        self._job = None
        if isinstance(result, Answer):
            self._take_answer(result)
        else:
            self.unanswered = result
        self._leave()

    def drop(self) -> None:
        """End the call, because nobody wants its reply any more. Idempotent."""
        if self.over:
            return
        job, self._job = self._job, None
        if job is not None:
            self._dispatcher.drop(job)
        self._leave()

    async def aclose(self) -> None:
        """End the call, and wait until its attempts have ended."""
        live = [] if self._job is None else self._job.live
        tasks = [attempt.task for attempt in live if attempt.task is not None]
        self.drop()
        if tasks:
            await asyncio.wait(tasks, timeout=END_WITHIN_S)

    def _take_answer(self, answer: Answer[Any]) -> None:
        self.answer = answer

    def _leave(self) -> None:
        self.over = True
        self._dispatcher.batches.leave(self._member, scored=self.answer is not None)
        self._member.batch.forget()
        self._on_change()


async def answers_of(
    dispatcher: Dispatcher, batch: Batch, calls: Sequence[Call[Any]], due_at: float
) -> list[Answer[Any] | Unanswered]:
    """Make all calls at once; item i is what came of call i. Cancelling ends all of them."""
    changed, followed = asyncio.Event(), list[FollowedCall]()
    try:
        for call in calls:
            followed.append(FollowedCall(dispatcher, batch, changed.set))
            followed[-1].start(call, due_at)
        for each in followed:
            while not each.over:
                changed.clear()
                await changed.wait()
    finally:
        await asyncio.gather(*(each.aclose() for each in followed))
    return [each.answer or each.unanswered or Unanswered("closed") for each in followed]
