"""A call of an accelerated function that waits for its end, and the exception that its caller gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import CircuitOpen, EngineError, FunctionTimeout
from ..scheduling import OPEN, Answer, Job, Member, Unanswered
from .invocation import Invocation
from .notes import add_note, note_attempts

if TYPE_CHECKING:
    from .keyed_calls import KeyedCalls

END_WITHIN_S = 2.0
"""Most seconds for which a cancelled call waits for its attempts."""


class Pending:
    """A call that waits for its end. `result` is its value, or `Raised`, once it is `over`.

    `on_leave` is called with the reason why it failed ("": it did not), and then `on_end` with the result. `cancel`
    calls only `on_leave`.
    """

    __slots__ = ("_keyed", "_on_end", "_on_leave", "invocation", "job", "member", "over", "result")

    def __init__(
        self,
        keyed: KeyedCalls,
        invocation: Invocation,
        member: Member,
        *,
        on_leave: Callable[[str], None],
        on_end: Callable[[Any], None],
    ) -> None:
        self._keyed = keyed
        self.member = member
        self._on_leave = on_leave
        self._on_end = on_end
        self.invocation = invocation
        self.job: Job | None = None
        self.over = False
        self.result: Any = None

    def ended(self, result: Answer[Any] | Unanswered) -> None:
        if isinstance(result, Answer):
            reason, self.result = "", result.value
        else:
            error = self._error(result)
            reason, self.result = result.reason, Raised(error, refused=self._refused(error))
        self.over = True
        self._leave(reason)
        self._on_end(self.result)
        # Without these references, which are cycles, its arguments are freed at once.
        self.job = None
        self.invocation.errors.clear()

    def late(self, answer: Answer[Any]) -> None:
        """Never called: late attempts are cancelled."""

    def begin(self) -> None:
        """Note that its caller has an item, so that the call cannot be made again."""
        if self.job is not None:
            self.job.begun = True

    async def drop(self) -> None:
        """End the call, because its caller does not want it any more, and wait until its attempts have ended."""
        if tasks := self.cancel():
            await asyncio.wait(tasks, timeout=END_WITHIN_S)

    def cancel(self) -> list[asyncio.Task[None]]:
        """End the call, and return the tasks of its attempts, which are cancelled."""
        job, self.job = self.job, None
        if job is None or job.ended:
            return []
        tasks = [attempt.task for attempt in job.live if attempt.task is not None]
        self._keyed.dispatcher.drop(job)
        self._leave("cancelled")
        return tasks

    def _refused(self, error: BaseException) -> bool:
        """Whether the function was not called because of a fault in how it is used."""
        mine = isinstance(error, EngineError) and all(error is not each for each in self.invocation.errors.values())
        return mine or self.invocation.refused

    def _leave(self, reason: str) -> None:
        dispatcher = self._keyed.dispatcher
        dispatcher.batches.leave(self.member, scored=not reason)
        self._keyed.waiting -= 1
        self._keyed.used_at = dispatcher.now()
        self._on_leave(reason)

    def _error(self, result: Unanswered) -> BaseException:
        """The exception for the caller: that of the last attempt, with notes on those before."""
        job, errors = self.job, self.invocation.errors
        raised: list[BaseException] = []
        attempts = [] if job is None else sorted((*job.past, *job.live), key=lambda attempt: attempt.number)
        for attempt in attempts:
            if attempt.timed_out:
                raised.append(FunctionTimeout(f"{self._keyed.name} took longer than {attempt.timeout_s:g} s"))
            elif attempt.result in ("failed", "throttled") and attempt.number in errors:
                raised.append(errors[attempt.number])
        seconds = result.spent.latency_s
        if result.reason == "closed":
            return EngineError(f"{self._keyed.name} was closed before this call had ended")
        if result.reason == "deadline":
            late = FunctionTimeout(f"{self._keyed.name}: {result.detail}")
            note_attempts(late, raised, seconds)
            return late
        if not raised:
            return (
                CircuitOpen(result.detail)
                if result.reason == OPEN
                else EngineError(f"{result.reason}: {result.detail}")
            )
        note_attempts(raised[-1], raised[:-1], seconds)
        if result.reason == OPEN:
            add_note(raised[-1], f"not tried again: {result.detail}")
        return raised[-1]


def setter(future: asyncio.Future[Any]) -> Callable[[Any], None]:
    """Return what sets the result of a future, unless that was cancelled."""

    def set_result(result: Any) -> None:
        # Not `set_exception`: a future refuses StopIteration, and logs an exception that is never read.
        if not future.done():
            future.set_result(result)

    return set_result


class Raised:
    """The exception of a failed call, in the place of its value.

    `refused`: the function was not called, because it is closed, or cannot be called like this. That has no default.
    """

    __slots__ = ("error", "refused")

    def __init__(self, error: BaseException, *, refused: bool = False) -> None:
        self.error = error
        self.refused = refused
