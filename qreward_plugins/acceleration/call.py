"""One call of an accelerated function, from its submission to its end.

failed           the next attempt follows after the interval, as long as `retries` are left; otherwise the call fails
                 with this error. If another attempt is under way, the call waits for that one, and a hedge may follow
                 after the interval: a hedge that failed counts as a retry
not in retry_on  the call fails with this error
Throttled        the same as failed, and all calls pause as it asks
circuit open     the call fails at once, also while it waits
takes long       a hedge starts beside it after a delay, which is fixed or learned
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CircuitOpen, EngineError, FunctionTimeout, Throttled
from ..observers.events import AttemptResult
from ..quotas.reservation import Reservation
from ..secrets import one_line
from ..sources.threads import FunctionRaised
from .limiter import OPEN, Group, Limiter, Rank, Turn
from .raised import Raised, add_note, cut_traceback, note_attempts, text_of
from .statistics import Tally

if TYPE_CHECKING:
    from .options import Options
    from .runner import FunctionRunner

FAILED = "failed"
"""The reason of a call whose last attempt failed."""
SWALLOWED_AFTER_S = 1.0
"""Seconds after its time limit until a call goes on without an attempt that swallows its cancellation."""
LEAST_HEDGES = 4
"""Hedges that a batch may have, however small it is."""
WORTH = 1.2
"""A learned hedge starts if this many times its expected latency is less than what the attempt will still take."""
FIRST_LOOK_S = 0.05
"""Least age, in seconds, at which an attempt is hedged by a learned delay: shorter ones are noise of the event loop."""
_LATER = 1.25
"""Factor from one age at which an attempt is checked to the next."""
_MESSAGE_CHARS = 300


class PendingCall:
    """A call that waits for its end. `result` is its value, or `Raised`, once it is `over`.

    `on_end` is called with the result, perhaps before `submit` returns; not if it is cancelled.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        size: float,
        *,
        number: int,
        group: Group,
        limiter: Limiter,
        runner: FunctionRunner,
        rng: random.Random,
        tally: Tally,
        on_end: Callable[[Any], None],
    ) -> None:
        self.args, self.kwargs, self.options, self.size, self.number = args, kwargs, options, size, number
        self.context = contextvars.copy_context()
        self.items: Any = None
        """Takes the items of a generator."""
        self.begun = False
        """Whether its caller has an item of a generator, so that the call cannot be made again."""
        self.refused = False
        """Whether the function cannot be called at all, whatever the arguments."""
        self.over = False
        self.result: Any = None
        together = group.number is not None
        rank = (-options.number, group.number or 0, -size, number) if together else (-options.number, number, 0.0, 0)
        self._rank: Rank = rank
        self._group, self.limiter, self._runner, self._rng, self._tally = group, limiter, runner, rng, tally
        self._on_end = on_end
        self._live: list[FunctionAttempt] = []
        self._attempts = self._hedges = 0
        self._errors: dict[int, BaseException] = {}
        """What each attempt raised, by its number."""
        self._submitted_at = limiter.now()
        self._started_at = math.inf
        self._not_before = -math.inf
        self._turn: Turn | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Until the next attempt: a retry, or a hedge."""

    def submit(self) -> None:
        """Wait for the first turn; `Limiter.go` has to follow. The call may be over after this."""
        limiter = self.limiter
        limiter.calls[self] = None
        self._group.calls += 1
        if refusal := limiter.refusal(self._submitted_at):
            self.fail(OPEN, refusal)
            return
        if self.options.deadline_s is not None:
            self._deadline = _later(self.options.deadline_s, self._too_late)
        self._turn = limiter.push(self._rank, self._start)

    @property
    def waits(self) -> bool:
        """Whether no attempt of it is under way."""
        return not self._live

    def begin(self) -> None:
        """Note that its caller has an item."""
        self.begun = True

    async def drop(self, within_s: float) -> None:
        """End the call, because its caller does not want it any more, and wait until its attempts have ended."""
        if tasks := self.cancel():
            await asyncio.wait(tasks, timeout=within_s)

    def cancel(self) -> list[asyncio.Task[None]]:
        """End the call, and return the tasks of its attempts, which are cancelled."""
        if self.over:
            return []
        tasks = [attempt.task for attempt in self._live if attempt.task is not None]
        self._leave("cancelled", "")
        return tasks

    # Attempts

    def _start(self, now: float, *, hedge: bool = False) -> None:
        limiter, options = self.limiter, self.options
        probe = not limiter.breaker.closed
        attempt = FunctionAttempt(self, self._attempts, now, hedge, limiter.quota.reserve(0.0, 0.0, now), probe)
        self._attempts += 1
        self._live.append(attempt)
        self._started_at = min(self._started_at, now)
        limiter.started(attempt, now)
        self._tally.attempt_started(self.number, attempt.number, hedge=hedge, now=now, in_flight=len(limiter.live))
        if options.timeout_s is not None and self.items is None:
            attempt.timer = _later(options.timeout_s, attempt.time_out)
        # Each attempt has the context variables of the caller, and none of another one.
        attempt.task = self.context.run(asyncio.create_task, self._run(attempt))
        attempt.task.add_done_callback(lambda _: self._settle(attempt))
        if options.hedge is not False and self.items is None:
            if options.hedge is True and limiter.speed.settled:
                attempt.expected_s = limiter.speed.expected_s(self.size)
            self._hedge_at(now + self._first_s(attempt))

    async def _run(self, attempt: FunctionAttempt) -> None:
        try:
            value = await self._runner(self, attempt.begin)
        except GeneratorExit:
            # Its event loop was closed; nothing may follow.
            raise
        except BaseException as error:
            # SystemExit, too: it belongs to the caller, and would end the event loop here.
            if isinstance(error, FunctionRaised):
                error = error.error
            cut_traceback(error)
            self._raised(attempt, error)
        else:
            self._answered(attempt, value)

    def _answered(self, attempt: FunctionAttempt, value: Any) -> None:
        if attempt.given_up or attempt.called_off or attempt.timed_out:
            self._raised(attempt, asyncio.CancelledError())
            return
        now = self._end(attempt)
        self.limiter.answered(attempt, self.size, now)
        if attempt.expected_s:
            self.limiter.tail.ended((now - attempt.started_at) / attempt.expected_s)
        self._tally.attempt_ended(self.number, attempt, "answered", now)
        self.result = value
        self._leave("", "")
        self._on_end(value)

    def _settle(self, attempt: FunctionAttempt) -> None:
        """Clean up after the task of an attempt: it may have been cancelled before its first step."""
        if not attempt.over:
            self._raised(attempt, asyncio.CancelledError())
        self.limiter.go()

    def _raised(self, attempt: FunctionAttempt, error: BaseException) -> None:
        now = self._end(attempt, rejected=isinstance(error, Throttled))
        limiter = self.limiter
        if attempt.given_up:
            return
        if attempt.called_off:
            limiter.breaker.abandoned(probe=attempt.probe)
            if attempt.expected_s:
                limiter.tail.given_up((now - attempt.started_at) / attempt.expected_s)
            self._tally.attempt_ended(self.number, attempt, "cancelled", now)
            if not self.over:  # recalled
                self._attempts -= 1
                self._hedges -= attempt.hedge
            if not (self.over or self._live):
                self._turn = limiter.push(self._rank, self._start)
            return
        if attempt.timed_out:
            error = self._timeout(attempt)
        self._failed(attempt, error, now)

    def give_up(self, attempt: FunctionAttempt) -> None:
        """Go on without an attempt that swallows its cancellation. It keeps its place until it ends."""
        attempt.given_up = True
        self._live.remove(attempt)
        self._failed(attempt, self._timeout(attempt), self.limiter.now())
        self.limiter.go()

    def _timeout(self, attempt: FunctionAttempt) -> FunctionTimeout:
        return FunctionTimeout(f"{self._tally.name} took longer than {self.options.timeout_s:g} s")

    def _end(self, attempt: FunctionAttempt, *, rejected: bool = False) -> float:
        """Free what an attempt holds; return the time."""
        now = self.limiter.now()
        attempt.over = True
        if attempt.timer is not None:
            attempt.timer.cancel()
        if not attempt.given_up and attempt in self._live:
            self._live.remove(attempt)
        self.limiter.ended(attempt, now, rejected=rejected)
        return now

    def _failed(self, attempt: FunctionAttempt, error: BaseException, now: float) -> None:
        limiter = self.limiter
        self._errors[attempt.number] = error
        text = f"{type(error).__name__}: {one_line(text_of(error), _MESSAGE_CHARS)}"
        passes = self._passes(error)
        result: AttemptResult = "failed" if passes else "refused"
        self._tally.attempt_ended(
            self.number, attempt, "throttled" if isinstance(error, Throttled) else result, now, text
        )
        if isinstance(error, Throttled):
            asked_s = error.retry_after_s
            limiter.throttled(attempt, None if asked_s is None or math.isnan(asked_s) else asked_s, now)
        # An error that a retry does not help is a matter of the arguments.
        opens = limiter.failed(attempt, text, now, counts=passes)
        if not self.over:
            self._go_on(attempt, text, now, passes=passes)
        if opens:
            limiter.strand(now)

    def _go_on(self, attempt: FunctionAttempt, text: str, now: float, *, passes: bool) -> None:
        limiter, options = self.limiter, self.options
        tries = self._attempts - self._hedges
        again = passes and tries <= options.retries
        wait_s = options.wait_s(tries, self._rng) if again else 0.0
        self._not_before = now + wait_s
        if self._live:
            if attempt.hedge and again:
                self._hedges -= 1
            youngest = self._live[-1]
            self._hedge_at(max(self._not_before, youngest.started_at + self._first_s(youngest)))
        elif not again or self.begun or self._not_before >= self._deadline_at:
            self.fail(FAILED, text)
        elif refusal := limiter.refusal(now):
            self.fail(OPEN, refusal)
        else:
            self._wait_until(self._not_before, self._retry)

    def _passes(self, error: BaseException) -> bool:
        """Whether a retry may help."""
        if isinstance(error, Throttled):
            return True
        try:
            return not self.refused and self.options.retries_error(error)
        except Exception as problem:
            add_note(error, f"not retried, because retry_on raised {type(problem).__name__}: {text_of(problem)}")
            return False

    def _retry(self) -> None:
        self._turn = self.limiter.push(self._rank, self._start)
        self.limiter.go()

    # Hedges

    def _first_s(self, attempt: FunctionAttempt) -> float:
        """Age, in seconds, at which an attempt is checked first."""
        hedge = self.options.hedge
        return max(FIRST_LOOK_S, attempt.expected_s) if hedge is True else float(hedge)

    def _hedge_at(self, at: float) -> None:
        if self.options.hedge is not False and self._hedges < self.options.max_hedges:
            self._wait_until(at, self._look)

    def _look(self) -> None:
        """Ask for a hedge of the youngest attempt, or look again later."""
        self._timer = None
        if self.over or not self._live:
            return
        attempt, now = self._live[-1], self.limiter.now()
        age_s = now - attempt.started_at
        if self.options.hedge is True and not self._worth(attempt, age_s):
            self._hedge_at(attempt.started_at + max(_LATER * age_s, FIRST_LOOK_S))
            return
        # Before the calls of its priority that wait, and after those of a higher one.
        rank = (self._rank[0], -1, 0.0, self.number)
        self._turn = self.limiter.push(rank, self._hedge)
        self.limiter.go()

    def _worth(self, attempt: FunctionAttempt, age_s: float) -> bool:
        """Whether a new attempt is likely to end before this one, by the ages at which others have ended."""
        speed = self.limiter.speed
        if not speed.settled:
            return False
        attempt.expected_s = expected_s = speed.expected_s(self.size)
        return WORTH * expected_s <= expected_s * self.limiter.tail.residual(age_s / expected_s)

    def _hedge(self, now: float) -> None:
        if not self._live or self._hedges >= self.options.max_hedges:
            return
        group = self._group
        if group.hedges + 1 > max(LEAST_HEDGES, self.options.hedge_budget * group.calls):
            age_s = now - self._live[-1].started_at
            self._hedge_at(now + max((_LATER - 1) * age_s, FIRST_LOOK_S))
            return
        self._hedges += 1
        group.hedges += 1
        self._start(now, hedge=True)

    def _wait_until(self, at: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = _later(at - self.limiter.now(), act)

    # Ends

    @property
    def _deadline_at(self) -> float:
        return math.inf if self.options.deadline_s is None else self._submitted_at + self.options.deadline_s

    def _too_late(self) -> None:
        self.fail("deadline", f"no value within {self.options.deadline_s:g} s")
        self.limiter.go()

    def fail(self, reason: str, detail: str) -> None:
        """Fail it: `OPEN`, "closed", "deadline" or `FAILED`."""
        error = self._error(reason, detail)
        mine = isinstance(error, EngineError) and all(error is not each for each in self._errors.values())
        self.result = Raised(error, refused=mine or self.refused)
        self._leave(reason, detail)
        self._on_end(self.result)

    def _error(self, reason: str, detail: str) -> BaseException:
        """The exception for the caller: that of the last attempt, with notes on those before."""
        raised = [self._errors[number] for number in sorted(self._errors)]
        seconds = self.limiter.now() - self._submitted_at
        if reason == "closed":
            return EngineError(f"{self._tally.name} was closed before this call had ended")
        if reason == "deadline":
            late = FunctionTimeout(f"{self._tally.name}: {detail}")
            note_attempts(late, raised, seconds)
            return late
        if not raised:
            return CircuitOpen(detail)
        note_attempts(raised[-1], raised[:-1], seconds)
        if reason == OPEN:
            add_note(raised[-1], f"not tried again: {detail}")
        return raised[-1]

    def _leave(self, reason: str, detail: str) -> None:
        """End the call, and cancel its attempts."""
        limiter, now = self.limiter, self.limiter.now()
        self.over = True
        for timer in (self._deadline, self._timer):
            if timer is not None:
                timer.cancel()
        if self._turn is not None:
            limiter.leave(self._turn)
        live, self._live = self._live, []
        for attempt in live:
            attempt.call_off()
        limiter.calls.pop(self, None)
        limiter.used_at = now
        self._tally.call_ended(
            self.number, reason, self.size, min(self._started_at, now) - self._submitted_at, self._attempts, now
        )
        # Without these references, which are cycles, its arguments are freed at once.
        self._deadline = self._timer = self._turn = None
        self._errors.clear()


@dataclass(eq=False)
class FunctionAttempt:
    """One try of a call. Times are seconds of the event loop's clock."""

    call: PendingCall
    number: int
    started_at: float
    hedge: bool
    reservation: Reservation
    probe: bool
    """Whether it started while the circuit was open."""
    expected_s: float = 0.0
    """Its expected latency; 0 if it is not needed, or not known."""
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    timed_out: bool = False
    called_off: bool = False
    """Whether its call ended without it, or waits for another turn."""
    given_up: bool = False
    over: bool = False

    @property
    def late(self) -> bool:
        """Whether its call had ended before."""
        return self.call.over

    def begin(self) -> None:
        """Note that the function is called now. Raises `CancelledError` if the limits do not allow it any more."""
        now = self.call.limiter.now()
        if now >= self.call.limiter.quota.valid_until:
            self.called_off = True
            raise asyncio.CancelledError
        self.reservation.sent(now)

    def recall(self) -> None:
        """End it, and let its call wait for another turn."""
        if not self.timed_out:
            self.call_off()

    def call_off(self) -> None:
        """Cancel it. What it returns or raises counts for nothing."""
        self.called_off = True
        if self.task is not None:
            self.task.cancel()

    def time_out(self) -> None:
        self.timed_out = True
        if self.task is not None:
            self.task.cancel()
            self.timer = _later(SWALLOWED_AFTER_S, self._overrun)

    def _overrun(self) -> None:
        if not self.called_off:
            self.call.give_up(self)


def _later(seconds: float, act: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, act)
