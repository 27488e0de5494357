"""Starts the servers of sources that have servers of their own, before the first samples.

A model takes minutes to load. Were it loaded by the first request, that attempt would be over its time limit, and the
samples beyond their deadline, before any server could answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


class SourceStarts:
    """The starts of one engine's sources, of those that have servers (`SourceKind.has_servers`)."""

    def __init__(self, sources: Iterable[Any]) -> None:
        self._sources = [source for source in sources if getattr(type(source), "has_servers", False)]

    @property
    def over(self) -> bool:
        """Whether all sources are started."""
        return not self._sources

    async def done(self) -> None:
        """Start all sources at the same time, and wait until they are ready.

        Raises what `start` of a source raises, `ReplicasNotStarted` for one. Cancelling ends only the wait.
        """
        starts = [asyncio.ensure_future(source.start()) for source in self._sources]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        self._sources = []
