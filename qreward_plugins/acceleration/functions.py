"""Accelerated functions: what `accelerate` returns.

An accelerated function is called like the function itself. An async one is awaited in one event loop at a time. A sync
one blocks the calling thread, whichever it is: one thread with an event loop serves all of them, started by the first
call. So any number of threads and event loops share the limits of a function. The thread ends with the interpreter,
and so do worker processes.

Generators have limits, retries until the first item, and a time limit from one item to the next. An item is made when
it is asked for, as in any generator. The call holds its place until the generator ends or is closed. After the first
item an error is not retried, because an item cannot be taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import pickle
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import anyio
from typing_extensions import ParamSpec, Self

from ..errors import ConfigurationError, EngineError, Mistake
from .call import Raised
from .calls import FunctionCalls, FunctionStatistics, drop
from .options import OF_A_CALL, UNSET, Options, options_of

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_WITHIN_S = 2.0
"""Most seconds for closing a generator that was left early."""


class LoopThread:
    """The thread of this process. A child that is forked after its start has none, and cannot call the functions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    def submit(self, calls: FunctionCalls, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine for `calls`, with the context variables of the caller. Cancelling the future cancels it."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._running(calls))
        except BaseException:
            work.close()
            raise

    def run(self, calls: FunctionCalls, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine for `calls`, and block the calling thread until it ends. An exception here (Ctrl-C) cancels
        it. Raises `EngineError` in the thread of the loop itself, which it would block for ever.
        """
        if self._loop is not None and asyncio._get_running_loop() is self._loop:
            work.close()
            raise EngineError(f"{calls.name} was called by a key or an observer, in the thread that serves it")
        future = self.submit(calls, work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, calls: FunctionCalls, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield the items of an asynchronous generator. Waiting for one blocks the calling thread."""
        try:
            while found := self.run(calls, _next(items)):
                yield found[0]
        finally:
            # At the end of the interpreter, the thread stands still; after a fork, it is the parent's.
            if not sys.is_finalizing() and self._pid == os.getpid():
                self.run(calls, items.aclose())

    def _running(self, calls: FunctionCalls) -> asyncio.AbstractEventLoop:
        if self._loop is not None and self._pid != os.getpid():
            raise EngineError(
                f"{calls.name} cannot be called here: this process was forked after the first call of an accelerated "
                'function; start processes with "spawn", or make the first call in the child'
            )
        with self._lock:
            if self._loop is None:
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                threading.Thread(target=self._loop.run_forever, name="accelerate", daemon=True).start()
        return self._loop


async def _next(items: AsyncGenerator[T, None]) -> tuple[T, ...]:
    async for item in items:
        return (item,)
    return ()


loop_thread = LoopThread()


class Accelerated:
    """What all accelerated functions have. `__wrapped__` is the function itself."""

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], calls: FunctionCalls, options: Options) -> None:
        functools.update_wrapper(self, function, updated=())  # type: ignore[arg-type]
        self._calls = calls
        self._options = options
        self._bound: tuple[Any, ...] = ()

    @property
    def __signature__(self) -> inspect.Signature:
        # Without it, `inspect` shows `self` for a bound method.
        found = inspect.signature(self.__wrapped__)
        return found.replace(parameters=list(found.parameters.values())[len(self._bound) :])

    def statistics(self) -> FunctionStatistics:
        """Return the counts of all calls so far, with whatever options. Any thread may call this."""
        return self._calls.statistics()

    def with_options(self, **options: Any) -> Self:
        """Return the same function with other options of a call: `timeout_s`, `retries`, `default`, `priority`, ...

        It shares limits, circuit and statistics with this one. Options of the function as a whole (`rate`, `key`, ...)
        cannot differ. Raises `ConfigurationError`.
        """
        remedy = "Decorate the function again."
        mistakes = [
            Mistake(name, "belongs to the function as a whole.", remedy)
            for name in options
            if name in Options.model_fields and name not in OF_A_CALL
        ]
        if mistakes:
            raise ConfigurationError(mistakes, origin="with_options")
        return self._copy(options_of({**self._options.__dict__, **options}, self._calls.kind, self._calls.name))

    def _copy(self, options: Options | None = None, bound: tuple[Any, ...] = ()) -> Self:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._options = options or self._options
        copy._bound = bound or self._bound
        return copy

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        """Bind it to an instance or a class, as methods are bound."""
        return self if obj is None or self._bound else self._copy(bound=(obj,))

    def _value(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a call, or the default in its place. Raises what the call raised."""
        if type(result) is not Raised:
            return result
        error, default = result.error, self._options.default
        if default is UNSET or result.refused or not isinstance(error, Exception):
            raise error
        return default(error, *args, **kwargs) if callable(default) else default

    def _item(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], return_exceptions: bool) -> Any:
        try:
            return self._value(result, (*self._bound, *args), kwargs)
        except Exception as error:
            if not return_exceptions:
                raise
            return error

    async def aclose(self) -> None:
        """Fail the calls under way, and end attempts and worker processes. Further calls raise `EngineError`."""
        await self._calls.aclose()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        return self._calls.call((*self._bound, *args), kwargs, self._options, skip=len(self._bound))

    def _all(
        self, rows: list[tuple[Any, ...]], kwargs: dict[str, Any], return_exceptions: bool
    ) -> Coroutine[Any, Any, list[Any]]:
        bound, stops = self._bound, not return_exceptions and self._options.default is UNSET
        whole = [(*bound, *row) for row in rows]
        return self._calls.call_all(whole, kwargs, self._options, skip=len(bound), stop_at_error=stops)

    def _values(
        self, results: list[Any], rows: list[tuple[Any, ...]], kwargs: dict[str, Any], return_exceptions: bool
    ) -> list[Any]:
        if len(results) != len(rows):
            raise results[0].error
        return [self._item(result, row, kwargs, return_exceptions) for result, row in zip(results, rows, strict=True)]

    def __reduce__(self) -> Any:
        module, qualname = self.__wrapped__.__module__, getattr(self.__wrapped__, "__qualname__", "")
        found: Any = sys.modules.get(module)
        for name in qualname.split("."):
            found = getattr(found, name, None)
        # cloudpickle carries the main module, which another process does not have, by value.
        if found is not self or (module == "__main__" and "cloudpickle" in "".join(sys.modules)):
            remedy = "decorate the function at the top level of a module that the other process can import"
            raise pickle.PicklingError(f"cannot pickle {self!r}: {remedy}")
        return qualname

    def __repr__(self) -> str:
        return f"<accelerated {self._calls.name}>"


class ServedInThread(Accelerated):
    """An accelerated function of sync code: `LoopThread` serves it, whichever thread calls it."""

    async def aclose(self) -> None:
        await asyncio.wrap_future(loop_thread.submit(self._calls, self._calls.aclose()))

    def close(self) -> None:
        """Do what `aclose` does, and block until it has ended."""
        loop_thread.run(self._calls, self._calls.aclose())


class AsyncFunction(Accelerated, Generic[P, T]):
    """An accelerated async function. Use it in one event loop at a time; `aclose` it, or do not."""

    def __init__(self, function: Callable[..., Any], calls: FunctionCalls, options: Options) -> None:
        super().__init__(function, calls, options)
        if sys.version_info >= (3, 12):
            inspect.markcoroutinefunction(self)
        else:
            self._is_coroutine = getattr(asyncio.coroutines, "_is_coroutine", None)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function. Cancelling the call cancels its attempts, and waits up to 2 s for them to end."""
        value: T = self._value(await self._call(args, kwargs), (*self._bound, *args), kwargs)
        return value

    async def map(self, *items: Iterable[Any], return_exceptions: bool = False, **kwargs: Any) -> list[T]:
        """Call it for each item at once, and return the values in order. Several iterables of equal length give several
        arguments; `kwargs` are the same for all.

        The calls with the longest texts among their arguments start first, because they mostly take longest: so the
        whole ends soonest. The first error cancels the others and is raised; with `return_exceptions` it is in the
        list.
        """
        rows = rows_of(items)
        results = await self._all(rows, kwargs, return_exceptions)
        return self._values(results, rows, kwargs, return_exceptions)


class SyncFunction(ServedInThread, Generic[P, T]):
    """An accelerated sync function. It blocks the calling thread; in an event loop, await it in
    `asyncio.to_thread`. It may be used from any number of threads at once.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function, and block until it returns. Ctrl-C cancels the attempts."""
        result = loop_thread.run(self._calls, self._call(args, kwargs))
        value: T = self._value(result, (*self._bound, *args), kwargs)
        return value

    def map(self, *items: Iterable[Any], return_exceptions: bool = False, **kwargs: Any) -> list[T]:
        """Call it for each item, as `AsyncFunction.map` does, and block until all have ended."""
        rows = rows_of(items)
        work = self._all(rows, kwargs, return_exceptions)
        return self._values(loop_thread.run(self._calls, work), rows, kwargs, return_exceptions)


def rows_of(items: tuple[Iterable[Any], ...]) -> list[tuple[Any, ...]]:
    """The arguments of each call of a batch. Raises `TypeError` and `ValueError`."""
    if not items or isinstance(items[0], (str, bytes)):
        raise TypeError("map takes at least one iterable of arguments; for a single call, call the function itself")
    return list(zip(*items, strict=True))


class Items:
    """The items of one call. No item is made before it is asked for, so a slow caller costs no memory."""

    def __init__(self) -> None:
        self.begun = False
        """Whether an item was made, so that the call cannot be made again."""
        self.asked = asyncio.Event()
        self.made: asyncio.Queue[Any] = asyncio.Queue()
        """Items, each in a tuple, and at the end the result of the call."""

    async def fill(self, items: Any, limit_s: float | None) -> None:
        """Draw `items` as they are asked for, each within `limit_s` seconds. Raises `TimeoutError`, and what they
        raise.
        """
        try:
            while True:
                await self.asked.wait()
                try:
                    with anyio.fail_after(limit_s):
                        item = await anext(items)
                except StopAsyncIteration:
                    return
                self.begun = True
                self.asked.clear()
                self.made.put_nowait((item,))
        finally:
            with anyio.move_on_after(CLOSE_WITHIN_S, shield=True), contextlib.suppress(AttributeError):
                await items.aclose()


class _Generators(Accelerated):
    async def _iterate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncGenerator[Any, None]:
        items, bound = Items(), self._bound
        pending = self._calls.pending(
            (*bound, *args), kwargs, self._options, on_end=items.made.put_nowait, skip=len(bound)
        )
        pending.items = items
        self._calls.submit([pending])
        try:
            items.asked.set()
            while type(found := await items.made.get()) is tuple:
                yield found[0]
                items.asked.set()
            if type(found) is Raised:
                raise found.error
        finally:
            await drop([pending])


class AsyncGeneratorFunction(_Generators, Generic[P, T]):
    """An accelerated async generator. Use it in one event loop at a time."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        """Return the generator. Its call begins with the first item. Close it (`aclosing`) if you leave it early."""
        return self._iterate(args, kwargs)


class GeneratorFunction(_Generators, ServedInThread, Generic[P, T]):
    """An accelerated sync generator. Each item is made in a thread, and waiting for it blocks the calling thread."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        """Return the generator. Its call begins with the first item."""
        return loop_thread.iterate(self._calls, self._iterate(args, kwargs))
