"""An attempt: one try of one job at one source, and what it holds while it runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..quotas import Reservation
from ..sources.base import Request
from .jobs import Job
from .lane import Lane

START_WITHIN_S = 120.0
"""Seconds that a source may take to begin an attempt, beyond its time limit: an import can be slow."""


@dataclass(eq=False, slots=True)
class Attempt:
    """One try of one job at one source. Times are seconds of the event loop's clock."""

    job: Job
    lane: Lane
    request: Request
    reservation: Reservation
    started_at: float
    probe: bool
    """Whether the source's breaker was open when this attempt started, so that its end decides about the source."""
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    timed_out: bool = False

    def start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the source time to begin (to connect, to start a worker process); its time limit runs from then on."""
        self.timer = loop.call_later(START_WITHIN_S + self.lane.timeout_s, self.expire)

    def on_sent(self) -> None:
        """Stamp the quota with the time at which the request was really written, and start the time limit."""
        loop = asyncio.get_running_loop()
        self.reservation.sent(loop.time())
        if self.timer is not None:
            self.timer.cancel()
            self.timer = loop.call_later(self.lane.timeout_s, self.expire)

    def expire(self) -> None:
        """End the attempt because the source took too long."""
        self.timed_out = True
        self.cancel()

    def cancel(self) -> None:
        """End the attempt; what it holds is given back when its task has ended."""
        if self.task is not None:
            self.task.cancel()
