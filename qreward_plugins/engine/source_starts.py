"""Starts the servers of sources that have servers of their own, and workers on devices, before the first samples.

A model takes minutes to load. Were it loaded by the first request, that attempt would be over its time limit, and the
samples beyond their deadline, before any server could answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from ..errors import ConfigurationError, ReplicasNotStarted

_log = logging.getLogger("qreward_plugins.engine")


class SourceStarts:
    """The starts of one engine's sources, of those that have `start` (see `Source`)."""

    def __init__(self, sources: Iterable[Any]) -> None:
        self._sources = _with_start(sources)
        self._added: list[Any] = []

    @property
    def over(self) -> bool:
        """Whether all sources are started."""
        return not (self._sources or self._added)

    def change(self, sources: Iterable[Any]) -> None:
        """Go on with the sources of another configuration. Those that are not started yet are started by `done`, too.
        If one of these does not start, a line in the log says so, because the others go on working.
        """
        found = _with_start(sources)
        self._sources = [source for source in self._sources if source in found]
        self._added = [source for source in found if source not in self._sources and not source.started]

    def close(self) -> None:
        """Let `done` return: the engine closes, and what follows fails the samples."""
        self._sources, self._added = [], []

    async def done(self) -> None:
        """Start all sources at the same time, and wait until they are ready.

        Raises what `start` of a source raises, `ReplicasNotStarted` or `ConfigurationError`. Cancelling ends only the
        wait.
        """
        while not self.over:
            starts = {asyncio.ensure_future(source.start()): source for source in (*self._sources, *self._added)}
            try:
                ended, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for start in starts:
                    start.cancel()
                await asyncio.gather(*starts, return_exceptions=True)
            for start in ended:
                self._ended(starts[start], start)

    def _ended(self, source: Any, start: asyncio.Task[None]) -> None:
        """Take note of a start. A source that was removed or closed meanwhile is in neither list."""
        try:
            start.result()
        except (ReplicasNotStarted, ConfigurationError) as error:
            if source in self._sources:
                raise
            if source in self._added:
                _log.error("%s", error)
        self._sources = [other for other in self._sources if other is not source]
        self._added = [other for other in self._added if other is not source]


def has_servers(source: object) -> bool:
    """Whether a source has servers of its own (`SourceKind.has_servers`)."""
    return getattr(type(source), "has_servers", False)


def _with_start(sources: Iterable[Any]) -> list[Any]:
    return [source for source in sources if getattr(source, "started", True) is False]
