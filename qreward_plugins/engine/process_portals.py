"""The portals of this process, one for each configuration.

Frameworks may load a reward function several times in one process, but all of them share the limits of a source. So a
process has one portal for each configuration, which `process_portal` returns or opens.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TypeAlias

from ..config import Config
from ..sources import Source
from .engine import RewardEngine
from .portal import EnginePortal

Sources: TypeAlias = Callable[[], Mapping[str, Source]]


class _Portals:
    """The portals of this process, by configuration, and in a forked child those of its parent, which it cannot use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[tuple[Config, int, object, int], EnginePortal]] = []
        self._resources = ExitStack()

    def get(self, config: Config, processes: int, sources: Sources | None, key: object) -> EnginePortal:
        wanted = (config, processes, key, os.getpid())
        with self._lock:
            for known, portal in self._open:
                if known == wanted:
                    return portal
            if not self._open:
                atexit.register(self.close)
            engine = RewardEngine(config, processes=processes, sources=sources() if sources is not None else None)
            portal = self._resources.enter_context(engine.portal())
            self._open.append((wanted, portal))
            return portal

    def close(self) -> None:
        with self._lock:
            atexit.unregister(self.close)
            self._open.clear()
            self._resources.close()


_portals = _Portals()


def process_portal(
    config: Config, *, processes: int = 1, sources: Sources | None = None, key: object = None
) -> EnginePortal:
    """Return this process's portal for a configuration; the first call opens it.

    Equal configurations share one portal. It is closed at the end of the process, or by `close_process_portals`.
    `processes` is the number of processes that share the limits, as for `RewardEngine`. `sources` makes sources that
    the configuration does not describe, and `key` tells these apart. Any thread may call this.

    Raises `ConfigurationError` if a source cannot be opened, or limits cannot be divided between the processes.
    """
    return _portals.get(config, processes, sources, key)


def close_process_portals() -> None:
    """Close every portal that `process_portal` opened. Samples that wait in them fail. Idempotent."""
    _portals.close()
