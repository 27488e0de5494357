"""Generations that wait until a test releases them, so that the test sets their order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class HeldGenerations(Generic[T]):
    """The held generations. `wait` belongs to one event loop; all other methods are thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[int, tuple[T, asyncio.Future[bool]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def wait(self, item: T) -> bool:
        """Wait until `item` is released (True) or aborted (False)."""
        ticket: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._held[id(ticket)] = (item, ticket)
            self._changed.notify_all()
        try:
            return await ticket
        finally:
            with self._changed:
                self._held.pop(id(ticket), None)
                self._changed.notify_all()

    def release(self, which: Callable[[T], bool] | None = None) -> int:
        """Release those for which `which` is true (default: all); return their number."""
        with self._changed:
            chosen = [ticket for item, ticket in self._held.values() if which is None or which(item)]
            for ticket in chosen:
                ticket.get_loop().call_soon_threadsafe(_settle, ticket, True)
                del self._held[id(ticket)]
            self._changed.notify_all()
        return len(chosen)

    def abort(self, which: Callable[[T], bool] | None = None) -> None:
        """Abort those for which `which` is true (default: all). Call it from their event loop."""
        with self._changed:
            for item, ticket in self._held.values():
                if which is None or which(item):
                    _settle(ticket, False)

    def wait_until(self, count: int, timeout_s: float) -> None:
        """Block until at least `count` are held. Raises `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) >= count, timeout_s):
                raise TimeoutError(f"{len(self._held)} generations were held after {timeout_s} s, not {count}")


def _settle(ticket: asyncio.Future[bool], released: bool) -> None:
    if not ticket.done():
        ticket.set_result(released)
