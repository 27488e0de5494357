"""Calls a function once: in the event loop, in a thread, or in a worker process."""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import Any

from ..errors import ConfigurationError, EngineError, InputError, Mistake
from ..sources.threads import FunctionRaised, ThreadSlots
from ..sources.worker_program import VALUE
from ..sources.workers import CannotLoad, PoolClosed, WorkerPool
from ..system.functions import PathLoader, describe
from .call import Call
from .options import Kind


def _loaded(loader: PathLoader) -> Callable[..., Any]:
    """Load the function in a worker process."""
    found = loader()
    return functools.partial(_value_or_error, getattr(found, "__wrapped__", found))


def _value_or_error(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[bool, Any]:
    """Call the function, and return (True, its value) or (False, its pickled exception)."""
    try:
        return True, function(*args, **kwargs)
    except BaseException as error:
        with suppress(Exception):  # an exception class may refuse attributes
            error.__notes__ = [f"raised in a worker process: {describe(error)}"]  # type: ignore[attr-defined]
        try:
            content = pickle.dumps(error)
            pickle.loads(content)
        except Exception:
            # It cannot be pickled.
            content = pickle.dumps(RuntimeError(describe(error)))
        return False, content


def loader_of(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return what loads `function` in another process. Raises `ConfigurationError` if it has no importable name."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None) or ""
        module = spec.name if spec is not None else os.path.abspath(file) if file.endswith(".py") else ""
    if not name or "<" in name or not module:
        problem = f"process needs a function that can be imported, and {name or function!r} is local, or was typed in."
        remedy = 'Define it at the top level of a module, or use mode="thread".'
        raise ConfigurationError([Mistake("mode", problem, remedy)], origin="accelerate")
    return functools.partial(_loaded, PathLoader(f"{module}:{name}"))


MOST_THREADS = 1024


class FunctionRunner:
    """Calls `function`. `loader` loads it in worker processes; None: it runs here. `slots` is the number of worker
    processes.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], kind: Kind, *, loader: Callable[[], Any] | None, slots: int
    ) -> None:
        self._name = name
        self._function = function
        self._kind = kind
        self._loader = loader
        self._slots = slots
        self._pool: WorkerPool | None = None
        self._threads = ThreadSlots(name, MOST_THREADS) if kind in ("sync", "generator") and loader is None else None

    async def __call__(self, call: Call, on_start: Callable[[], None]) -> Any:
        """Call the function once, or draw the items of a generator. Raises what it raises. A thread raises it in a
        `FunctionRaised`, because no coroutine can raise `StopIteration`.
        """
        if self._kind == "async":
            on_start()
            return await self._function(*call.args, **call.kwargs)
        if call.items is not None:
            on_start()
            await call.items.fill(self._items(call), call.options.timeout_s)
            return None
        if self._threads is None:
            return await self._in_process(call, on_start)
        called = functools.partial(self._function, *call.args, **call.kwargs)
        return await self._threads.run(called, on_start=on_start)

    async def aclose(self) -> None:
        """End the worker processes. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()

    def _items(self, call: Call) -> Any:
        """The asynchronous iterator over the items of a generator."""
        made = self._function(*call.args, **call.kwargs)
        return made if self._kind == "async_generator" else self._made_in_threads(made)

    async def _made_in_threads(self, made: Generator[Any, None, None]) -> AsyncGenerator[Any, None]:
        """Yield the items of a sync generator, each made in a thread."""
        threads = self._threads
        assert threads is not None
        try:
            while found := await threads.run(functools.partial(_next, made), on_start=lambda: None):
                yield found[0]
        except FunctionRaised as wrapper:
            raise wrapper.error from None
        finally:
            # One that hangs in another thread cannot be closed, and is when that returns.
            with suppress(FunctionRaised):
                await threads.run(made.close, on_start=lambda: None)

    async def _in_process(self, call: Call, on_start: Callable[[], None]) -> Any:
        assert self._loader is not None
        message = pickle.dumps((call.args, dict(call.kwargs)), pickle.HIGHEST_PROTOCOL)
        if self._pool is None:
            self._pool = WorkerPool(self._name, self._loader, self._slots)
        try:
            kind, payload = await self._pool.call(message, on_start=on_start)
        except (CannotLoad, PoolClosed) as error:
            raise EngineError(f"{self._name} cannot be called in a worker process: {error}") from None
        content = pickle.loads(payload)
        if kind != VALUE:
            raise InputError(f"{self._name}: {content}")
        fine, value = content
        if fine:
            return value
        raise pickle.loads(value)


def _next(made: Generator[Any, None, None]) -> tuple[Any, ...]:
    for item in made:
        return (item,)
    return ()
