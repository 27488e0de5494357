"""Reads the replies to HTTP requests, within their limits: bodies of bounded size, and streams of events.

The libraries' replies are `Incoming`s; `aiohttp_client` and `httpx_client` define them.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
import orjson
from yarl import URL

from ..errors import SourceError, TransientError
from .streams import MEDIA_TYPE, EventSink, StreamBroken

ACCEPTED = "identity"
"""The `Accept-Encoding` of requests: replies are small, and a body that is not compressed cannot be a bomb."""


# The body of an error only explains it. The status counts even if the body is endless or never arrives.
_ERROR_BODY_BYTES = 65_536
_ERROR_BODY_S = 5.0
# A token in an event of its own takes 100 to 300 bytes, so a stream is much larger than the reply that it carries.
_STREAM_FACTOR = 64
# A server that closes a stream properly does so at once after its last event. Then the connection is used again.
_STREAM_END_S = 0.5
_STREAM_END_BYTES = 4096


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True)
class HTTPReply:
    """The status, headers and body of a reply. The body of an error may be truncated. `headers` ignore case.

    If it was `streamed`, the body is the one that the server would have sent without streaming, and `first_token_s` is
    the time from sending the request to the first token in seconds; None without any. The repr leaves out headers and
    body, because tracebacks may be printed with their variables.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    streamed: bool = False
    first_token_s: float | None = None


class Incoming(ABC):
    """A reply whose body has not been read yet. A client closes the connection of one that is not read to its end."""

    status: int
    headers: Mapping[str, str]

    @abstractmethod
    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces, as it was sent."""

    async def body(self, limit: int) -> bytes | None:
        """Return the body; None if it has more than `limit` bytes."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > limit:
                return None
        return bytes(body)


class Reading:
    """Reads the reply of one request, within its limits."""

    __slots__ = ("_name", "_on_sent", "_sent_at", "_streaming", "_url", "limit", "sent")

    def __init__(
        self, name: str, url: URL, limit: int, on_sent: Callable[[], None], streaming: EventSink | None
    ) -> None:
        self._name = name
        self._url = url
        self._on_sent = on_sent
        self._sent_at = 0.0
        self.limit = limit
        self._streaming = streaming
        self.sent = on_sent if streaming is None else self._sent
        """Called right before the request is written. If it raises, nothing may be written."""

    def _sent(self) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        self._on_sent()

    @property
    def where(self) -> str:
        """The source and its URL, for messages."""
        return f"source {self._name!r} ({self._url})"

    async def read(self, incoming: Incoming) -> HTTPReply | SourceError:
        """Return the reply; or an error for a body that is too large or a broken stream.

        Raises what the library raises.
        """
        if not 200 <= incoming.status < 300:
            return await self._error(incoming)
        if self._streaming is not None:
            media_type = incoming.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if media_type == MEDIA_TYPE:
                return await self._stream(incoming, self._streaming)
        body = await incoming.body(self.limit)
        if body is None:
            message = f"{self.where}: reply larger than {self.limit:,} bytes"
            return TransientError(message, status=incoming.status)
        return HTTPReply(incoming.status, incoming.headers, body)

    async def _error(self, incoming: Incoming) -> HTTPReply:
        limit = min(self.limit, _ERROR_BODY_BYTES)
        body = bytearray()
        try:
            with anyio.move_on_after(_ERROR_BODY_S):
                async for chunk in incoming.chunks():
                    body += chunk
                    if len(body) > limit:
                        break
        except Exception:  # the libraries raise many kinds; the status is known, and the body is only an explanation
            pass
        return HTTPReply(incoming.status, incoming.headers, bytes(body[:limit]))

    async def _stream(self, incoming: Incoming, sink: EventSink) -> HTTPReply | SourceError:
        size, first_at = 0, None
        idle_s = math.inf if sink.idle_s is None else sink.idle_s
        try:
            with anyio.CancelScope() as limit:
                sink.begin(incoming.status, incoming.headers, self.limit)
                async for chunk in incoming.chunks():
                    size += len(chunk)
                    if size > self.limit * _STREAM_FACTOR:
                        raise StreamBroken(f"more than {self.limit * _STREAM_FACTOR:,} bytes of events")
                    if sink.take(chunk):
                        limit.deadline = anyio.current_time() + idle_s
                    if first_at is None and sink.begun:
                        first_at = asyncio.get_running_loop().time()
                    if sink.ended:
                        break
                    if not sink.has_room:
                        limit.deadline = math.inf
                        await sink.wait_for_room()
                        limit.deadline = anyio.current_time() + idle_s
            if limit.cancelled_caught and not sink.ended:
                raise StreamBroken(f"no event within {sink.idle_s:g} s")
            sink.finish()
        except StreamBroken as error:
            return TransientError(f"{self.where} answered with {error}", status=incoming.status)
        await self._drain(incoming)
        first_token_s = None if first_at is None else first_at - self._sent_at
        return HTTPReply(incoming.status, incoming.headers, orjson.dumps(sink.body()), True, first_token_s)

    async def _drain(self, incoming: Incoming) -> None:
        """Read to the end of a stream after its last event, so that its connection can be used again."""
        left = _STREAM_END_BYTES
        # The answer is whole, whatever follows.
        with suppress(Exception), anyio.move_on_after(_STREAM_END_S):
            async for chunk in incoming.chunks():
                left -= len(chunk)
                if left < 0:
                    break
