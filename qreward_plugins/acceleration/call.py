"""One call of an accelerated function, from its submission to its end.

failed           the next attempt follows after the interval, as long as `retries` are left; otherwise the call fails
                 with this error. If another attempt is under way, the call waits for that one, and a hedge may follow
                 after the interval: a hedge that failed counts as a retry
not in retry_on  the call fails with this error
Throttled        the same as failed, and all calls pause as it asks
circuit open     the call fails when its turn comes, which is at once
takes long       a hedge starts beside it after a delay, which is fixed or learned
past its limit   it is cancelled and has failed, but keeps its place until it ends. If it swallows that, no attempt
                 follows: the call fails, unless another attempt is under way

A call has one timer, for whatever is due first: `_look` then does what is due.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CircuitOpen, EngineError, FunctionTimeout, Throttled
from ..observers.events import AttemptResult
from ..quotas.quota import Reservation
from ..secrets import described_error
from ..sources.threads import FunctionRaised
from .limiter import OPEN, Limiter, Rank, Turn
from .options import Options

if TYPE_CHECKING:
    from .calls import FunctionCalls

FAILED = "failed"
"""The reason of a call whose last attempt failed."""
SWALLOWED_AFTER_S = 1.0
"""Seconds after its time limit until an attempt that has not ended counts as one that swallows its cancellation: its
call is not tried again."""
LEAST_HEDGES = 4
"""Hedges that calls which are under way together may have, however few they are."""
WORTH = 1.2
"""A learned hedge starts if this many times its expected latency is less than what the attempt will still take."""
FIRST_LOOK_S = 0.05
"""Least age, in seconds, at which an attempt is hedged by a learned delay: shorter ones are noise of the event loop."""
MOST_SHOWN = 5
"""Earlier attempts whose errors the note on the last one shows."""
_LATER = 1.25
"""Factor from one age at which an attempt is checked to the next."""
_MESSAGE_CHARS = 300
_PREFIX = "accelerate: "


class Raised(NamedTuple):
    """The result of a call that failed: its exception."""

    error: BaseException
    refused: bool = False
    """Whether the function was not called, because it is closed, or cannot be called like this. That has no default."""


class Call:
    """A call that waits for its end. `result` is its value, or `Raised`, once it is `over`.

    `on_end` is called with the result, perhaps before `submit` returns; not if it is cancelled.
    """

    def __init__(
        self,
        function: FunctionCalls,
        limiter: Limiter,
        number: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        size: float,
        batch: int | None,
        on_end: Callable[[Any], None],
    ) -> None:
        self.args, self.kwargs, self.options, self.size, self.number = args, kwargs, options, size, number
        self.limiter = limiter
        self.context = contextvars.copy_context()
        self.items: Any = None
        """Takes the items of a generator."""
        self.over = False
        self.result: Any = None
        # Of a batch, the largest first.
        among = (number, 0.0, 0) if batch is None else (batch, -size, number)
        self._rank: Rank = (-options.priority, *among)
        self._function, self._on_end = function, on_end
        self._live: list[Attempt] = []
        self._attempts = self._hedges = 0
        self._swallowed = False
        """Whether an attempt has swallowed its cancellation, so that none follows."""
        self._errors: list[BaseException] = []
        """What the failed attempts raised."""
        self._submitted_at = limiter.now()
        self._deadline_at = math.inf if options.deadline_s is None else self._submitted_at + options.deadline_s
        self._started_at = math.inf
        self._next_at = math.inf
        """When to ask for a turn: of a retry if no attempt is under way, else of a hedge."""
        self._turn: Turn | None = None
        self._timer: asyncio.TimerHandle | None = None

    def submit(self) -> None:
        """Wait for the first turn; `Limiter.go` has to follow."""
        limiter = self.limiter
        limiter.submitted(self)
        self._turn = limiter.push(self._rank, self._start)
        self._wait()

    def cancel(self) -> list[asyncio.Task[None]]:
        """End the call, and return the tasks of its attempts, which are cancelled."""
        if self.over:
            return []
        tasks = [each.task for each in self.limiter.live if each.call is self and each.task is not None]
        self._leave("cancelled")
        return tasks

    # What is due

    def _wait(self) -> None:
        """Set the timer to what is due first."""
        at = self._deadline_at if self._turn is not None else min(self._deadline_at, self._next_at)
        for attempt in self._live:
            at = min(at, attempt.until)
        if self._timer is not None:
            if self._timer.when() == at:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop() if at < math.inf else None
        self._timer = loop.call_at(at, self._look) if loop is not None else None

    def _look(self) -> None:
        self._timer = None
        now = self.limiter.now()
        if now >= self._deadline_at:
            self.fail("deadline", "")
            self.limiter.go()
            return
        for attempt in list(self._live):
            if now >= attempt.until:
                self._time_out(attempt, now)
        if not self.over and self._turn is None and now >= self._next_at:
            self._ask(now)
        if not self.over:
            self._wait()

    def _ask(self, now: float) -> None:
        """Ask for a turn of the next attempt."""
        rank = self._rank
        if self._live:
            attempt = self._live[-1]
            age_s = now - attempt.started_at
            if self.options.hedge is True and not self._worth(attempt, age_s):
                self._next_at = attempt.started_at + max(_LATER * age_s, FIRST_LOOK_S)
                return
            # Before the calls of its priority that wait, and after those of a higher one.
            rank = (rank[0], -1, 0.0, self.number)
        self._turn = self.limiter.push(rank, self._start)
        self.limiter.go()

    # Attempts

    def _start(self, now: float) -> None:
        """Start an attempt, because its turn has come. It is a hedge if another one is under way."""
        limiter, options, hedge = self.limiter, self.options, bool(self._live)
        self._turn = None
        refusal = limiter.refusal(now)
        if hedge and (refusal or limiter.hedges + 1 > max(LEAST_HEDGES, options.hedge_budget * limiter.together)):
            age_s = now - self._live[-1].started_at
            self._next_at = now + max((_LATER - 1) * age_s, FIRST_LOOK_S)
            self._wait()
            return
        if refusal:
            self.fail(OPEN, refusal)
            return
        self._hedges += hedge
        limiter.hedges += hedge
        probe = not limiter.breaker.closed
        attempt = Attempt(self, self._attempts, now, hedge, limiter.quota.reserve(0.0, 0.0, now), probe)
        self._attempts += 1
        self._live.append(attempt)
        self._started_at = min(self._started_at, now)
        limiter.started(attempt, now)
        self._function.attempt_started(attempt, len(limiter.live))
        if options.timeout_s is not None and self.items is None:
            attempt.until = now + options.timeout_s
        if options.hedge is True and limiter.speed.settled:
            attempt.expected_s = limiter.speed.expected_s(self.size)
        self._next_at = self._hedge_at(attempt)
        # Each attempt has the context variables of the caller, and none of another one. No task is eager here.
        attempt.task = self.context.run(asyncio.Task, self._run(attempt), loop=asyncio.get_running_loop())
        # Nobody has to wait for it: the loop may be closed, or the interpreter end.
        attempt.task._log_destroy_pending = False  # type: ignore[attr-defined]
        attempt.task.add_done_callback(lambda _: self._settle(attempt))
        self._wait()

    async def _run(self, attempt: Attempt) -> None:
        try:
            value = await self._function.run(self, attempt.begin)
        except GeneratorExit:
            # Its event loop was closed; nothing may follow.
            raise
        except BaseException as error:
            # SystemExit, too: it belongs to the caller, and would end the event loop here.
            self._ended(attempt, error.error if isinstance(error, FunctionRaised) else error)
        else:
            self._ended(attempt, None, value)

    def _settle(self, attempt: Attempt) -> None:
        """Clean up after the task of an attempt: it may have been cancelled before its first step."""
        if not attempt.over:
            self._ended(attempt, asyncio.CancelledError())
        self.limiter.go()

    def _ended(self, attempt: Attempt, error: BaseException | None, value: Any = None) -> None:
        """Go on after an attempt that returned `value`, or raised `error`."""
        limiter, now = self.limiter, self.limiter.now()
        attempt.over = True
        limiter.ended(attempt, now, rejected=isinstance(error, Throttled))
        if attempt.timed_out:
            return
        if attempt in self._live:
            self._live.remove(attempt)
        if attempt.called_off:
            self._called_off(attempt, now)
        elif error is not None:
            self._failed(attempt, error, now)
        else:
            limiter.answered(attempt, self.size, now)
            if attempt.expected_s:
                limiter.tail.ended((now - attempt.started_at) / attempt.expected_s)
            self._function.attempt_ended(attempt, "answered", now)
            self.result = value
            self._leave("")
            self._on_end(value)

    def _called_off(self, attempt: Attempt, now: float) -> None:
        """Note the end of an attempt that was cancelled here. If that was for the limits, its call waits again."""
        limiter = self.limiter
        limiter.breaker.abandoned(probe=attempt.probe)
        if attempt.expected_s:
            limiter.tail.given_up((now - attempt.started_at) / attempt.expected_s)
        self._function.attempt_ended(attempt, "cancelled", now)
        if not self.over:
            self._attempts -= 1
            self._hedges -= attempt.hedge
            if not self._live and self._swallowed:
                self.fail(FAILED, "")
            elif not self._live and self._turn is None:
                self._turn = limiter.push(self._rank, self._start)

    def _time_out(self, attempt: Attempt, now: float) -> None:
        """Cancel an attempt, and go on without it. It keeps its place until it has ended."""
        attempt.timed_out = True
        self._live.remove(attempt)
        if attempt.task is not None:
            attempt.task.cancel()
            asyncio.get_running_loop().call_later(SWALLOWED_AFTER_S, self._not_again, attempt)
        timeout = FunctionTimeout(f"{self.limiter.name} took longer than {self.options.timeout_s:g} s")
        self._failed(attempt, timeout, now)

    def _not_again(self, attempt: Attempt) -> None:
        """End the call, if the attempt has not ended and no other one is under way: a retry may wait for its place."""
        if attempt.over or self.over:
            return
        self._swallowed = True
        if not self._live:
            self.fail(FAILED, "")
            self.limiter.go()

    def _failed(self, attempt: Attempt, error: BaseException, now: float) -> None:
        limiter = self.limiter
        self._errors.append(error)
        text = described_error(error, _MESSAGE_CHARS)
        passes, throttled = self._passes(error), isinstance(error, Throttled)
        result: AttemptResult = "throttled" if throttled else "failed" if passes else "refused"
        self._function.attempt_ended(attempt, result, now, text)
        if isinstance(error, Throttled):
            asked_s = error.retry_after_s
            limiter.throttled(attempt, None if asked_s is None or math.isnan(asked_s) else asked_s, now)
        # An error that a retry does not help is a matter of the arguments.
        limiter.failed(attempt, text, now, counts=passes)
        if not self.over:
            self._go_on(attempt, text, now, passes=passes)

    def _go_on(self, attempt: Attempt, text: str, now: float, *, passes: bool) -> None:
        """Decide what follows a failed attempt."""
        tries = self._attempts - self._hedges
        again = passes and tries <= self.options.retries and not self._swallowed
        self._next_at = now + (self.options.wait_s(tries, self._function.rng) if again else 0.0)
        if self._live:
            if attempt.hedge and again:
                self._hedges -= 1
            self._next_at = max(self._next_at, self._hedge_at(self._live[-1]))
        elif not again or (self.items is not None and self.items.begun) or self._next_at >= self._deadline_at:
            self.fail(FAILED, text)
            return
        elif self._turn is not None:  # of a hedge
            self.limiter.leave(self._turn)
            self._turn = None
        self._wait()

    def _passes(self, error: BaseException) -> bool:
        """Whether a retry may help."""
        if isinstance(error, Throttled):
            return True
        try:
            return not isinstance(error, EngineError) and self.options.retries_error(error)
        except Exception as problem:
            _note(error, f"not retried, because retry_on raised {described_error(problem)}")
            return False

    def _hedge_at(self, attempt: Attempt) -> float:
        """When to ask for a hedge of an attempt first; infinity: never."""
        hedge = self.options.hedge
        if hedge is False or self._hedges or self.items is not None:
            return math.inf
        return attempt.started_at + (max(FIRST_LOOK_S, attempt.expected_s) if hedge is True else hedge)

    def _worth(self, attempt: Attempt, age_s: float) -> bool:
        """Whether a new attempt is likely to end before this one, by the ages at which others have ended."""
        speed = self.limiter.speed
        if not speed.settled:
            return False
        attempt.expected_s = expected_s = speed.expected_s(self.size)
        return WORTH * expected_s <= expected_s * self.limiter.tail.residual(age_s / expected_s)

    # Ends

    def fail(self, reason: str, detail: str) -> None:
        """Fail it: `OPEN`, "closed", "deadline" or `FAILED`."""
        error = self._error(reason, detail)
        self.result = Raised(error, refused=isinstance(error, EngineError))
        self._leave(reason)
        self._on_end(self.result)

    def _error(self, reason: str, detail: str) -> BaseException:
        """The exception for the caller: that of the last attempt, with a note on those before."""
        name, before = self.limiter.name, self._errors
        error: BaseException
        if reason == "closed":
            return EngineError(f"{name} was closed before this call had ended")
        if reason == "deadline":
            error = FunctionTimeout(f"{name}: no value within {self.options.deadline_s:g} s")
        elif not before:
            return CircuitOpen(detail)
        else:
            error, before = before[-1], before[:-1]
        if before:
            seconds = self.limiter.now() - self._submitted_at
            shown = "; ".join(described_error(each) for each in before[-MOST_SHOWN:])
            _note(error, f"{len(before) + 1} attempts failed in {seconds:.3g} s; before this one: {shown}")
        if reason == OPEN:
            _note(error, f"not tried again: {detail}")
        return error

    def _leave(self, reason: str) -> None:
        """End the call, and cancel its attempts."""
        limiter, now = self.limiter, self.limiter.now()
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._turn is not None:
            limiter.leave(self._turn)
        live, self._live = self._live, []
        for attempt in live:
            attempt.call_off()
        limiter.calls.pop(self, None)
        limiter.used_at = now
        waited_s = min(self._started_at, now) - self._submitted_at
        self._function.call_ended(self.number, reason, self.size, waited_s, self._attempts, now)
        # Without these references, which are cycles, its arguments are freed at once.
        self._timer = self._turn = None
        self._errors.clear()


@dataclass(eq=False)
class Attempt:
    """One try of a call. Times are seconds of the event loop's clock."""

    call: Call
    number: int
    started_at: float
    hedge: bool
    reservation: Reservation
    probe: bool
    """Whether it started while the circuit was open."""
    expected_s: float = 0.0
    """Its expected latency; 0 if it is not needed, or not known."""
    task: asyncio.Task[None] | None = None
    until: float = math.inf
    """When it is cancelled, and its call goes on."""
    timed_out: bool = False
    called_off: bool = False
    """Whether its call ended without it, or waits for another turn."""
    over: bool = False

    def begin(self) -> None:
        """Note that the function is called now. Raises `CancelledError` if the limits do not allow it any more."""
        now = self.call.limiter.now()
        if now >= self.call.limiter.quota.valid_until:
            self.called_off = True
            raise asyncio.CancelledError
        self.reservation.sent(now)

    def call_off(self) -> None:
        """Cancel it. What it returns or raises counts for nothing."""
        self.called_off = True
        if self.task is not None:
            self.task.cancel()


def _note(error: BaseException, note: str) -> None:
    """Add a note to an exception, instead of an earlier one of ours: a function may raise the same object again and
    again. Before Python 3.11, tracebacks do not show it.
    """
    others = [each for each in getattr(error, "__notes__", ()) if not str(each).startswith(_PREFIX)]
    with suppress(Exception):  # an exception class may refuse attributes
        error.__notes__ = [*others, f"{_PREFIX}{note}"]  # type: ignore[attr-defined]
