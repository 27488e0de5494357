"""An attempt: one try of one job at one source, and what it holds while it runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..quotas import Reservation
from ..sources.base import Request
from .jobs import Job
from .lane import Lane


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

    def on_sent(self) -> None:
        """Stamp the quota with the time at which the request was really written."""
        self.reservation.sent(asyncio.get_running_loop().time())

    def expire(self) -> None:
        """End the attempt because the source took too long."""
        self.timed_out = True
        self.cancel()

    def cancel(self) -> None:
        """End the attempt; what it holds is given back when its task has ended."""
        if self.task is not None:
            self.task.cancel()
