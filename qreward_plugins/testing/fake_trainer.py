"""What the fake trainers of the three frameworks share: their event loop, how they are closed, the check of flags, and
stand-ins for modules of a framework that is not installed, with the few names that reward code imports.

A real trainer runs rewards in actors and schedulers. Here an event loop in a thread of its own runs them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import importlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..simulation.clock import finish
from .generation import HeldGenerations

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
DraftT = TypeVar("DraftT")


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str, *, note: str = "") -> None:
    """Raise `TypeError` for the first name in `given` that is not `known`, with the nearest known one and `note`."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted(names))}."
            raise TypeError(f"{what} has no {name!r}: {hint}{note}")


def load(path: Any) -> Any:
    """What is at a dotted path; anything but a text is returned as it is.

    Raises the errors of the import: `ModuleNotFoundError`, `AttributeError`, and `ValueError` without any dot.
    """
    if not isinstance(path, str):
        return path
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class BackgroundLoop:
    """A thread with an event loop. It runs until it is closed, also between calls, because trainers sample ahead while
    they train.

    `name` is the name of the thread; `owner` names the closed object in errors.
    """

    def __init__(self, name: str, owner: str) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._closed = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._play, name=name, daemon=True)
        self._thread.start()

    def _play(self) -> None:
        self.loop.run_forever()
        finish(self.loop)

    def run(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None, why: Callable[[], str] | None = None
    ) -> T:
        """Run it to its end and return its result; call this from another thread. If the caller stops waiting, it is
        cancelled.

        Raises its errors, `RuntimeError` if the loop is closed, and `TimeoutError` after `timeout_s` seconds, with the
        message that `why` returns.
        """
        # Under the lock, because a stopped loop would never run the coroutine.
        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError(f"this {self._owner} is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            # Before the cancellation, which changes what the message counts.
            message = why() if why is not None else f"no result within {timeout_s} s"
        finally:
            future.cancel()
        raise TimeoutError(message)

    def close(self) -> None:
        """Cancel what runs, stop the thread, close the loop. May be called more than once."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self.loop.call_soon_threadsafe(self.loop.stop)
            if self._thread is not threading.current_thread():  # a garbage collection may come at any time
                self._thread.join()


class FakeTrainer(Generic[DraftT]):
    """The base of the fake trainers. `loop` and `driver` name the threads of the event loop and of started steps.
    `timeout_s` bounds what `_run` runs.

    Leaving the context closes it. Methods are for one thread, except `release` and `wait_until_held`.
    """

    def __init__(self, loop: str, driver: str, held: HeldGenerations[Any], timeout_s: float | None) -> None:
        self._driver = driver
        self._held = held
        self._timeout_s = timeout_s
        self._background: ThreadPoolExecutor | None = None
        self._loop = BackgroundLoop(loop, type(self).__name__)
        self._finalizer = weakref.finalize(self, self._loop.close)

    def release(self, which: Callable[[DraftT], bool] | None = None) -> int:
        """Release held generations for which `which` is true; return their number. From any thread or hook."""
        return self._held.release(which)

    def wait_until_held(self, count: int, timeout_s: float = 20.0) -> None:
        """Block until `count` generations are held; for tests that start a step. Raises `TimeoutError`."""
        self._held.wait_until(count, timeout_s)

    def close(self) -> None:
        """End what still runs, and stop the threads. May be called more than once."""
        try:
            if self._finalizer.alive:
                self._end()
        finally:
            self._finalizer()
            if self._background is not None:
                self._background.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        """End what the framework's own classes run, before the loop is closed."""

    def _in_background(self, step: Callable[..., T], *args: object) -> Future[T]:
        """Run a step in a thread of its own, for tests that act while it runs. Raises `RuntimeError` if closed."""
        if not self._finalizer.alive:
            raise RuntimeError(f"this {type(self).__name__} is closed")
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix=self._driver)
        return self._background.submit(step, *args)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the event loop for at most `timeout_s` seconds; a `TimeoutError` says what it waits for."""
        return self._loop.run(coroutine, self._timeout_s, self._waiting_for)

    def _waiting_for(self) -> str:
        waiting = f"{len(self._held)} held generations" if len(self._held) else "rewards"
        return f"the real trainer would wait on: after {self._timeout_s} s {waiting} are pending"


@contextmanager
def stand_in_modules(
    contents: Mapping[str, Mapping[str, Any]],
    *,
    proof: str,
    over_installed: bool = False,
    anew: Collection[str] = (),
) -> Iterator[bool]:
    """Put modules and their packages into `sys.modules` while the context is open. `contents` maps full names to their
    attributes.

    `proof` is a module that only the real framework has, because other projects use the same package names. If it can
    be found, nothing happens, unless `over_installed`. Yields whether the stand-ins are in place. Leaving the context
    restores the former modules; objects imported meanwhile stay. Packages in `anew` are imported again in the context,
    and restored after it. For one thread at a time.
    """
    if not over_installed and _is_installed(proof):
        yield False
        return
    packages = {".".join(name.split(".")[:depth]) for name in contents for depth in range(1, name.count(".") + 1)}
    contents = dict(sorted({**{name: {} for name in packages}, **contents}.items()))
    roots = {name.split(".")[0] for name in contents}
    before = _taken_out(roots | set(anew))
    made: dict[str, ModuleType] = {}
    for name, held in contents.items():
        module = ModuleType(name, "A stand-in of qreward_plugins.testing, for tests without the framework.")
        module.__path__ = []
        vars(module).update(held)
        made[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    sys.modules.update(made)
    try:
        yield True
    finally:
        _taken_out(set(anew))
        for name, module in made.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name not in sys.modules})


def _taken_out(roots: set[str]) -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in roots}


def _is_installed(proof: str) -> bool:
    try:
        return importlib.util.find_spec(proof) is not None
    except (ImportError, ValueError):
        return False
