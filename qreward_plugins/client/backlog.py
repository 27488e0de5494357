"""Samples that a full reward server did not take: they wait here, and are sent again when the server has room.

Sending them to find out would cost both sides a whole frame for each try. So the server is asked for room first, in a
few bytes, at least every half second.

An outcome is no reason to ask sooner. Clients with many outcomes would take the room that these leave, and a client
that has nothing at the server would get none.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

LONGEST_S = 0.5
"""Most seconds from an answer without room to the next question."""

T = TypeVar("T")


class Backlog(Generic[T]):
    """The samples that wait for room. `ask` asks the server for room for them."""

    def __init__(self, *, ask: Callable[[Collection[T]], None]) -> None:
        self._ask = ask
        self._waiting: dict[T, None] = {}
        self._first_s = self._after_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sample: T) -> bool:
        return sample in self._waiting

    def put_off(self, samples: Iterable[T], after_s: float) -> None:
        """Take in samples that the server did not take. It is asked after `after_s` seconds."""
        self.add(samples)
        self._first_s = self._after_s = min(after_s, LONGEST_S)
        self._ask_in(self._after_s)

    def add(self, samples: Iterable[T]) -> None:
        """Take in samples that have not been sent."""
        self._waiting.update(dict.fromkeys(samples))

    def forget(self, sample: T) -> None:
        """Forget a sample that has ended."""
        self._waiting.pop(sample, None)

    def take(self, count: int, *, order: Callable[[T], Any]) -> list[T]:
        """Return the samples to send, first by `order`, because there is room for `count`."""
        found = heapq.nsmallest(count, self._waiting, key=order)
        for sample in found:
            del self._waiting[sample]
        if self._waiting and self._timer is None:
            self._after_s = self._first_s if found else min(2 * self._after_s, LONGEST_S)
            self._ask_in(self._after_s)
        return found

    def clear(self) -> None:
        """Forget all samples: they are sent over a new connection."""
        self._waiting.clear()
        self.close()

    def close(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask_in(self, seconds: float) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiting:
            self._ask(self._waiting.keys())
