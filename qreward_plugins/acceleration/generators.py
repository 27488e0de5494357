"""Accelerated generators: limits, retries until the first item, and a time limit from one item to the next.

An item is made when it is asked for, as in any generator. The call holds its place until the generator ends or is
closed. After the first item an error is not retried, because an item cannot be taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from typing import Any, Concatenate, Generic, TypeVar, overload

import anyio
from typing_extensions import ParamSpec, Self

from .calls import END_WITHIN_S, setter
from .functions import Accelerated, ServedInThread
from .raised import Raised
from .thread import loop_thread

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")


CLOSE_WITHIN_S = 2.0
"""Most seconds for closing a generator that was left early."""


class Items:
    """The items of one call. No item is made before it is asked for, so a slow caller costs no memory."""

    def __init__(self) -> None:
        self.begun = False
        """Whether the caller has an item, so that the call cannot be made again."""
        self._asked = asyncio.Event()
        self._arrived = asyncio.Event()
        self._held: list[Any] = []

    async def fill(self, items: Any, limit_s: float | None) -> None:
        """Draw `items` as they are asked for, each within `limit_s` seconds. Raises `TimeoutError`, and what they
        raise.
        """
        try:
            while True:
                await self._asked.wait()
                try:
                    with anyio.fail_after(limit_s):
                        item = await anext(items)
                except StopAsyncIteration:
                    return
                self.begun = True
                self._asked.clear()
                self._held.append(item)
                self._arrived.set()
        finally:
            with anyio.move_on_after(CLOSE_WITHIN_S, shield=True), contextlib.suppress(AttributeError):
                await items.aclose()

    async def next(self, ended: asyncio.Future[Any]) -> tuple[Any, ...]:
        """Return the next item as a tuple; an empty one if the call has `ended` without one."""
        self._asked.set()
        arrived = asyncio.ensure_future(self._arrived.wait())
        try:
            await asyncio.wait((arrived, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()
        self._arrived.clear()
        return (self._held.pop(),) if self._held else ()


class _Generators(Accelerated):
    async def _iterate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncGenerator[Any, None]:
        bound = self._bound
        ended = asyncio.get_running_loop().create_future()
        pending = self._calls.pending((*bound, *args), kwargs, self._options, on_end=setter(ended), skip=len(bound))
        items = pending.items = Items()
        self._calls.submit([pending])
        try:
            while found := await items.next(ended):
                yield found[0]
            result = await ended
            if type(result) is Raised:
                raise result.error
        finally:
            await pending.drop(END_WITHIN_S)


class AsyncGeneratorFunction(_Generators, Generic[P, T]):
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
