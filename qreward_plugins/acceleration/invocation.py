"""The arguments of a call of an accelerated function, the items of a generator, and the notes on its exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from ..secrets import one_line
from ..sources.base import NO_SAMPLE, Request

if TYPE_CHECKING:
    from .options import Options


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


PREFIX = "accelerate: "
"""How our notes begin. A function may raise the same exception object again and again; older notes are replaced."""
MOST_SHOWN = 5
_CHARS = 200


def note_attempts(error: BaseException, before: Sequence[BaseException], seconds: float) -> None:
    """Note how many attempts failed before this error, in how many seconds, and with what."""
    if not before:
        return
    shown = [f"{type(each).__name__}: {one_line(text_of(each), _CHARS)}" for each in before[:MOST_SHOWN]]
    if len(before) > MOST_SHOWN:
        shown.append(f"and {len(before) - MOST_SHOWN} more")
    add_note(error, f"{len(before) + 1} attempts failed in {seconds:.3g} s; before this one: {'; '.join(shown)}")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, instead of an earlier one of ours. Before Python 3.11, tracebacks do not show it."""
    _set_notes(error, [each for each in _notes(error) if not str(each).startswith(PREFIX)], f"{PREFIX}{note}")


def add_origin(error: BaseException, where: str) -> None:
    """Note where an exception was raised whose traceback was lost on its way from a worker process."""
    _set_notes(error, _notes(error), f"raised in a worker process: {where}")


def _notes(error: BaseException) -> list[object]:
    return list(getattr(error, "__notes__", ()))


def _set_notes(error: BaseException, notes: list[object], note: str) -> None:
    try:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
    except Exception:  # an exception class may refuse attributes
        return


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be read)"


_MOST_LOOKED_AT = 32


class Invocation:
    """The arguments of a call, and what its attempts raised. `items` takes the items of a generator."""

    __slots__ = ("args", "context", "errors", "items", "kwargs", "options", "refused", "size")

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        size: int,
        items: Items | None = None,
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.options = options
        self.size = size
        self.items = items
        self.context = contextvars.copy_context()
        self.errors: dict[int, BaseException] = {}
        """What each attempt raised, by its number."""
        self.refused = False
        """Whether the function cannot be called at all, whatever the arguments."""

    def request(self, attempt: int) -> Request:
        """The request of the n-th attempt."""
        request = Request(NO_SAMPLE, parameters={"invocation": self, "attempt": attempt})
        object.__setattr__(request, "size", self.size)
        return request


def size_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The length of the texts and bytes among the arguments, also in a short list or mapping: what a call takes
    mostly grows with it.
    """
    return 1 + sum(map(_length, args)) + (sum(map(_length, kwargs.values())) if kwargs else 0)


def _length(value: Any) -> int:
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value)
    if kind is list or kind is tuple:
        return sum(len(each) for each in value[:_MOST_LOOKED_AT] if type(each) is str or type(each) is bytes)
    if kind is dict and len(value) <= _MOST_LOOKED_AT:
        return sum(len(each) for each in value.values() if type(each) is str or type(each) is bytes)
    return 0
