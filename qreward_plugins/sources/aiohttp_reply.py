"""Defines `AiohttpReply`: a reply over aiohttp whose body is still to be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import aiohttp

from .compression import Decoder, decoder_of
from .http_reading import Incoming, Timer

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy


class AiohttpReply(Incoming):
    """Reads `content`. `close` closes the connection, and ends the reading with an error."""

    headers: CIMultiDictProxy[str]

    def __init__(
        self, status: int, headers: CIMultiDictProxy[str], content: aiohttp.StreamReader, close: Callable[[], None]
    ) -> None:
        self.status = status
        self.headers = headers
        self._content = content
        self._close = close
        self._decoded: _Decoded | None = None

    def chunks(self) -> AsyncIterator[bytes]:
        if self._decoded is None and self.headers.get("Content-Encoding"):
            # A header that comes twice is a list (RFC 9110, section 5.3).
            decoder = decoder_of(", ".join(self.headers.getall("Content-Encoding")))
            # One for all readers, so that the next one goes on where the last one stopped.
            self._decoded = None if decoder is None else _Decoded(self._content, decoder)
        return self._decoded or self._content.iter_any()

    async def body(self, limit: int) -> bytes | None:
        if self.headers.get("Content-Encoding"):
            return await super().body(limit)
        content = self._content
        first = await content.readany()
        if content.at_eof():  # mostly the whole body has come with the headers
            return first if len(first) <= limit else None
        body = bytearray(first)
        while len(body) <= limit and not content.at_eof():
            body += await content.readany()
        return bytes(body) if len(body) <= limit else None

    def within(self, seconds: float | None) -> AbstractContextManager[Timer]:
        return _within(self._close, seconds)

    def abort(self) -> None:
        self._close()


class _Decoded(AsyncIterator[bytes]):
    """A compressed body, decompressed piece by piece."""

    def __init__(self, content: aiohttp.StreamReader, decoder: Decoder) -> None:
        self._content = content
        self._decoder = decoder
        self._pieces: Iterator[bytes] = iter(())

    async def __anext__(self) -> bytes:
        while True:
            for piece in self._pieces:
                return piece
            chunk = await self._content.readany()
            if not chunk:
                self._decoder.end()
                raise StopAsyncIteration
            self._pieces = self._decoder.feed(chunk)


@contextmanager
def _within(close: Callable[[], None], seconds: float | None) -> Iterator[_Timer]:
    timer = _Timer(close)
    timer.restart(seconds)
    try:
        yield timer
    except Exception:
        if not timer.expired:
            raise
    finally:
        timer.restart(None)


class _Timer:
    """Closes the connection when its time is up, which ends the reading with an error. A time-out around the read could
    swallow a cancellation that arrives at the same moment.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._handle: asyncio.TimerHandle | None = None
        self.expired = False

    def restart(self, seconds: float | None) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = None
        if seconds is not None and not self.expired:
            self._handle = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self.expired = True
        self._close()
