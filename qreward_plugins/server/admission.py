"""Takes samples in as long as the server is not about to stop and its queue can be done in time."""

from __future__ import annotations

import asyncio

from .load import Load
from .replies import Refused

CLOSED_RETRY_S = 5.0


class Admission:
    """Samples under way, and whether more may come. `most`: most samples under way."""

    def __init__(self, most: int) -> None:
        self._load = Load(most)
        self._most = most
        self.draining = False
        """Whether new samples are refused, because the server is about to stop."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def under_way(self) -> int:
        """Samples that were admitted and have no outcome yet."""
        return self._load.under_way

    def admit(self, samples: int, deadline_s: float) -> None:
        """Take samples in. `ended` or `left` must be called for each. Raises `Refused`."""
        if self.draining:
            detail = "the server is about to stop; send this to another one"
            raise Refused(503, "closed", detail, retry_after_s=CLOSED_RETRY_S)
        retry_after_s = self._load.retry_after_s(samples, deadline_s, asyncio.get_running_loop().time())
        if retry_after_s is not None:
            detail = f"{self.under_way:,} samples are under way, so these cannot be done within {deadline_s:g} s"
            raise Refused(429, "busy", detail, retry_after_s=retry_after_s)
        self._load.began(samples)
        self._idle.clear()

    def admit_some(self, samples: int, deadline_s: float) -> int:
        """Take in as many of `samples` as can be done in time, and return their number; see `admit`.

        Raises `Refused` if it is none.
        """
        room = self._load.room(samples, deadline_s, asyncio.get_running_loop().time())
        self.admit(room or samples, deadline_s)
        return room

    def room(self, samples: int, deadline_s: float) -> int:
        """Return how many of `samples`, which may come in several requests, could be taken in now."""
        if self.draining:
            return 0
        room = self._load.room(samples, deadline_s, asyncio.get_running_loop().time())
        # A request that comes alone may be larger, but only one of several comes alone.
        return min(room, max(0, self._most - self.under_way))

    def ended(self, samples: int) -> None:
        """Note that samples have their outcomes."""
        self._load.ended(samples, asyncio.get_running_loop().time())
        self._look()

    def left(self, samples: int) -> None:
        """Note that samples ended without outcomes, because their caller has gone."""
        self._load.left(samples)
        self._look()

    async def idle(self) -> None:
        """Wait until no sample is under way."""
        await self._idle.wait()

    def _look(self) -> None:
        if not self.under_way:
            self._idle.set()
