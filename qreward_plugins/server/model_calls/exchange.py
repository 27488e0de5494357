"""One request of a client: a call of the scheduler whose reply is passed on as it comes.

A source is read at most `UNREAD_BYTES` ahead of its client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import anyio

from ...engine.followed_calls import FollowedCall
from ...errors import EngineError, ReplyBroken
from ...scheduling.batches import Batch
from ...scheduling.dispatcher import Dispatcher
from ...sources.passed_requests import RawReply, Receiver

UNREAD_BYTES = 262_144
"""Bytes of a stream that are kept for a client that reads slowly. Beyond them, the source is not read."""


class Exchange(FollowedCall, Receiver):
    """One call, which the `Pieces` of its client read."""

    def __init__(self, dispatcher: Dispatcher, batch: Batch) -> None:
        self._arrived = asyncio.Event()
        super().__init__(dispatcher, batch, self._arrived.set)
        self._pieces: deque[str] = deque()
        self._unread = 0
        self._room = asyncio.Event()
        self._room.set()
        self.head: RawReply | None = None
        """The head of a stream that has begun."""
        self.refusal: RawReply | None = None
        """The reply of a source that refused the request."""

    # Called by the source

    def begin(self, head: RawReply) -> None:
        if not self.over:
            self.head = head

    def refused(self, reply: RawReply) -> None:
        self.refusal = reply

    def add(self, piece: str) -> None:
        """Take in a piece of a stream."""
        self._pieces.append(piece)
        self._unread += len(piece)
        if self._unread > UNREAD_BYTES:
            self._room.clear()
        self._arrived.set()

    def has_room(self) -> bool:
        return self._room.is_set()

    async def wait_for_room(self) -> None:
        await self._room.wait()

    # Called for the client

    async def first(self, read_timeout_s: float | None) -> None:
        """Wait until the reply has begun or the call is over. Raises `TimeoutError` after `read_timeout_s` seconds."""
        while not (self.over or self._pieces):
            await self._wait(read_timeout_s)

    async def next(self, read_timeout_s: float | None) -> bytes | None:
        """Return the part of the stream that has come since the last call; None at its end.

        Raises `ReplyBroken` if the reply does not become whole, and `TimeoutError` after `read_timeout_s` seconds.
        """
        while True:
            if self._pieces:
                text = "".join(self._pieces)
                self._pieces.clear()
                self._unread = 0
                self._room.set()
                return text.encode("utf-8", "surrogateescape")
            if self.unanswered is not None:
                raise ReplyBroken(f"{self.unanswered.reason}: {self.unanswered.detail}")
            if self.over:
                return None
            await self._wait(read_timeout_s)

    async def _wait(self, read_timeout_s: float | None) -> None:
        self._arrived.clear()
        with anyio.fail_after(read_timeout_s):
            await self._arrived.wait()

    def drop(self) -> None:
        if not self.over:
            self._pieces.clear()
            self._room.set()
        super().drop()


class Pieces:
    """The body of a streamed reply, as it comes: an asynchronous iterator of bytes.

    Iterating raises `ReplyBroken` if the reply does not become whole, after all that came, and `TimeoutError` if
    nothing comes within the client's read timeout. Leaving early ends the call: `aclose`, cancelling the task that
    waits, or dropping the iterator.
    """

    def __init__(self, exchange: Exchange, read_timeout_s: float | None) -> None:
        self._exchange = exchange
        self._read_timeout_s = read_timeout_s
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> bytes:
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError("a reply is read in the event loop in which it was asked for")
        try:
            piece = await self._exchange.next(self._read_timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            self._exchange.drop()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End the call. Idempotent."""
        await self._exchange.aclose()

    def __del__(self) -> None:
        # The garbage collector may run in any thread.
        exchange: Exchange | None = getattr(self, "_exchange", None)
        if exchange is not None and not exchange.over:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it everything
                self._loop.call_soon_threadsafe(exchange.drop)
