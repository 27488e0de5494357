"""The decorator `accelerate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar, overload

from typing_extensions import ParamSpec, Unpack

from ..errors import ConfigurationError, Mistake
from ..secrets import one_line
from .calls import FunctionCalls
from .functions import Accelerated, AsyncFunction, AsyncGeneratorFunction, GeneratorFunction, SyncFunction
from .options import GivenOptions, Kind, options_of

P = ParamSpec("P")
T = TypeVar("T")


class Decorator(Protocol):
    """What `accelerate(...)` with options returns."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a plain function may return one, too
        self, function: Callable[P, AsyncIterator[T]], /
    ) -> AsyncGeneratorFunction[P, T]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> AsyncFunction[P, T]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Iterator[T]], /
    ) -> GeneratorFunction[P, T]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> SyncFunction[P, T]: ...


@overload
def accelerate(  # type: ignore[overload-overlap]
    function: Callable[P, AsyncIterator[T]], /, **options: Unpack[GivenOptions]
) -> AsyncGeneratorFunction[P, T]: ...
@overload
def accelerate(  # type: ignore[overload-overlap]
    function: Callable[P, Coroutine[Any, Any, T]], /, **options: Unpack[GivenOptions]
) -> AsyncFunction[P, T]: ...
@overload
def accelerate(  # type: ignore[overload-overlap]
    function: Callable[P, Iterator[T]], /, **options: Unpack[GivenOptions]
) -> GeneratorFunction[P, T]: ...
@overload
def accelerate(function: Callable[P, T], /, **options: Unpack[GivenOptions]) -> SyncFunction[P, T]: ...
@overload
def accelerate(**options: Unpack[GivenOptions]) -> Decorator: ...


def accelerate(function: Any = None, /, **options: Any) -> Any:
    """Give a function limits, retries, hedges, a circuit breaker and batches: `@accelerate` or `@accelerate(...)`.

    The function may be sync, async, a generator, an async generator, or a method of any kind. It is called as before.
    Without options it is called exactly once, and at once. `docs/functions.md` and `Options` describe the options.

    Raises `ConfigurationError` for unknown options, impossible values, and what cannot be decorated.
    """
    if function is None:
        options_of(options)
        return functools.partial(_accelerated, options)
    return _accelerated(options, function)


def _accelerated(given: dict[str, Any], function: Any) -> Accelerated:
    kind = _kind_of(function)
    options = options_of(given, kind, getattr(function, "__qualname__", ""))
    return _CLASSES[kind](function, FunctionCalls(function, kind, options), options)


_CLASSES: dict[Kind, type[Accelerated]] = {
    "async": AsyncFunction,
    "sync": SyncFunction,
    "async_generator": AsyncGeneratorFunction,
    "generator": GeneratorFunction,
}


def _kind_of(function: Any) -> Kind:
    if isinstance(function, Accelerated):
        raise _wrong(f"{function!r} is accelerated already.", "Use with_options, or decorate `function.__wrapped__`.")
    if isinstance(function, (type, property, classmethod, staticmethod)):
        raise _wrong(f"a {type(function).__name__} is no function.", "Decorate the function below it.")
    if not callable(function):
        shown = one_line(repr(function), 60)
        raise _wrong(f"{shown} cannot be called.", "Options have names: @accelerate(timeout_s=30).")
    # A callable object has the kind of its `__call__`.
    called = function if inspect.isroutine(function) or isinstance(function, functools.partial) else function.__call__
    while isinstance(called, functools.partial):
        called = called.func
    if inspect.isasyncgenfunction(called):
        return "async_generator"
    if inspect.iscoroutinefunction(called):
        return "async"
    return "generator" if inspect.isgeneratorfunction(called) else "sync"


def _wrong(problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError([Mistake("function", problem, remedy)], origin="accelerate")
