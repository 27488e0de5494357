"""Sources that take no calls for a while: held by hand, or because the trainer has their devices.

`HeldSources` holds sources by hand, here or from another process, and tells the journal how all of them are. The
journal's file is where the processes of a run and those who look at it meet: about once a second each process writes
the state of its sources there, and reads which of them are held (`journal.live_sources`). So it needs neither a port
nor a server. A run without a journal is held by `RewardEngine.hold` only.

`RewardPhases` lets judges on the trainer's devices take calls only while the trainer asks for rewards. Adapters say
when a reward phase begins and ends. Sources without `colocated: true` notice nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..config.names import configured_name
from ..errors import EngineError, ReplicasNotChanged, ReplicasNotStarted
from ..observers import EngineStatistics

if TYPE_CHECKING:
    from .lifetime import Lifetime


_BY_HAND = "held by hand; RewardEngine.release or `qreward sources --release` ends this"


class HeldSources:
    """The sources of an engine that are held by hand. `statistics` is that of the engine."""

    def __init__(self, lifetime: Lifetime, statistics: Callable[[], EngineStatistics]) -> None:
        self._lifetime = lifetime
        self._statistics = statistics
        self._by_program: frozenset[str] = frozenset()
        self._from_outside: frozenset[str] = frozenset()
        if lifetime.journal is not None:
            lifetime.journal.watch(self._look_soon)

    def hold(self, source: str, *, held: bool) -> None:
        """Hold a source, or release it. Raises `EngineError` for an unknown one."""
        if self._lifetime.server is not None:
            raise EngineError(
                "the reward server has the sources; use `qreward sources` where it runs, with its journal"
            )
        if held or source not in self._by_program:  # a reload may have removed a held one
            self._lifetime.upstreams_of(source)  # raises for an unknown one
        released = {each for each in self._by_program if source in (each, configured_name(each))}
        self._by_program = self._by_program | {source} if held else self._by_program - released
        self.apply()

    def apply(self) -> None:
        """Hold what is held by name, and nothing else: a reload may have brought or renamed sources."""
        names = self._by_program | self._from_outside
        changed = False
        for name, upstream in self._lifetime.upstreams.items():
            why = _BY_HAND if {name, configured_name(name)} & names else ""
            changed |= upstream.hold(why)
        if changed and self._lifetime.dispatcher is not None:
            self._lifetime.dispatcher.look_again()

    def _look_soon(self, held: frozenset[str]) -> None:
        """Called in a thread of the journal, with what is held from outside."""
        loop = self._lifetime.loop
        # In simulated time, seconds pass that do not exist.
        if loop is not None and not getattr(loop, "is_simulated", False):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._look, held)

    def _look(self, held: frozenset[str]) -> None:
        self._from_outside = held
        self.apply()
        journal, dispatcher = self._lifetime.journal, self._lifetime.dispatcher
        if journal is not None and dispatcher is not None and not self._lifetime.is_closing:
            sources = self._statistics().sources
            journal.tell({name: self._told(name, asdict(each)) for name, each in sources.items()})

    def _told(self, name: str, statistics: dict[str, Any]) -> dict[str, Any]:
        upstream, dispatcher = self._lifetime.upstreams[name], self._lifetime.dispatcher
        assert dispatcher is not None
        return {
            **statistics,
            "by_program": bool({name, configured_name(name)} & self._by_program),
            "problem": upstream.problem(dispatcher.now()),
            "waiting": dispatcher.waiting_for(upstream)[0],
            "concurrency": upstream.quota.concurrency,
            "requests_per_minute": 60 * upstream.quota.rate_per_s,
        }


_log = logging.getLogger("qreward_plugins.engine")

_LOOK_EVERY_S = 0.05


class RewardPhases:
    """The reward phases of one engine."""

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    @property
    def sources(self) -> tuple[Any, ...]:
        """The sources whose servers use the trainer's devices."""
        sources: list[Any] = [upstream.source for upstream in self._lifetime.upstreams.values()]
        return tuple(source for source in sources if source.colocated)

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
        settling = asyncio.ensure_future(self._lifetime.bind().settled())
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
