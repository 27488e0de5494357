"""Accelerated generators: limits, retries until the first item, and a time limit from one item to the next.

An item is made when it is asked for, as in any generator. The call holds its place until the generator ends or is
closed. After the first item an error is not retried, because an item cannot be taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any, Concatenate, Generic, TypeVar, overload

from typing_extensions import ParamSpec, Self

from .functions import Accelerated, ServedInLoop, ServedInThread
from .invocation import Items
from .pending import Pending, Raised, setter
from .thread import loop_thread

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")


class _Generators(Accelerated):
    async def _iterate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncGenerator[Any, None]:
        bound = self._bound
        items: list[Items] = []

        def made(pending: Pending) -> Items:
            items.append(Items(pending.begin))
            return items[0]

        ended = asyncio.get_running_loop().create_future()
        pending = self._calls.submit(
            (*bound, *args), kwargs, self._options, on_end=setter(ended), skip=len(bound), items=made
        )
        try:
            while found := await items[0].next(ended):
                yield found[0]
            result = await ended
            if type(result) is Raised:
                raise result.error
        finally:
            await pending.drop()


class AsyncGeneratorFunction(_Generators, ServedInLoop, Generic[P, T]):
    """An accelerated async generator. Use it in one event loop at a time."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        """Return the generator. Its call begins with the first item. Close it (`aclosing`) if you leave it early."""
        return self._iterate(args, kwargs)

    @overload
    def __get__(self, obj: None, owner: Any) -> Self: ...

    @overload
    def __get__(
        self: AsyncGeneratorFunction[Concatenate[Any, Q], T], obj: object, owner: Any = None
    ) -> AsyncGeneratorFunction[Q, T]: ...

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self._get(obj, owner)


class GeneratorFunction(_Generators, ServedInThread, Generic[P, T]):
    """An accelerated sync generator. Each item is made in a thread, and waiting for it blocks the calling thread."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        """Return the generator. Its call begins with the first item."""
        return loop_thread.iterate(self._calls, self._iterate(args, kwargs))

    @overload
    def __get__(self, obj: None, owner: Any) -> Self: ...

    @overload
    def __get__(
        self: GeneratorFunction[Concatenate[Any, Q], T], obj: object, owner: Any = None
    ) -> GeneratorFunction[Q, T]: ...

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self._get(obj, owner)
