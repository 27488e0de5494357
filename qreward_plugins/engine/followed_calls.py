"""Defines `FollowedCall`: a call of the scheduler that no sample makes, and whose reply may be read while it comes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import configured_name
from ..errors import EngineError, TextFailed
from ..scheduling.batches import Batch, check_times
from ..scheduling.calls import Answer, Call, Unanswered
from ..scheduling.dispatcher import Dispatcher
from ..scheduling.jobs import Job
from ..scheduling.upstream import Upstream

if TYPE_CHECKING:
    from .scoring import Scoring

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


def text_failed(why: Unanswered, text: str = "") -> TextFailed:
    """Return the error of a call without an answer. `text` is what came of it."""
    return TextFailed(why.reason, why.detail, text=text, source=why.source, spent=why.spent)


class CallingMethods(ABC):
    """What the methods of `RewardEngine` need that make calls which belong to no sample."""

    @property
    @abstractmethod
    def upstreams(self) -> Mapping[str, Upstream]:
        """The sources by name, with their quotas and learned estimates."""

    @abstractmethod
    async def _ready(self, deadline_s: float | None) -> tuple[Scoring, float]: ...

    async def _calling(
        self, sources: str | Sequence[str], answers: str, lack: str, deadline_s: float | None, priority: int
    ) -> tuple[Dispatcher, Batch, tuple[str, ...], float]:
        """Return what calls to the named sources need: dispatcher, batch, upstreams and deadline.

        Raises `EngineError` for an unknown source, and for one that does not give `answers`, which `lack` says;
        `ValueError` without any, and for an impossible deadline or priority.
        """
        check_times(deadline_s, priority)
        scoring, due_at = await self._ready(deadline_s)
        found: dict[str, None] = {}
        for name in (sources,) if isinstance(sources, str) else sources:
            # A source with several keys is as many upstreams.
            meant = [each for each in self.upstreams if name in (each, configured_name(each))]
            if not meant:
                raise EngineError(f"unknown source {name!r}; sources: {', '.join(self.upstreams)}")
            if answers not in (self.upstreams[meant[0]].source.answers or (answers,)):
                raise EngineError(f"source {name!r} {lack}")
            found.update(dict.fromkeys(meant))
        if not found:
            raise ValueError("it needs at least one source")
        # Never sealed: it is no batch of samples, and has no report.
        batch = scoring.batches.new((), priority=priority)
        return scoring.dispatcher, batch, tuple(found), due_at
