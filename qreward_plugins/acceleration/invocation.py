"""One call of an accelerated function on its way through the scheduler."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..sources.base import NO_SAMPLE, Request

if TYPE_CHECKING:
    from .items import Items
    from .options import Options

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
