"""Passes the items of a generator from its attempt to the caller, one when the caller asks for one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import anyio

CLOSE_WITHIN_S = 2.0
"""Most seconds for closing a generator that was left early."""


class Items:
    """The items of one call. No item is made before it is asked for, so a slow caller costs no memory.

    `on_first` is called before the first item is passed on: from then on the call cannot be made again.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._asked = asyncio.Event()
        self._arrived = asyncio.Event()
        self._held: list[Any] = []
        self._begun = False

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
                if not self._begun:
                    self._begun = True
                    self._on_first()
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
