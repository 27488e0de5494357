"""The portals of this process, one for each configuration.

Frameworks may load a reward function several times in one process, but all of them share the limits of a source. So a
process has one portal for each configuration, which `process_portal` returns or opens.

This is no part of `portal`, which the engine imports: here engines are made.
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


_lock = threading.RLock()  # a script that makes an engine may be imported for its function while one is made
_open: list[tuple[tuple[Config, int, object, int], EnginePortal]] = []
"""The portals, each with what it was opened for; in a forked child also those of its parent, which it cannot use."""
_resources = ExitStack()


def process_portal(
    config: Config, *, processes: int = 1, sources: Sources | None = None, key: object = None
) -> EnginePortal:
    """Return this process's portal for a configuration; the first call opens it.

    Equal configurations share one portal. It is closed at the end of the process, or by `close_process_portals`.
    `processes` is the number of processes that share the limits, as for `RewardEngine`. `sources` makes sources that
    the configuration does not describe, and `key` tells these apart. Any thread may call this.

    Raises `ConfigurationError` if a source cannot be opened, or limits cannot be divided between the processes.
    """
    wanted = (config, processes, key, os.getpid())
    with _lock:
        for known, portal in _open:
            if known == wanted:
                return portal
        if not _open:
            atexit.register(close_process_portals)
        engine = RewardEngine(config, processes=processes, sources=sources() if sources is not None else None)
        portal = _resources.enter_context(engine.portal())
        _open.append((wanted, portal))
        return portal


def close_process_portals() -> None:
    """Close every portal that `process_portal` opened. Samples that wait in them fail. Idempotent."""
    with _lock:
        atexit.unregister(close_process_portals)
        _open.clear()
        _resources.close()
