"""How a process comes by the board of its job: the actor where Ray is initialised, or else an object of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from . import named_actors
from .board import Key
from .board_actor import NAME, Answers, BoardActor, Close, Memory, Report


class Post(Protocol):
    """What a client needs of a board."""

    async def post(self, things: Sequence[Report | Close | Memory]) -> Answers: ...

    async def mean(self, key: Key) -> float: ...

    async def end(self, start: str) -> None: ...


class _Remote:
    """The board in its Ray actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def post(self, things: Sequence[Report | Close | Memory]) -> Answers:
        return await self._handle.post.remote(things)  # type: ignore[no-any-return]

    async def mean(self, key: Key) -> float:
        return await self._handle.mean.remote(key)  # type: ignore[no-any-return]

    async def end(self, start: str) -> None:
        await self._handle.end.remote(start)


def connect() -> Post:
    """The board of this Ray job, started if there is none; without Ray one of this process. Blocks; raises what Ray
    raises.
    """
    if named_actors.ray_is_up():
        return _Remote(named_actors.get_or_start(NAME, BoardActor))
    return BoardActor()


__all__ = ["Post", "connect"]
