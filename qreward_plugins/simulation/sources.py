"""Simulated sources: they answer in virtual time, enforce their limits strictly, and fail on command.

They replace real sources, so a test runs the production scheduling code. They count as a strict provider does, in
sliding windows of arrivals, and record every request over a limit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..config import Batch
from ..errors import QRewardError, Throttled
from ..samples.spent import Usage
from ..sources.base import Reply, Request, Source
from .strict_limits import SlidingWindow, StrictLimits

Behaviour = Callable[[int, Request, float], "float | QRewardError"]
"""(number of the request from 0, request, time) -> seconds until its answer, or the error it ends with at once."""
BatchBehaviour = Callable[[int, Sequence[Request], float], "float | QRewardError"]
"""The same for a request of several calls."""
Results = Sequence["Reply | QRewardError"]


@dataclass
class SimulatedSource(Source):
    """A source whose answers take as long as `behaviour` says.

    `requests_per_window`, `tokens_per_window` and `concurrency` are enforced strictly: a request over one of them gets
    `Throttled` with the time until it fits, and is recorded in `violations` as (time, limit).
    """

    name: str
    behaviour: Behaviour = lambda number, request, now: 1.0
    requests_per_window: float = math.inf
    tokens_per_window: float = math.inf
    concurrency: float = math.inf
    window_s: float = 60.0
    answer: Callable[[Request], Reply] = lambda request: Reply(text="1")
    model: str = "simulated"
    local: bool = False
    """Whether it stands for a function in this machine's processes."""
    batch: Batch | None = None
    """How many calls one request may carry. None: one."""
    batch_behaviour: BatchBehaviour | None = None
    """How long a request takes, whatever its calls. Default: as long as `behaviour` says for the slowest of them."""
    results: Callable[[Results], Results] = lambda results: results
    """What a request of several calls answers, given the right results."""

    arrivals: list[float] = field(default_factory=list)
    violations: list[tuple[float, str]] = field(default_factory=list)
    in_flight: int = 0
    cancelled: int = 0
    closed: bool = False
    carried: list[int] = field(default_factory=list)
    """Number of calls of each request."""

    def __post_init__(self) -> None:
        requests = SlidingWindow(self.requests_per_window, self.window_s)
        self._limits = StrictLimits(requests, SlidingWindow(self.tokens_per_window, self.window_s), self.concurrency)

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        return (await self._serve([request], on_sent))[0]

    async def send_batch(self, requests: Sequence[Request], *, on_sent: Callable[[], None]) -> Results:
        return self.results(await self._serve(requests, on_sent))

    async def _serve(self, requests: Sequence[Request], on_sent: Callable[[], None]) -> list[Reply]:
        now = asyncio.get_running_loop().time()
        number = len(self.arrivals)
        self.arrivals.append(now)
        self.carried.append(len(requests))
        on_sent()
        outcome = self._behaved(number, requests, now)
        replies = [self.answer(request) for request in requests]
        tokens = sum((reply.usage or Usage()).total_tokens for reply in replies)
        if broken := self._limits.broken(tokens, self.in_flight, now):
            limit, excess = broken
            self.violations.append((now, limit))
            raise Throttled(f"{self.name} is over its {limit}", status=429, retry_after_s=excess.retry_after_s)
        if not isinstance(outcome, Throttled):
            self._limits.enter(tokens, now)
        self.in_flight += 1
        try:
            if isinstance(outcome, QRewardError):
                await asyncio.sleep(0)
                raise outcome
            await asyncio.sleep(outcome)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        return replies

    def _behaved(self, number: int, requests: Sequence[Request], now: float) -> float | QRewardError:
        if self.batch_behaviour is not None:
            return self.batch_behaviour(number, requests, now)
        each = [self.behaviour(number, request, now) for request in requests]
        failed = next((one for one in each if isinstance(one, QRewardError)), None)
        return failed or max(one for one in each if not isinstance(one, QRewardError))

    async def aclose(self) -> None:
        self.closed = True
