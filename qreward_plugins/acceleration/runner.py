"""Calls a function once: in the event loop, in a thread, or in a worker process."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ConfigurationError, EngineError, InputError, Mistake, NotStarted, SampleFault
from ..sources.threads import FunctionRaised, ThreadSlots, TooManyAbandoned
from ..sources.worker_program import VALUE
from ..sources.workers import CannotLoad, CannotStart, PoolClosed, ValueTooLarge, WorkerDied, WorkerPool
from ..system.functions import PathLoader, describe
from .call import Call
from .options import Kind
from .raised import add_origin


class WorkerLoader:
    """Loads the function in a worker process; picklable. `path` is `module:name` or `file.py:name`."""

    def __init__(self, path: str) -> None:
        self._loader = PathLoader(path)

    def __call__(self) -> Callable[..., Any]:
        found = self._loader()
        return ResultOrError(getattr(found, "__wrapped__", found))


class ResultOrError:
    """Calls the function, and returns (True, its value) or (False, its exception)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        try:
            return True, self._function(*args, **kwargs)
        except BaseException as error:
            where = describe(error)
            try:
                content = pickle.dumps(error)
                pickle.loads(content)
            except Exception:
                # An exception that cannot be pickled is replaced by one with its type and message.
                content = pickle.dumps(RuntimeError(where))
            return False, (content, where)


def result_of(content: tuple[bool, Any]) -> Any:
    """Return the value that a worker process sent. Raises the exception that it sent."""
    fine, value = content
    if fine:
        return value
    error: BaseException = pickle.loads(value[0])
    add_origin(error, value[1])
    raise error


def loader_of(function: Callable[..., Any]) -> WorkerLoader:
    """Return what loads `function` in another process. Raises `ConfigurationError` if it has no importable name."""
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", "")
    if not name or "<" in name or not module:
        problem = f"process needs a function that can be imported, and {name or function!r} is local."
        raise ConfigurationError(
            [Mistake("mode", problem, 'Define it at the top level of a module, or use mode="thread".')],
            origin="accelerate",
        )
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:
            module = spec.name
        elif file is not None and file.endswith(".py"):
            module = os.path.abspath(file)
        else:
            problem = "process needs a function of a file, and this one was typed in."
            raise ConfigurationError(
                [Mistake("mode", problem, 'Put it into a module, or use mode="thread".')], origin="accelerate"
            )
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
        return made if self._kind == "async_generator" else _InThreads(made, self._in_thread)

    async def _in_thread(self, call: Callable[[], Any], on_start: Callable[[], None]) -> Any:
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
            self._pool = WorkerPool(self._loader, self._slots)
        try:
            kind, payload = await self._pool.call(message, _LONGEST_S, on_start=on_start)
        except WorkerDied as error:
            raise SampleFault(f"{self._name}: its worker process died ({error})", reason="crashed") from None
        except ValueTooLarge:
            raise InputError(f"{self._name} returned a value that is too large for a worker process") from None
        except CannotLoad as error:
            call.refused = True
            raise EngineError(f"{self._name} cannot be loaded in a worker process: {error}") from None
        except PoolClosed:
            call.refused = True
            raise EngineError(f"{self._name} is closed") from None
        except (CannotStart, OSError) as error:
            raise NotStarted(f"{self._name}: no worker process can be started ({error})") from None
        content = pickle.loads(payload)
        if kind != VALUE:
            raise InputError(f"{self._name}: {content}")
        return result_of(content)


class _InThreads:
    """A sync generator as an asynchronous iterator; each item is made in a thread."""

    def __init__(self, made: Any, run: Callable[[Callable[[], Any], Callable[[], None]], Any]) -> None:
        self._made = made
        self._run = run

    def __aiter__(self) -> _InThreads:
        return self

    async def __anext__(self) -> Any:
        try:
            ended, item = await self._run(self._next, _nothing)
        except FunctionRaised as wrapper:
            raise wrapper.error from None
        if ended:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        try:
            await self._run(self._made.close, _nothing)
        except FunctionRaised as wrapper:
            if isinstance(wrapper.error, ValueError):  # it hangs in another thread, which closes it when it returns
                return
            raise wrapper.error from None

    def _next(self) -> tuple[bool, Any]:
        try:
            return False, next(self._made)
        except StopIteration:
            return True, None


def _nothing() -> None:
    """Nobody waits for the start of the thread."""
