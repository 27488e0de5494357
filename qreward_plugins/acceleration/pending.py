"""A call of an accelerated function that waits for its end; and calls that share the limits of a key, by key."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ..config import Scheduling
from ..errors import CircuitOpen, EngineError, FunctionTimeout
from ..observers import Observers
from ..scheduling import OPEN, Answer, Dispatcher, Job, Member, Unanswered, Upstream
from ..sharing.membership import Channel, Membership
from .invocation import Invocation, add_note, note_attempts

if TYPE_CHECKING:
    pass


class KeyedCalls:
    """The calls of one key: a dispatcher over one upstream, which has the limits of the key."""

    def __init__(self, name: str, upstream: Upstream, channel_key: str) -> None:
        self.name = name
        self.upstream = upstream
        self.channel_key = channel_key
        self.dispatcher: Dispatcher
        """Set by `bind`."""
        self.membership: Membership | None = None
        self.waiting = 0
        """Calls that have not ended."""
        self.used_at = -math.inf
        """When a call came or ended last, in seconds of the event loop's clock."""

    def bind(self, rng: random.Random, observers: Observers, channel: Channel | None, sequence: Iterator[int]) -> None:
        """Serve the running event loop from now on. `sequence` numbers the calls of all keys."""
        self.upstream.abandon_attempts(asyncio.get_running_loop().time())
        self.waiting = 0
        if channel is not None and self.membership is None:
            self.membership = Membership({self.channel_key: self.upstream}, channel)
        self.dispatcher = Dispatcher(
            {self.name: self.upstream},
            rng=rng,
            max_attempts=1,
            settings=Scheduling(hedge=False),
            observers=observers,
            on_pumped=self.membership.look if self.membership is not None else None,
            sequence=sequence,
            # Each attempt has the context variables of its caller, and none of another one.
            context=contextvars.Context(),
        )
        if self.membership is not None:
            self.membership.start(self.dispatcher)

    def forgettable(self, now: float, idle_s: float) -> bool:
        """Whether it may be made anew: for `idle_s` no call has come or ended, and neither a pause nor an open circuit
        holds calls back.
        """
        upstream = self.upstream
        if self.waiting or upstream.live or now - self.used_at < idle_s:
            return False
        return upstream.breaker.open_s(now) <= 0 and upstream.pauses.left_s(now) <= 0

    async def aclose(self) -> None:
        await self.dispatcher.aclose()
        if self.membership is not None:
            await self.membership.aclose()


def shared_name(key: object) -> str:
    """What all processes know a key by: the same text for equal keys. Raises `TypeError` for a key without one.

    `repr` is no such text: that of an object may hold its address, and that of a set has no fixed order.
    """
    if isinstance(key, str):
        return f"text {str.__str__(key)!r}"
    if isinstance(key, (int, float)):
        return f"number {int(key) if key == key // 1 else float(key)!r}"
    if key is None or isinstance(key, (bytes, UUID, PurePath)):
        return repr(key)
    if isinstance(key, Enum):
        return f"{type(key).__qualname__}.{key.name}"
    if isinstance(key, tuple):
        return f"({','.join(map(shared_name, key))})"
    if isinstance(key, frozenset):
        return f"{{{','.join(sorted(map(shared_name, key)))}}}"
    if is_dataclass(key):
        parts = (shared_name(getattr(key, field.name)) for field in fields(key) if field.compare)
        return f"{type(key).__qualname__}({','.join(parts)})"
    raise TypeError(
        f"key returned {type(key).__qualname__}, which other processes cannot recognise; with `shared`, return a text, "
        "a number, or a tuple of them"
    )


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
