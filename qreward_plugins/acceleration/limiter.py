"""The limits of one key of an accelerated function, and the turns of the calls that wait for them.

The highest rank has the first turn, as soon as quota, pause and circuit let an attempt start. There are no locks: `go`
starts what may start, and is called when a call comes, an attempt ends, or a limit allows more with time.

A function of the user is called as often as the user said, and not once more. So this is no part of the scheduler,
which asks its sources again by what it learns of them. Both use the same quotas, pauses and circuit breaker.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from ..quotas.pauses import Breaker, Pauses
from ..quotas.quota import Quota
from ..scheduling.latency import Speed, Tail
from ..sharing.membership import Channel, Membership
from ..system.threads import cancel_all

if TYPE_CHECKING:
    from .call import Attempt, Call

_log = logging.getLogger("qreward_plugins.accelerate")

ANY_NUMBER = 1_000_000
"""Calls at once of a function without a limit: more than any process can hold."""
LEAST_ENDS = 5
"""Fewest attempts that tell the share of errors."""
MOST_ENDS = 50
"""Attempts that the share of errors is taken of."""

OPEN = "circuit_open"
"""The reason of a call that was refused because the circuit is open."""

Rank: TypeAlias = tuple[int, int, float, int]
"""Lowest first: priority with its sign changed, number of the batch, size with its sign changed, number of the call.
All waiting turns differ."""


class Turn:
    """A start that waits for the limits."""

    __slots__ = ("start",)

    def __init__(self, start: Callable[[float], None]) -> None:
        self.start: Callable[[float], None] | None = start
        """None once it has come, or is withdrawn: it refers to the arguments of the call."""

    def __lt__(self, other: Turn) -> bool:
        return False


class Limiter:
    """Limits, circuit and waiting turns of one key. Times are seconds of the event loop's clock, sizes any unit.

    `bind` has to be called in each event loop before anything else.
    """

    def __init__(self, name: str, quota: Quota, breaker: Breaker, *, most_errors: float | None) -> None:
        self.name = name
        self.quota = quota
        self.breaker = breaker
        self.most_errors = most_errors
        """Share of errors among the last attempts, of which more is a sign of overload: fewer attempts should run at
        once. None: the concurrency is fixed."""
        self._ends: deque[bool] = deque(maxlen=MOST_ENDS)
        """Whether each of the last attempts has failed."""
        self.pauses = Pauses()
        self.speed = Speed()
        self.tail = Tail()
        self.live: dict[Attempt, None] = {}
        """Attempts under way."""
        self.calls: dict[Call, None] = {}
        """Calls that have not ended."""
        self.used_at = -math.inf
        """When a call came or an attempt ended last."""
        self.together = self.hedges = 0
        """Calls that have come since none was under way, and their hedges, which are a share of them."""
        self.membership: Membership | None = None
        self._queue: list[tuple[Rank, Turn]] = []
        self._waiting = 0
        self._soon = False
        self._wake: asyncio.TimerHandle | None = None

    def bind(self, channel: Channel | None, channel_key: str) -> None:
        """Serve the running event loop from now on. What was sent in an earlier one still counts."""
        self._loop = loop = asyncio.get_running_loop()
        self.now = loop.time
        self.live.clear()
        self.calls.clear()
        self._queue.clear()
        self._waiting, self._wake, self._soon = 0, None, False
        self.quota.forget_in_flight(loop.time())
        self.breaker.abandoned(probe=True)
        if channel is not None and self.membership is None:
            self.membership = Membership({channel_key: self}, channel)
        if self.membership is not None:
            self.membership.start(self)

    def forgettable(self, now: float, idle_s: float) -> bool:
        """Whether it may be made anew: nothing has happened for `idle_s`, and no pause or open circuit holds calls
        back.
        """
        if self.calls or self.live or now - self.used_at < idle_s:
            return False
        return self.breaker.wait_s(now) <= 0 and self.pauses.left_s(now) <= 0

    async def aclose(self, within_s: float) -> None:
        """Fail all calls, and wait up to `within_s` seconds until their attempts have ended."""
        tasks = {attempt.task: attempt for attempt in self.live if attempt.task is not None}
        for call in list(self.calls):
            call.fail("closed", "")
        self._queue.clear()
        for task in await cancel_all(list(tasks), within_s=within_s):
            self.ended(tasks[task], self.now())
            _log.warning("%s: a call did not end within %g s of being cancelled, and is abandoned", self.name, within_s)
        if self.membership is not None:
            await self.membership.aclose()
        if self._wake is not None:
            self._wake.cancel()

    def submitted(self, call: Call) -> None:
        """Note that a call has come."""
        if not self.calls:
            self.together = self.hedges = 0
        self.calls[call] = None
        self.together += 1

    # Turns

    def push(self, rank: Rank, start: Callable[[float], None]) -> Turn:
        """Let `start` be called with the time when its turn has come. `go` or `go_soon` has to follow."""
        turn = Turn(start)
        heapq.heappush(self._queue, (rank, turn))
        self._waiting += 1
        return turn

    def leave(self, turn: Turn) -> None:
        """Withdraw a turn, unless it has come."""
        if turn.start is not None:
            turn.start = None
            self._waiting -= 1

    def go_soon(self) -> None:
        """Start what may start, in the next step of the event loop: calls that are submitted in one step go by rank."""
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self.go)

    def go(self) -> None:
        """Start what may start now. While the circuit is open, the turn of each call comes at once: to be refused."""
        self._soon = False
        now, queue = self.now(), self._queue
        while queue:
            turn = queue[0][1]
            start = turn.start
            if start is not None and (wait_s := self.wait_s(now)) > 0 and not self.refusal(now):
                self._wake_at(now + wait_s)
                break
            heapq.heappop(queue)
            if start is not None:
                self.leave(turn)
                start(now)
        if self.membership is not None:
            self._wake_at(self.membership.look(now))

    def wait_s(self, now: float) -> float:
        """Seconds until an attempt may start; infinity if that depends on those under way."""
        return max(self.quota.wait_s(0.0, now), self.pauses.left_s(now))

    def refusal(self, now: float) -> str:
        """Why calls are refused now: the circuit is open. "" if they are not."""
        wait_s = self.breaker.wait_s(now)
        if wait_s <= 0:
            return ""
        when = f"in {wait_s:.3g} s" if wait_s < math.inf else "once a call that tests it has ended"
        return f"the circuit of {self.name} is open after failures in a row; it may be called again {when}"

    def _wake_at(self, at: float) -> None:
        if self._wake is not None:
            if self._wake.when() <= at:
                return
            self._wake.cancel()
        self._wake = self._loop.call_at(at, self._woken) if at < math.inf else None

    def _woken(self) -> None:
        self._wake = None  # event loops run timers a little early, and then it has to wait again
        self.go()

    # Attempts

    def started(self, attempt: Attempt, now: float) -> None:
        """Note that an attempt starts."""
        self.live[attempt] = None
        self.breaker.started()
        self.pauses.started(now)

    def ended(self, attempt: Attempt, now: float, *, rejected: bool = False) -> None:
        """Give the place of an attempt back. `rejected`: the function asked for a pause."""
        self.live.pop(attempt, None)
        attempt.reservation.release(now, rejected=rejected)
        self.used_at = now

    def answered(self, attempt: Attempt, size: float, now: float) -> None:
        """Learn from a value."""
        self.breaker.succeeded()
        self.pauses.answered(attempt.started_at)
        self.quota.answered(now, sent_at=attempt.started_at)
        self.speed.learn(size, now - attempt.started_at)
        self._ends.append(False)

    def throttled(self, attempt: Attempt, retry_after_s: float | None, now: float) -> None:
        """Pause all calls, as the function asks for, and learn its limits."""
        sent_at = attempt.started_at
        in_pause = self.pauses.covers(sent_at)
        learned = self.quota.throttled(now, sent_at=sent_at, retry_after_s=retry_after_s, in_pause=in_pause)
        if learned:
            _log.warning("%s: %s", self.name, learned)
        self.pauses.throttled(retry_after_s, sent_at, now)

    def failed(self, attempt: Attempt, error: str, now: float, *, counts: bool) -> None:
        """Note a failure. `counts`: a retry may help, so that it says something of the function, and not only of the
        arguments.
        """
        if not counts:
            self.breaker.abandoned(probe=attempt.probe)
            return
        self._ends.append(True)
        count = len(self._ends)
        if self.most_errors is not None and count >= LEAST_ENDS and sum(self._ends) > self.most_errors * count:
            self._ends.clear()
            self.quota.timed_out(now, sent_at=attempt.started_at)
        if self.breaker.failed(now, probe=attempt.probe):
            _log.warning("%s (%s)", self.refusal(now), error)
            self.go_soon()

    # What the membership asks for

    def waiting_for(self, _: object) -> tuple[int, float, float]:
        """The number of calls that wait. Functions take no tokens."""
        return self._waiting, 0.0, 0.0

    def call_back(self, _: object, *, sent: bool) -> None:
        """End the attempts that have not begun, with `sent` all, and let their calls wait for another turn."""
        for attempt in list(self.live):
            if not attempt.timed_out and (sent or attempt.reservation.sent_at == -math.inf):
                attempt.call_off()

    def look_again(self) -> None:
        """Start what may start, because the limits have changed."""
        self.go()
