"""Calls a function once: in the event loop, in a thread, or in a worker process."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import Any

from ..errors import ConfigurationError, EngineError, InputError, Mistake, NotStarted
from ..sources.threads import FunctionRaised, ThreadSlots, TooManyAbandoned
from ..sources.worker_program import VALUE
from ..sources.workers import CannotLoad, PoolClosed, WorkerPool
from ..system.functions import PathLoader, describe
from .call import Call
from .options import Kind
from .raised import add_note


class WorkerLoader:
    """Loads the function in a worker process; picklable. `path` is `module:name` or `file.py:name`."""

    def __init__(self, path: str) -> None:
        self._loader = PathLoader(path)

    def __call__(self) -> Callable[..., Any]:
        found = self._loader()
        return functools.partial(_value_or_error, getattr(found, "__wrapped__", found))


def _value_or_error(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[bool, Any]:
    """Call the function, and return (True, its value) or (False, its exception)."""
    try:
        return True, function(*args, **kwargs)
    except BaseException as error:
        where = describe(error)
        try:
            content = pickle.dumps(error)
            pickle.loads(content)
        except Exception:
            # An exception that cannot be pickled is replaced by one with its type and message.
            content = pickle.dumps(RuntimeError(where))
        return False, (content, where)


def loader_of(function: Callable[..., Any]) -> WorkerLoader:
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
    return WorkerLoader(f"{module}:{name}")


MOST_THREADS = 1024
_LONGEST_S = 1e9
"""Time limit of a worker's call for the pool. The call itself ends attempts, and cancelling one kills the worker."""


class FunctionRunner:
    """Calls `function`. `loader` loads it in worker processes; None: it runs here. `slots` is the number of worker
    processes.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], kind: Kind, *, loader: WorkerLoader | None, slots: int
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
        value = await self._in_thread(functools.partial(self._function, *call.args, **call.kwargs), on_start)
        if inspect.iscoroutine(value):
            value.close()
            raise InputError(f"{self._name} returned a coroutine; define it with `async def`")
        return value

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
        try:
            while found := await self._in_thread(functools.partial(_next, made)):
                yield found[0]
        except FunctionRaised as wrapper:
            raise wrapper.error from None
        finally:
            # One that hangs in another thread cannot be closed, and is when that returns.
            with suppress(FunctionRaised):
                await self._in_thread(made.close)

    async def _in_thread(self, call: Callable[[], Any], on_start: Callable[[], None] = lambda: None) -> Any:
        assert self._threads is not None
        try:
            return await self._threads.run(call, on_start=on_start)
        except TooManyAbandoned as error:
            raise NotStarted(f"{self._name}: {error}; mode='process' kills such calls") from None

    async def _in_process(self, call: Call, on_start: Callable[[], None]) -> Any:
        assert self._loader is not None
        try:
            message = pickle.dumps((call.args, dict(call.kwargs)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise InputError(f"{self._name}: its arguments cannot be pickled for a worker process: {error}") from error
        if self._pool is None:
            self._pool = WorkerPool(self._name, self._loader, self._slots)
        try:
            kind, payload = await self._pool.call(message, _LONGEST_S, on_start=on_start)
        except CannotLoad as error:
            call.refused = True
            raise EngineError(f"{self._name} cannot be loaded in a worker process: {error}") from None
        except PoolClosed:
            call.refused = True
            raise EngineError(f"{self._name} is closed") from None
        content = pickle.loads(payload)
        if kind != VALUE:
            raise InputError(f"{self._name}: {content}")
        fine, value = content
        if fine:
            return value
        raised: BaseException = pickle.loads(value[0])
        add_note(raised, f"raised in a worker process: {value[1]}")
        raise raised


def _next(made: Generator[Any, None, None]) -> tuple[Any, ...]:
    for item in made:
        return (item,)
    return ()
