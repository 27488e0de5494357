"""Virtual time for code that reads the wall clock, in one place.

The event loop of a run is `TickingLoop`, so asyncio waits in virtual time. Peers read other clocks, too. `install`
wraps the clock functions of `time`; during a run (`virtual`) they return the loop's time, else the real one. It must
run before the import of any peer, so that `from time import monotonic` gets a wrapper. `datetime.now` cannot be wrapped
like that, so `virtual_dates` replaces the name `datetime` in given modules.

Threads have no virtual time. So work for the loop's executor is done at once (`InlineExecutor`), which also fixes its
order.
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
"""Seconds of one step of the event loop. Code that waits for a sum of floats to be exact relies on passing time."""

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
    """Wrap the functions of `time` permanently. Idempotent."""
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
    """`datetime.datetime` whose `now` uses `time.time`; its values are plain datetimes."""

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
    """Runs work when it is submitted, without virtual time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


__all__ = ["EPOCH_S", "InlineExecutor", "TickingLoop", "VirtualDateTime", "install", "virtual", "virtual_dates"]
