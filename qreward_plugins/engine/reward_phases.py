"""Defines `RewardPhases`: lets judges on the trainer's devices take calls only while the trainer asks for rewards.

Adapters say when a reward phase begins and ends. Sources without `colocated: true` notice nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ..errors import ReplicasNotChanged, ReplicasNotStarted
from ..scheduling.upstream import Upstream

_log = logging.getLogger("qreward_plugins.engine")

_LOOK_EVERY_S = 0.05


class RewardPhases:
    """The reward phases of one engine. `upstreams` returns its sources, which a reload may change. `settled` waits for
    the samples that are under way.
    """

    def __init__(self, upstreams: Callable[[], Iterable[Upstream]], settled: Callable[[], Awaitable[None]]) -> None:
        self._upstreams = upstreams
        self._settled = settled
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    @property
    def sources(self) -> tuple[Any, ...]:
        """The sources whose servers use the trainer's devices."""
        return tuple(upstream.source for upstream in self._upstreams() if upstream.source.colocated)

    async def begin(self) -> None:
        """See `RewardEngine.begin_rewards`."""
        async with self._turn():
            await _all(_wake(source) for source in self.sources)

    async def end(self) -> None:
        """See `RewardEngine.end_rewards`."""
        async with self._turn():
            await _all(self._sleep(source) for source in self.sources if source.begun)

    def _turn(self) -> asyncio.Lock:
        """One begin or end at a time, in the order of the calls: a wake-up must not overtake the sleep after it."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = (loop, asyncio.Lock())
        return self._turns[1]

    async def _sleep(self, source: Any) -> None:
        settling = asyncio.ensure_future(self._settled())
        try:
            # Another process may have put the servers to sleep. What is under way here could then only wait for the
            # next phase, and the trainer with it.
            while not settling.done() and not source.asleep:
                await asyncio.wait([settling], timeout=_LOOK_EVERY_S)
        finally:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)
        try:
            await source.sleep(within_s=0.0)
        except ReplicasNotStarted as error:
            if source.begun:  # nobody knows what has become of the start
                raise
            # The start that was under way has failed, and its servers have ended: the devices are free.
            _log.error("%s", error)


async def _wake(source: Any) -> None:
    try:
        await source.wake_up()
    except ReplicasNotChanged as error:
        if not any(replica.state == "up" for replica in source.replicas):
            raise
        _log.error("%s; the other replicas take the calls", error)


async def _all(changes: Iterable[Awaitable[None]]) -> None:
    """Wait for all, then raise the first error."""
    for result in await asyncio.gather(*changes, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
