"""Virtual time for code that reads the wall clock, in one place.

The event loop of a run is `TickingLoop`: everything that waits by asyncio is in virtual
time without further ado. Peers read other clocks, too. `install` puts wrappers over the functions of `time` that say
what time it is; during a run (`virtual`) they answer with the loop's time, else with the real one. It comes before the
import of any peer, so that `from time import monotonic` gets a wrapper. `datetime.now` cannot be wrapped like that;
`virtual_dates` replaces the names `datetime` in the modules it is given.

Threads have no virtual time. Work that a peer hands to the loop's executor is done on the spot instead
(`InlineExecutor`), which also makes its order certain.
"""

from __future__ import annotations

import datetime
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from qreward_plugins.simulation import VirtualTimeLoop

EPOCH_S = 1_800_000_000.0
"""The wall clock's time at the start of a run, at which a minute begins."""

TICK_S = 1e-6
"""What one round of the event loop takes. Code that waits until a sum of floats is whole relies on time going on."""

_REAL = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
_running: tuple[VirtualTimeLoop, float] | None = None


def _now(name: str) -> float:
    if _running is None:
        return _REAL[name]()
    loop, started_s = _running
    return loop.time() + started_s


def _wrapper(name: str) -> Callable[[], float]:
    return lambda: _now(name)


def _ns_wrapper(name: str) -> Callable[[], int]:
    return lambda: int(_now(name) * 1e9)


def install() -> None:
    """Put the wrappers over `time`'s functions, for good. Idempotent."""
    for name in _REAL:
        setattr(time, name, _wrapper(name))
        setattr(time, f"{name}_ns", _ns_wrapper(name))


@contextmanager
def virtual(loop: VirtualTimeLoop, *, into_minute_s: float) -> Iterator[None]:
    """All clocks tell the loop's time; the run starts `into_minute_s` seconds after a full minute of the wall clock."""
    global _running
    _running = (loop, EPOCH_S + into_minute_s)
    try:
        yield
    finally:
        _running = None


class TickingLoop(VirtualTimeLoop):
    """Virtual time in which every round of the loop takes `TICK_S`."""

    def _run_once(self) -> None:
        self._now += TICK_S
        super()._run_once()  # type: ignore[misc]


class _DateTimeMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime.datetime)


class VirtualDateTime(datetime.datetime, metaclass=_DateTimeMeta):
    """`datetime.datetime`, but what it says is now is what `time.time` says; its values are plain datetimes."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return datetime.datetime.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return datetime.datetime.fromtimestamp(time.time(), datetime.timezone.utc).replace(tzinfo=None)


def virtual_dates(*prefixes: str) -> None:
    """Replace `datetime`, be it the class or the module, in every loaded module of these names and below."""
    module = types.SimpleNamespace(**{**vars(datetime), "datetime": VirtualDateTime})
    for name, loaded in list(sys.modules.items()):
        if name.startswith(prefixes):
            if vars(loaded).get("datetime") is datetime.datetime:
                vars(loaded)["datetime"] = VirtualDateTime
            elif vars(loaded).get("datetime") is datetime:
                vars(loaded)["datetime"] = module


class InlineExecutor(ThreadPoolExecutor):
    """Does the work where it is handed in, in no time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


__all__ = ["EPOCH_S", "InlineExecutor", "TickingLoop", "VirtualDateTime", "install", "virtual", "virtual_dates"]
