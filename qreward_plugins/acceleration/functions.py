"""Accelerated functions: what `accelerate` returns for sync and async functions.

An accelerated function is called like the function itself. A sync one blocks the calling thread, whichever it is; an
async one is awaited in one event loop at a time. `generators.py` has those of generators.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import pickle
import sys
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Iterable
from contextlib import aclosing
from typing import Any, Concatenate, Generic, TypeVar, overload

from typing_extensions import ParamSpec, Self

from ..errors import ConfigurationError, Mistake
from ..secrets import one_line
from ..system.streams import Stream, drawn_in_threads
from .calls import FunctionCalls
from .options import OF_A_CALL, UNSET, Kind, Options, options_of
from .raised import Raised
from .statistics import FunctionStatistics
from .thread import loop_thread


def _reduced(function: Accelerated) -> Any:
    """What `__reduce__` of an accelerated function returns. Raises `PicklingError` for one without a name."""
    module, name = function.__module__, getattr(function, "__qualname__", "")
    found = _found(module, name)
    cloud = sys.modules.get("ray.cloudpickle") or sys.modules.get("cloudpickle")
    # Another process may have another main module. cloudpickle carries its functions by value.
    if found is function and (module != "__main__" or cloud is None):
        return name
    if found is not function and getattr(found, "_calls", None) is function._calls:
        # A bound method, or a view with other options.
        return _view, (module, name, function._options, function._bound)
    if cloud is None:
        raise pickle.PicklingError(f"cannot pickle {function!r}: {module}.{name} is not this function")
    content = cloud.dumps((function.__wrapped__, function._options))
    return _unpickled, (type(function), function._calls.kind, content, function._bound)


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _unpickled(made: type[Accelerated], kind: Kind, content: bytes, bound: tuple[Any, ...]) -> Any:
    function, options = pickle.loads(content)
    return made(function, FunctionCalls(function, kind, options), options)._copy(bound=bound)


def _view(module: str, name: str, options: Options, bound: tuple[Any, ...]) -> Any:
    importlib.import_module(module)
    return _found(module, name)._copy(options, bound)


P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
R = TypeVar("R")


class Accelerated:
    """What all accelerated functions have. `__wrapped__` is the function itself."""

    __wrapped__: Callable[..., Any]
    _binds = "self"
    """To what it binds as an attribute of a class: "self", "cls", or "" for a static method."""

    def __init__(self, function: Callable[..., Any], calls: FunctionCalls, options: Options) -> None:
        _wrap(self, function)
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

    def _get(self, obj: Any, owner: Any) -> Any:
        """Bind it to an instance or a class, as methods are bound."""
        if self._bound or self._binds == "":
            return self
        if self._binds == "cls":
            return self._copy(bound=(type(obj) if owner is None else owner,))
        return self if obj is None else self._copy(bound=(obj,))

    def _value(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a call, or the default in its place. Raises what the call raised."""
        if type(result) is not Raised:
            return result
        error, default = result.error, self._options.default
        if default is UNSET or result.refused or not isinstance(error, Exception):
            try:
                raise error
            finally:
                # Its traceback holds this frame: without this, both and the arguments would hold each other.
                del error, result
        self._calls.defaulted()
        if not callable(default):
            return default
        try:
            return default(error, *args, **kwargs)
        except Exception as problem:
            if problem is not error and problem.__context__ is None:
                problem.__context__ = error
            raise

    def _item(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], return_exceptions: bool) -> Any:
        try:
            return self._value(result, (*self._bound, *args), kwargs)
        except Exception as error:
            if not return_exceptions:
                raise
            return error

    async def aclose(self) -> None:
        """Fail the calls under way, and end attempts and worker processes. Further calls raise `EngineError`."""
        await self._served(self._calls.aclose())

    async def _served(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` in the event loop that serves the function: that of the callers."""
        return await work

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

    async def _mapped(self, items: tuple[Iterable[Any], ...], kwargs: dict[str, Any], return_exceptions: bool) -> Any:
        rows = rows_of(items)
        results = await self._served(self._all(rows, kwargs, return_exceptions))
        return self._values(results, rows, kwargs, return_exceptions)

    async def _stream(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        kwargs: dict[str, Any],
        window: int | None,
        return_exceptions: bool,
    ) -> AsyncGenerator[Any, None]:
        window = self._calls.window if window is None else window
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be a whole number from 1 on, not {window!r}")

        def one(item: Any) -> Coroutine[Any, Any, Any]:
            return self._call((item,), kwargs)

        async with aclosing(Stream(items, one, window).outcomes()) as results:
            async for item, result in results:
                yield self._item(result, (item,), kwargs, return_exceptions)

    def __reduce__(self) -> Any:
        return _reduced(self)

    def __repr__(self) -> str:
        return f"<accelerated {self._calls.name}>"


class ServedInThread(Accelerated):
    """An accelerated function of sync code: the thread of `loop_thread` serves it, whichever thread calls it."""

    async def _served(self, work: Coroutine[Any, Any, R]) -> R:
        return await asyncio.wrap_future(loop_thread.submit(self._calls, work))

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
        # In one expression: a traceback holds this frame, which must not hold the exception.
        value: T = self._value(await self._call(args, kwargs), (*self._bound, *args), kwargs)
        return value

    async def map(self, *items: Iterable[Any], return_exceptions: bool = False, **kwargs: Any) -> list[T]:
        """Call it for each item at once, and return the values in order. Several iterables of equal length give several
        arguments; `kwargs` are the same for all.

        The calls with the longest texts among their arguments start first, because they mostly take longest: so the
        whole ends soonest. The first error cancels the others and is raised; with `return_exceptions` it is in the
        list.
        """
        values: list[T] = await self._mapped(items, kwargs, return_exceptions)
        return values

    def stream(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        window: int | None = None,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncGenerator[T, None]:
        """Call it for each item of a stream, and yield the values in order. At most `window` items are in memory
        (default: four times the concurrency). Close the generator (`aclosing`) if you leave it early.
        """
        return self._stream(items, kwargs, window, return_exceptions)

    @overload
    def __get__(self, obj: None, owner: Any) -> Self: ...

    @overload
    def __get__(self: AsyncFunction[Concatenate[Any, Q], T], obj: object, owner: Any = None) -> AsyncFunction[Q, T]: ...

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self._get(obj, owner)


class SyncFunction(ServedInThread, Generic[P, T]):
    """An accelerated sync function. It blocks the calling thread; in an event loop, await `acall`. It may be used from
    any number of threads and event loops at once.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function, and block until it returns. Ctrl-C cancels the attempts."""
        result = loop_thread.run(self._calls, self._call(args, kwargs))
        value: T = self._value(result, (*self._bound, *args), kwargs)
        return value

    async def acall(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it without blocking the event loop. Cancelling this cancels the attempts."""
        value: T = self._value(await self._served(self._call(args, kwargs)), (*self._bound, *args), kwargs)
        return value

    def map(self, *items: Iterable[Any], return_exceptions: bool = False, **kwargs: Any) -> list[T]:
        """Call it for each item, as `AsyncFunction.map` does, and block until all have ended."""
        rows = rows_of(items)
        work = self._all(rows, kwargs, return_exceptions)
        return self._values(loop_thread.run(self._calls, work), rows, kwargs, return_exceptions)

    async def amap(self, *items: Iterable[Any], return_exceptions: bool = False, **kwargs: Any) -> list[T]:
        """Call it for each item as `map` does, without blocking the event loop."""
        values: list[T] = await self._mapped(items, kwargs, return_exceptions)
        return values

    def stream(
        self, items: Iterable[Any], *, window: int | None = None, return_exceptions: bool = False, **kwargs: Any
    ) -> Generator[T, None, None]:
        """Call it for each item of a stream, as `AsyncFunction.stream` does. Another thread draws the items."""
        yield from loop_thread.iterate(
            self._calls, self._stream(drawn_in_threads(items), kwargs, window, return_exceptions)
        )

    @overload
    def __get__(self, obj: None, owner: Any) -> Self: ...

    @overload
    def __get__(self: SyncFunction[Concatenate[Any, Q], T], obj: object, owner: Any = None) -> SyncFunction[Q, T]: ...

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self._get(obj, owner)


def _wrap(accelerated: Accelerated, function: Callable[..., Any]) -> None:
    """Take over name, module and docstring, and those attributes that do not hide a method."""
    functools.update_wrapper(accelerated, function, updated=())  # type: ignore[arg-type]
    for name, value in getattr(function, "__dict__", {}).items():
        if not hasattr(type(accelerated), name):
            accelerated.__dict__[name] = value
    accelerated.__wrapped__ = function


def rows_of(items: tuple[Iterable[Any], ...]) -> list[tuple[Any, ...]]:
    """The arguments of each call of a batch. Raises `TypeError` and `ValueError`."""
    for each in items:
        if isinstance(each, (str, bytes)) or not isinstance(each, Iterable):
            shown = one_line(repr(each), 60)
            raise TypeError(
                f"map takes iterables of arguments, not {shown}; for a single call, call the function itself"
            )
    if not items:
        raise TypeError("map takes at least one iterable of arguments")
    columns = [list(each) for each in items]
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"map got iterables of different lengths: {', '.join(str(len(each)) for each in columns)}")
    return list(zip(*columns, strict=True))
