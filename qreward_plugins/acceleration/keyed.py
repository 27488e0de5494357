"""The calls of one key of an accelerated function."""

from __future__ import annotations

import asyncio
import math
import random

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

    def bind(self, rng: random.Random, observers: Observers, channel: Channel | None) -> None:
        """Serve the running event loop from now on."""
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
        )
        if self.membership is not None:
            self.membership.start(self.dispatcher)

    def forgettable(self, now: float, idle_s: float) -> bool:
        """Whether nothing would change if it was made anew: no calls for `idle_s`, and a closed circuit."""
        idle = not (self.waiting or self.upstream.live)
        return idle and self.upstream.breaker.closed and now - self.used_at >= idle_s

    async def aclose(self) -> None:
        await self.dispatcher.aclose()
        if self.membership is not None:
            await self.membership.aclose()
