"""Simulated sources: they answer in virtual time, enforce their limits strictly, and fail on command.

They replace real sources, so a test runs the production scheduling code. They count as a strict provider does, in
sliding windows of arrivals, and record every request over a limit.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import SourceError, Throttled
from ..sources.base import Reply, Request
from ..spent import Usage

Behaviour = Callable[[int, Request, float], "float | SourceError"]
"""(number of the request from 0, request, time) -> seconds until its answer, or the error it ends with at once."""


@dataclass
class SimulatedSource:
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
    slots: int | None = None
    local: bool = False
    """Whether it stands for a function in this machine's processes."""
    spare: int = 0
    """Calls that it can take beyond its concurrency: last tries of samples that hung."""

    arrivals: list[float] = field(default_factory=list)
    violations: list[tuple[float, str]] = field(default_factory=list)
    in_flight: int = 0
    cancelled: int = 0
    closed: bool = False
    _window: deque[tuple[float, int]] = field(default_factory=deque)

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        now = asyncio.get_running_loop().time()
        number = len(self.arrivals)
        self.arrivals.append(now)
        on_sent()
        outcome = self.behaviour(number, request, now)
        self._admit(self.answer(request).usage or Usage(), now, book=not isinstance(outcome, Throttled))
        self.in_flight += 1
        try:
            if isinstance(outcome, SourceError):
                await asyncio.sleep(0)
                raise outcome
            await asyncio.sleep(outcome)
            return self.answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def aclose(self) -> None:
        self.closed = True

    def _admit(self, usage: Usage, now: float, *, book: bool) -> None:
        while self._window and self._window[0][0] <= now - self.window_s:
            self._window.popleft()
        tokens = sum(spent for _, spent in self._window) + usage.total_tokens
        over = (
            ("requests", len(self._window) + 1 > self.requests_per_window),
            ("tokens", tokens > self.tokens_per_window),
            ("concurrency", self.in_flight + 1 > self.concurrency),
        )
        for limit, broken in over:
            if broken:
                self.violations.append((now, limit))
                wait = self._window[0][0] + self.window_s - now if self._window else 1.0
                raise Throttled(f"{self.name} is over its {limit}", status=429, retry_after_s=wait)
        if book:
            self._window.append((now, usage.total_tokens))
