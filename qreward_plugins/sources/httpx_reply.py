"""Reads a reply of httpx piece by piece.

If a server sends two replies to one request, httpcore takes the second one for the reply to the next request. Such a
connection is closed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import anyio
import httpx

from .compression import decoder_of
from .http_reading import Incoming, Timer

_MOST_WRAPPERS = 8
"""Streams around that of httpcore: those of httpx and of its authentication."""


class HttpxIncoming(Incoming):
    """A reply whose body is still to be read."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self._response = response
        # One for all readers, so that the next one goes on where the last one stopped, and that it can be closed.
        self._chunks = self._decoded()

    def chunks(self) -> AsyncIterator[bytes]:
        return self._chunks

    async def aclose(self) -> None:
        await self._chunks.aclose()
        await self._response.aclose()

    async def _decoded(self) -> AsyncGenerator[bytes, None]:
        if self._response.is_closed:
            # Its `httpx.Auth` has read it.
            yield self._response.content
            return
        decoder = decoder_of(self.headers.get("Content-Encoding"))
        # `aiter_raw` would give the connection back to the pool before it is checked.
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        async for chunk in self._response.stream:
            if decoder is None:
                yield chunk
                continue
            for piece in decoder.feed(chunk):
                yield piece
        if _has_more(self._response.stream):
            await self._response.extensions["network_stream"].aclose()
        if decoder is not None:
            decoder.end()

    @contextmanager
    def _within(self, seconds: float | None) -> Iterator[_Timer]:
        with anyio.CancelScope() as scope:
            timer = _Timer(scope)
            timer.restart(seconds)
            yield timer

    def within(self, seconds: float | None) -> AbstractContextManager[Timer]:
        return self._within(seconds)

    def abort(self) -> None:
        """Do nothing: a response that is closed before its end closes its connection."""


def _has_more(stream: Any) -> bool:
    """Whether a server has sent more than the reply that ends here, over HTTP/1.1. httpcore would take it for the reply
    to the next request on this connection, which asks about another sample.
    """
    for _ in range(_MOST_WRAPPERS):
        state = getattr(getattr(stream, "_connection", None), "_h11_state", None)
        if state is not None:
            return bool(state.trailing_data[0])
        stream = getattr(stream, "_stream", None) or getattr(stream, "_httpcore_stream", None)
    return False


class _Timer:
    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope

    @property
    def expired(self) -> bool:
        return self._scope.cancelled_caught

    def restart(self, seconds: float | None) -> None:
        self._scope.deadline = float("inf") if seconds is None else anyio.current_time() + seconds
