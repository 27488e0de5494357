"""The upstreams of an engine by name, which a reload of the configuration changes while calls are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from ..observers import Observers
from ..sources import Source
from .calls import Call
from .latency import Tail
from .upstream import Upstream

Moves: TypeAlias = Mapping[tuple[str, tuple[str, ...]], tuple[str, ...]]
"""By the name of who calls and the sources that it names: the sources that may answer now."""


class Upstreams(dict[str, Upstream]):
    """The upstreams that take calls, by name.

    A removed upstream is not among them, but `upstreams[name]` still finds it: jobs that it failed refer to it by name.
    """

    def __init__(self, upstreams: Mapping[str, Upstream]) -> None:
        super().__init__(upstreams)
        self.tail = Tail()
        """At which ages attempts end, as a multiple of their expected latency: the sources learn it together."""
        self.draining: Sequence[Upstream] = ()
        """Removed upstreams with attempts under way."""
        self.all: Sequence[Upstream] = tuple(self.values())
        """All upstreams that may have attempts under way."""
        self.changed = False
        """Whether there were others before, so that calls have to `settle`."""
        self._removed: dict[str, Upstream] = {}
        self._moves: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}

    def __missing__(self, name: str) -> Upstream:
        return self._removed[name]

    def change(self, upstreams: Mapping[str, Upstream], moves: Moves) -> frozenset[str]:
        """Go on with `upstreams`. Those that are not among them drain. Return the names that mean nothing, or another
        upstream, from now on.
        """
        leaving = [upstream for name, upstream in self.items() if upstreams.get(name) is not upstream]
        self._removed.update((upstream.name, upstream) for upstream in leaving)
        self.clear()
        self.update(upstreams)
        self._moves = {origin: moves.get((origin[0], target), target) for origin, target in self._moves.items()}
        self._moves.update(moves)
        self.changed = True
        self._drain((*self.draining, *leaving))
        return frozenset(upstream.name for upstream in leaving)

    def take_drained(self) -> list[Upstream]:
        """Return the removed upstreams whose last attempt has ended, once each."""
        drained = [upstream for upstream in self.draining if not upstream.live]
        if drained:
            self._drain([upstream for upstream in self.draining if upstream.live])
        return drained

    def _drain(self, draining: Sequence[Upstream]) -> None:
        self.draining, self.all = draining, (*self.values(), *draining)

    def settle(self, call: Call[Any]) -> None:
        """Let `call` name the sources that may answer it now. There may be none left."""
        if self.changed:
            sources = self._moves.get((call.name, call.sources), call.sources)
            call.sources = tuple([name for name in sources if name in self])


def listen(
    source: Source, loop: asyncio.AbstractEventLoop, observers: Observers, *, on_change: Callable[[], None]
) -> None:
    """Listen to a source whose replicas come, go and change. `on_change` is called in the event loop after each change,
    because the source may take calls again, or stop taking them.
    """

    def handle() -> None:
        for change in source.changes():
            observers.emit(change)
        on_change()

    def changed() -> None:  # any thread may call this
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(handle)

    source.listen(changed)
