"""Defines `SourceChanges`: listens to the sources whose replicas come, go and change while calls are under way.

A source tells of a change in any thread, such as the one that follows a pool of servers. What follows happens in the
event loop: observers get the events, and the calls that wait are placed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from ..observers import Observers, ReplicaChanged
from .upstream import Upstream


class SourceChanges:
    """Handles the changes of replicas in the event loop `loop`.

    `on_change` is called after every change, because a source may take calls again, or stop taking them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        observers: Observers,
        on_change: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._observers = observers
        self._on_change = on_change

    def listen(self, upstreams: Iterable[Upstream]) -> None:
        """Handle the changes of these sources from now on, if they tell of changes."""
        for upstream in upstreams:
            listen = getattr(upstream.source, "listen", None)
            if listen is not None:
                listen(partial(self._changed, upstream))

    def _changed(self, upstream: Upstream) -> None:
        """Handle a change, in the event loop. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._handle, upstream)

    def _handle(self, upstream: Upstream) -> None:
        source: Any = upstream.source
        for change in source.look():
            self._observers.emit(ReplicaChanged(self._loop.time(), *change))
        self._on_change()
