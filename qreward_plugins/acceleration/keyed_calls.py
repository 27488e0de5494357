"""The calls of one key of an accelerated function."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from uuid import UUID

from ..config import Scheduling
from ..observers import Observers
from ..scheduling import Dispatcher, Upstream
from ..sharing.membership import Channel, Membership


class KeyedCalls:
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
        if channel is not None and self.membership is None:
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


def shared_name(key: object) -> str:
    """What all processes know a key by: the same text for equal keys. Raises `TypeError` for a key without one.

    `repr` is no such text: that of an object may hold its address, and that of a set has no fixed order.
    """
    if isinstance(key, str):
        return f"text {str.__str__(key)!r}"
    if isinstance(key, (int, float)):
        return f"number {int(key) if key == key // 1 else float(key)!r}"
    if key is None or isinstance(key, (bytes, UUID, PurePath)):
        return repr(key)
    if isinstance(key, Enum):
        return f"{type(key).__qualname__}.{key.name}"
    if isinstance(key, tuple):
        return f"({','.join(map(shared_name, key))})"
    if isinstance(key, frozenset):
        return f"{{{','.join(sorted(map(shared_name, key)))}}}"
    if is_dataclass(key):
        parts = (shared_name(getattr(key, field.name)) for field in fields(key) if field.compare)
        return f"{type(key).__qualname__}({','.join(parts)})"
    raise TypeError(
        f"key returned {type(key).__qualname__}, which other processes cannot recognise; with `shared`, return a text, "
        "a number, or a tuple of them"
    )
