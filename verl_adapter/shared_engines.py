"""Shares one engine among managers of a process that have the same sources, judges and reward function.

Older versions of verl make two managers in one process, for training and validation. Two engines would each use the
whole of every limit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any

from qreward_plugins import Config, EnginePortal, RewardEngine
from qreward_plugins.adapters import Groups


@dataclass
class _Shared:
    process: int
    settings: Config
    function: Any
    engine: RewardEngine
    portal: EnginePortal
    resources: ExitStack = field(default_factory=ExitStack)
    users: int = 0


_lock = threading.Lock()
_open: list[_Shared] = []


@contextmanager
def shared_engine(
    settings: Config, function: Any, make: Callable[[], RewardEngine]
) -> Iterator[tuple[RewardEngine, EnginePortal]]:
    """Yield this process's engine for `settings` and the reward function `function` (None: no judge calls it), and its
    portal.

    `make` makes the engine for the first user; it closes when the last user leaves. Any thread may enter.
    """
    # The manager handles failed samples, so managers that differ only in these keys share an engine.
    settings = settings.model_copy(update={"on_failure": "auto", "groups": Groups()})
    with _lock:
        shared = next((known for known in _open if _matches(known, settings, function)), None)
        if shared is None:
            engine, resources = make(), ExitStack()
            portal = resources.enter_context(engine.portal())
            shared = _Shared(os.getpid(), settings, function, engine, portal, resources)
            _open.append(shared)
        shared.users += 1
    try:
        yield shared.engine, shared.portal
    finally:
        with _lock:
            shared.users -= 1
            if not shared.users:
                _open.remove(shared)
                shared.resources.close()


def _matches(known: _Shared, settings: Config, function: Any) -> bool:
    # A forked process inherits this list, but not the threads of the engines in it.
    return known.process == os.getpid() and known.settings == settings and _same(known.function, function)


def _same(one: Any, other: Any) -> bool:
    """Whether two functions have the same code and values. verl loads a file anew for every manager, so `is` fails."""
    if one is other:
        return True
    try:
        if isinstance(one, partial) and isinstance(other, partial):
            return _all_same([one.func, one.args, one.keywords], [other.func, other.args, other.keywords])
        if isinstance(one, FunctionType) and isinstance(other, FunctionType):
            return _all_same(_parts(one), _parts(other))
        if isinstance(one, CellType) and isinstance(other, CellType):
            return _same(one.cell_contents, other.cell_contents)
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            return _all_same(one, other)
        return type(one) is type(other) and bool(one == other)
    except Exception:  # `==` of a user's objects may raise anything
        return False


def _parts(function: FunctionType) -> list[Any]:
    return [function.__code__, function.__defaults__, function.__kwdefaults__, function.__closure__]


def _all_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(_same(*pair) for pair in zip(some, others, strict=True))
