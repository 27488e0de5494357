"""The calls of one key of an accelerated function."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections.abc import Iterator

from ..config import Scheduling
from ..observers import Observers
from ..scheduling import Dispatcher, Upstream
from ..sharing import Channel, Membership


class Keyed:
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
        if channel is not None:
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
