"""Accelerated generators: limits, retries until the first item, and a time limit from one item to the next.

An item is made when it is asked for, as in any generator. The call holds its place until the generator ends or is
closed. After the first item an error is not retried, because an item cannot be taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from typing import Any, Generic, TypeVar

import anyio
from typing_extensions import ParamSpec

from .call import Raised
from .calls import drop
from .functions import Accelerated, ServedInThread
from .thread import loop_thread

P = ParamSpec("P")
T = TypeVar("T")


CLOSE_WITHIN_S = 2.0
"""Most seconds for closing a generator that was left early."""


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
