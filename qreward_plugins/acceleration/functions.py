"""Accelerated functions: what `accelerate` returns for sync and async functions.

An accelerated function is called like the function itself. A sync one blocks the calling thread, whichever it is; an
async one is awaited in one event loop at a time. `generators.py` has those of generators.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from typing_extensions import ParamSpec, Self

from ..errors import ConfigurationError, Mistake
from .call import Raised
from .calls import FunctionCalls
from .options import OF_A_CALL, UNSET, Options, options_of
from .statistics import FunctionStatistics
from .thread import loop_thread

P = ParamSpec("P")
T = TypeVar("T")


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
    """An accelerated function of sync code: the thread of `loop_thread` serves it, whichever thread calls it."""

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
