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
from .options import OF_THE_FUNCTION, RETUNABLE, UNSET, Kind, Options, check_fit, check_names
from .raised import Raised
from .statistics import FunctionStatistics, progress_of
from .thread import loop_thread


def reduced(function: Accelerated) -> Any:
    """What `__reduce__` of an accelerated function returns. Raises `PicklingError` for one without a name."""
    module, name = function.__module__, getattr(function, "__qualname__", "")
    found = _found(module, name)
    if found is function:
        cloud = sys.modules.get("ray.cloudpickle") or sys.modules.get("cloudpickle")
        if module != "__main__" or cloud is None:
            return name
        # Another process may have another main module. cloudpickle carries its functions by value.
        return _unpickled, (type(function), function._calls.kind, _content(cloud, function))
    original = getattr(found, "_calls", None) is function._calls
    if original:
        # A bound method, or a view with other options.
        return _view, (module, name, function._options, function._bound)
    cloud = sys.modules.get("ray.cloudpickle") or sys.modules.get("cloudpickle")
    if cloud is None:
        raise pickle.PicklingError(f"cannot pickle {function!r}: {module}.{name} is not this function")
    return _unpickled, (type(function), function._calls.kind, _content(cloud, function), function._bound)


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _content(cloud: Any, function: Accelerated) -> Any:
    return cloud.dumps((function.__wrapped__, function._options))


def _unpickled(made: type[Accelerated], kind: Kind, content: bytes, bound: tuple[Any, ...] = ()) -> Any:
    function, options = pickle.loads(content)
    again = made(function, FunctionCalls(function, kind, options), options)
    return again._copy(bound=bound) if bound else again


def _view(module: str, name: str, options: Options, bound: tuple[Any, ...]) -> Any:
    importlib.import_module(module)
    return _found(module, name)._copy(options, bound)


P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")


class _SignatureOf:
    """`__signature__` of an accelerated function. Without it, `inspect` shows `self` for a bound method."""

    def __get__(self, function: Accelerated | None, owner: type) -> inspect.Signature:
        if function is None:
            raise AttributeError("__signature__")
        found = inspect.signature(function.__wrapped__)
        return found.replace(parameters=list(found.parameters.values())[len(function._bound) :])


class Accelerated:
    """What all accelerated functions have. `__wrapped__` is the function itself."""

    __wrapped__: Callable[..., Any]
    _binds = "self"
    """To what it binds as an attribute of a class: "self", "cls", or "" for a static method."""
    __signature__ = _SignatureOf()

    def __init__(self, function: Callable[..., Any], calls: FunctionCalls, options: Options) -> None:
        _wrap(self, function)
        self._calls = calls
        self._options = options
        self._bound: tuple[Any, ...] = ()
        self._unbound: Accelerated | None = None

    def statistics(self) -> FunctionStatistics:
        """Return the counts of all calls so far, with whatever options. Any thread may call this."""
        return self._calls.statistics()

    def with_options(self, **options: Any) -> Self:
        """Return the same function with other options of a call: `timeout_s`, `retries`, `default`, `priority`, ...

        It shares limits, circuit and statistics with this one. Options of the function as a whole (`rate`, `key`, ...)
        cannot differ; `retune` changes them, and `accelerate` makes a function with limits of its own. Raises
        `ConfigurationError`.
        """
        check_names(options)
        mistakes = [
            Mistake(
                name, "belongs to the function as a whole.", "Change it with retune, or decorate the function again."
            )
            for name in options
            if name in OF_THE_FUNCTION
        ]
        if mistakes:
            raise ConfigurationError(mistakes, origin="with_options")
        return self._copy(self._checked(self._options.changed(options)))

    def retune(self, **options: Any) -> None:
        """Change `rate`, `burst`, `concurrency`, `breaker`, `recovery_s`, `idle_s` or `adaptive` while calls run, and
        options of a call for the calls from now on. Calls that have started still count against a new rate. All keys
        and views (`with_options`) are concerned; options of a call change for this object only.

        Raises `ConfigurationError` and changes nothing for impossible values, and for options that cannot change.
        """
        check_names(options)
        fixed = [name for name in options if name in OF_THE_FUNCTION - RETUNABLE]
        if self._calls.options.mode == "process" and "concurrency" in options:
            fixed.append("concurrency")
        if "adaptive" in options and (options["adaptive"] is False) != (self._calls.options.adaptive is False):
            fixed.append("adaptive")
        if fixed:
            raise ConfigurationError(
                [Mistake(name, "cannot change while the function is used.", "Decorate it again.") for name in fixed],
                origin="retune",
            )
        new = self._checked(self._options.changed(options))
        whole = {name: value for name, value in options.items() if name in RETUNABLE}
        if whole:
            self._retune(self._calls.options.changed(whole))
        self._options = new
        if self._unbound is not None:
            # A bound method is made anew at each access.
            self._unbound._options = new

    def _retune(self, options: Options) -> None:
        self._calls.retune(options)

    def _checked(self, options: Options) -> Options:
        check_fit(options, self._calls.kind, self._calls.name)
        return options

    def _copy(self, options: Options | None = None, bound: tuple[Any, ...] = ()) -> Self:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._options = options or self._options
        copy._bound = bound or self._bound
        if bound or options is not None:
            copy._unbound = self if options is None else None
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
        if not return_exceptions:
            return self._value(result, args, kwargs)
        try:
            return self._value(result, args, kwargs)
        except Exception as error:
            return error

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        return self._calls.call((*self._bound, *args), kwargs, self._options, skip=len(self._bound))

    async def _all(
        self, rows: list[tuple[Any, ...]], kwargs: dict[str, Any], progress: bool | None, stop_at_error: bool
    ) -> list[Any]:
        bound = self._bound
        with progress_of(self._calls.name, len(rows), progress) as on_end:
            return await self._calls.call_all(
                [(*bound, *row) for row in rows],
                kwargs,
                self._options,
                skip=len(bound),
                on_end=on_end,
                stop_at_error=stop_at_error,
            )

    def _values(
        self, results: list[Any], rows: list[tuple[Any, ...]], kwargs: dict[str, Any], return_exceptions: bool
    ) -> list[Any]:
        if len(results) != len(rows):
            raise results[0].error
        bound = self._bound
        return [
            self._item(result, (*bound, *row), kwargs, return_exceptions)
            for result, row in zip(results, rows, strict=True)
        ]

    def _stops(self, return_exceptions: bool) -> bool:
        return not return_exceptions and self._options.default is UNSET

    async def _stream(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        kwargs: dict[str, Any],
        window: int | None,
        return_exceptions: bool,
    ) -> AsyncGenerator[Any, None]:
        window = self._calls.window(self._options) if window is None else window
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be a whole number from 1 on, not {window!r}")

        def one(item: Any) -> Coroutine[Any, Any, Any]:
            return self._call((item,), kwargs)

        async with aclosing(Stream(items, one, window).outcomes()) as results:
            async for item, result in results:
                yield self._item(result, (*self._bound, item), kwargs, return_exceptions)

    def __reduce__(self) -> Any:
        return reduced(self)

    def __repr__(self) -> str:
        return f"<accelerated {self._calls.name}>"


class ServedInLoop(Accelerated):
    """An accelerated function of async code: the event loop of its callers serves it."""

    async def aclose(self) -> None:
        """Fail the calls under way, and end attempts and worker processes. Further calls raise `EngineError`."""
        await self._calls.aclose()


class ServedInThread(Accelerated):
    """An accelerated function of sync code: the thread of `loop_thread` serves it, whichever thread calls it."""

    async def aclose(self) -> None:
        """Fail the calls under way, and end attempts and worker processes. Further calls raise `EngineError`."""
        await asyncio.wrap_future(loop_thread.submit(self._calls, self._calls.aclose()))

    def close(self) -> None:
        """Do what `aclose` does, and block until it has ended."""
        loop_thread.run(self._calls, self._calls.aclose())

    def _retune(self, options: Options) -> None:
        async def retuned() -> None:
            self._calls.retune(options)

        loop_thread.run(self._calls, retuned())


class AsyncFunction(ServedInLoop, Generic[P, T]):
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

    async def map(
        self, *items: Iterable[Any], progress: bool | None = None, return_exceptions: bool = False, **kwargs: Any
    ) -> list[T]:
        """Call it for each item at once, and return the values in order. Several iterables of equal length give several
        arguments; `kwargs` are the same for all.

        The calls that take longest start first (`size`), so that the whole ends soonest. The first error cancels the
        others and is raised; with `return_exceptions` it is in the list. `progress` shows a bar on stderr (None: on a
        terminal).
        """
        rows = rows_of(items)
        results = await self._all(rows, kwargs, progress, self._stops(return_exceptions))
        return self._values(results, rows, kwargs, return_exceptions)

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
        result = await asyncio.wrap_future(loop_thread.submit(self._calls, self._call(args, kwargs)))
        value: T = self._value(result, (*self._bound, *args), kwargs)
        return value

    def map(
        self, *items: Iterable[Any], progress: bool | None = None, return_exceptions: bool = False, **kwargs: Any
    ) -> list[T]:
        """Call it for each item, as `AsyncFunction.map` does, and block until all have ended."""
        rows = rows_of(items)
        work = self._all(rows, kwargs, progress, self._stops(return_exceptions))
        return self._values(loop_thread.run(self._calls, work), rows, kwargs, return_exceptions)

    async def amap(
        self, *items: Iterable[Any], progress: bool | None = None, return_exceptions: bool = False, **kwargs: Any
    ) -> list[T]:
        """Call it for each item as `map` does, without blocking the event loop."""
        rows = rows_of(items)
        work = self._all(rows, kwargs, progress, self._stops(return_exceptions))
        results = await asyncio.wrap_future(loop_thread.submit(self._calls, work))
        return self._values(results, rows, kwargs, return_exceptions)

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
