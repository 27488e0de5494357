"""Defines `PreparedPost`: a POST of JSON to one URL, whose head is written once and sent with many bodies.

`aiohttp.ClientSession.post` makes the head of each request anew, and starts a task that writes the body. That is half
of the processor time of a small exchange. Here aiohttp still does what is hard: it resolves names, connects, checks
certificates, keeps connections and parses replies. Bodies of replies are decompressed where they are read.

The connections of aiohttp are no documented interface. So this is for the versions that it was tested with; with any
other, `ClientSession.post` sends.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import aiohttp
from yarl import URL

from .aiohttp_reply import AiohttpReply

TESTED_VERSION = (3, 11) <= tuple(map(int, aiohttp.__version__.split(".")[:2])) <= (3, 14)
"""Whether the installed version of aiohttp is one of those that this module was tested with."""
_FRAMING = ("Content-Encoding", "Expect", "Transfer-Encoding")
"""Headers with which the body does not simply follow the head."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_SWITCHING_PROTOCOLS = 101


class PreparedPost:
    """Posts JSON to `url` over the connections of `session`, with the headers of the session."""

    def __init__(self, session: aiohttp.ClientSession, url: URL) -> None:
        assert session.connector is not None
        self._connector = session.connector
        self._timeout = session.timeout
        self._loop = asyncio.get_running_loop()
        # aiohttp chooses a connection by it. Its headers are those that aiohttp would send.
        self._request = aiohttp.ClientRequest(
            "POST",
            url,
            headers=session.headers,
            data=aiohttp.BytesPayload(b"", content_type="application/json"),
            loop=self._loop,
            session=session,
        )
        headers = self._request.headers
        self.can_send = not any(name in headers for name in _FRAMING)
        """Whether a body can simply follow the head; otherwise only the session can send it."""
        headers.pop("Content-Length", None)
        lines = [f"POST {url.raw_path_qs} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if any(map(_CONTROL.search, lines)):
            raise ValueError("a header must not hold a line break or another control character")
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode()

    async def send(self, body: bytes, on_sent: Callable[[], None]) -> PooledReply:
        """Send a request, and return its reply when its headers have come. The caller has to `release` the reply.

        Calls `on_sent` right before the request is written; if that raises, nothing is written. Cancelling closes the
        connection. Raises what `aiohttp.ClientSession.post` raises.
        """
        try:
            connection = await self._connector.connect(self._request, [], self._timeout)
        except asyncio.TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {self._request.url}") from error
        try:
            protocol, transport = connection.protocol, connection.transport
            if protocol is None or transport is None or transport.is_closing():
                raise aiohttp.ClientConnectionError("the connection was lost before the request was written")
            protocol.set_response_params(read_until_eof=True, auto_decompress=False)
            on_sent()
            transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
            message, content = await protocol.read()
            while 100 <= message.code < 200 and message.code != _SWITCHING_PROTOCOLS:
                message, content = await protocol.read()
        except BaseException:
            if not self._loop.is_closed():
                connection.close()
            raise
        # The connection is free as soon as the whole reply has come: mostly now.
        content.on_eof(connection.release)
        return PooledReply(message, content, connection, self._loop)


class PooledReply(AiohttpReply):
    """A reply that holds a connection of the pool until it is read or released."""

    def __init__(
        self, message: Any, content: aiohttp.StreamReader, connection: Any, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(message.code, message.headers, content, self._abort)
        self._connection = connection
        self._loop = loop

    def release(self) -> None:
        """Give the connection back. It is closed if the reply was not read to its end."""
        if not self._loop.is_closed():
            self._connection.release()

    def _abort(self) -> None:
        content = self._content
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientConnectionError("Connection closed"))
        if not self._loop.is_closed():
            self._connection.close()
