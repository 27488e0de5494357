"""Defines `SourceChanges`: listens to the sources whose replicas come, go and change while calls are under way.

A source tells of a change in any thread, such as the one that follows a pool of servers. What follows happens in the
event loop: observers get the events, and the calls that waited for the change are placed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from ..observers import Observers, ReplicaChanged
from .jobs import Job
from .upstream import Upstream


class SourceChanges:
    """Handles the changes of replicas in the event loop `loop`.

    `jobs` are all jobs, now and later. `enqueue` lets a job wait for its sources again. `on_change` is called after
    every change, because a source may take calls again, or stop taking them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        jobs: Iterable[Job],
        *,
        observers: Observers,
        enqueue: Callable[[Job], None],
        on_change: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._jobs = jobs
        self._observers = observers
        self._enqueue = enqueue
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
        if upstream.holds is not None:
            for job in [job for job in self._jobs if upstream.name in job.held_at]:
                job.held_at -= {upstream.name}
                if not (job.live or job.undecided):
                    self._enqueue(job)
        self._on_change()
