"""Holds sources by hand, here or from another process, and tells the journal how all of them are.

The journal's file is where the processes of a run and those who look at it meet: about once a second each process
writes the state of its sources there, and reads which of them are held (`journal.live_sources`). So it needs neither a
port nor a server. A run without a journal is held by `RewardEngine.hold` only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..config.names import configured_name
from ..errors import EngineError
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
        if not changed:
            return
        if self._lifetime.dispatcher is not None:
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
