"""Posts requests with bare aiohttp, the default client.

Bare aiohttp takes less than half of the processor time of httpx over aiohttp's transport (bench/README.md). Its
connection pool frees every slot when requests are cancelled; httpx's pool does not, and a scheduler that hedges cancels
often. And it can report when a request is written, which is when a server's limit counts it.

Requests go out as `PreparedPost`s. The session posts those with a proxy or with headers of their own.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from ..errors import SourceError, SourceUnusable, TransientError
from .http import ACCEPTED, KEEP_ALIVE_S, Connecting, HTTPClient, HTTPReply, Incoming, Reading, os_reason


class AiohttpReply(Incoming):
    """Reads `content`."""

    def __init__(self, status: int, headers: Mapping[str, str], content: aiohttp.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._content = content

    def chunks(self) -> AsyncIterator[bytes]:
        return self._content.iter_any()

    async def body(self, limit: int) -> bytes | None:
        content = self._content
        first = await content.readany()
        if content.at_eof():  # mostly the whole body has come with the headers
            return first if len(first) <= limit else None
        body = bytearray(first)
        while len(body) <= limit and not content.at_eof():
            body += await content.readany()
        return bytes(body) if len(body) <= limit else None


TESTED_VERSION = (3, 11) <= tuple(map(int, aiohttp.__version__.split(".")[:2])) <= (3, 14)
"""Whether the installed version of aiohttp is one of those that this module was tested with."""
_SWITCHING_PROTOCOLS = 101


class PreparedPost:
    """Posts JSON to `url` over the connections of `session`, with the headers of the session. `endpoint_settings`
    refuses headers that end a line or change how a body is sent.
    """

    def __init__(self, session: aiohttp.ClientSession, url: URL) -> None:
        assert isinstance(session.connector, _Connector)
        self._connector = session.connector
        self._timeout = session.timeout
        self.loop = asyncio.get_running_loop()
        # aiohttp chooses a connection by it. Its headers are those that aiohttp would send.
        self._request = aiohttp.ClientRequest(
            "POST",
            url,
            headers=session.headers,
            data=aiohttp.BytesPayload(b"", content_type="application/json"),
            loop=self.loop,
            session=session,
        )
        self._server = self._request.connection_key
        headers = self._request.headers
        headers.pop("Content-Length", None)
        lines = [f"POST {url.raw_path_qs} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode()

    async def send(self, body: bytes, on_sent: Callable[[], None]) -> PooledReply:
        """Send a request, and return its reply when its headers have come. The caller has to `release` the reply.

        Calls `on_sent` right before the request is written; if that raises, nothing is written. Cancelling closes the
        connection. Raises what `aiohttp.ClientSession.post` raises.
        """
        protocol = self._connector.take(self._server)
        if protocol is None:
            protocol = await self._connected()
        try:
            transport = protocol.transport
            if transport is None or transport.is_closing():
                raise aiohttp.ClientConnectionError("the connection was lost before the request was written")
            # This makes a new parser. The last one may still hold a trailer, or half of an unasked reply.
            protocol.set_response_params(read_until_eof=True, auto_decompress=False)
            on_sent()
            transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
            message, content = await protocol.read()
            while 100 <= message.code < 200 and message.code != _SWITCHING_PROTOCOLS:
                message, content = await protocol.read()
        except BaseException:
            self.give_back(protocol, close=True)
            raise
        reply = PooledReply(message, content, self, protocol)
        # The connection is free as soon as the whole reply has come: mostly now.
        content.on_eof(reply.free_connection)
        return reply

    async def _connected(self) -> ResponseHandler:
        """Make a connection."""
        try:
            connection = await self._connector.connect(self._request, [], self._timeout)
        except asyncio.TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {self._request.url}") from error
        protocol, connection._protocol = connection.protocol, None  # it does not give it back
        assert protocol is not None
        return protocol

    def give_back(self, protocol: ResponseHandler, *, close: bool = False) -> None:
        """Give a connection back to the pool. It is closed if its reply was not read to its end, or if `close`."""
        if not self.loop.is_closed():
            self._connector._release(self._server, protocol, should_close=close)


class PooledReply(AiohttpReply):
    """A reply that holds a connection of the pool until it is read or released."""

    def __init__(
        self, message: Any, content: aiohttp.StreamReader, post: PreparedPost, protocol: ResponseHandler
    ) -> None:
        super().__init__(message.code, message.headers, content)
        self._post = post
        self._protocol: ResponseHandler | None = protocol

    def free_connection(self) -> None:
        """Give the connection back. Idempotent."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            self._post.give_back(protocol)

    def release(self) -> None:
        """Give the connection back, when nothing more is read."""
        self.free_connection()
        # Content that has not ended holds this object, by the callback for its end.
        self._content = aiohttp.streams.EMPTY_PAYLOAD


_DNS_CACHE_S = 30
_LARGE_BODY_BYTES = 2**20
_MOST_PREPARED = 64
"""Most URLs whose prepared requests are kept. Each replica of a source has its own URL."""


class AiohttpClient(HTTPClient[aiohttp.ClientSession]):
    """An `HTTPClient` over aiohttp."""

    def __init__(self, connecting: Connecting) -> None:
        super().__init__(connecting)
        self._prepared: dict[URL, PreparedPost] = {}
        """The requests of the session that was used last."""

    def _open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=_Connector(
                # The scheduler limits concurrency. A second limit here would queue requests unseen.
                limit=0,
                keepalive_timeout=KEEP_ALIVE_S,
                ttl_dns_cache=_DNS_CACHE_S,
                ssl=self._connecting.verify_tls,
            ),
            headers={"Accept-Encoding": ACCEPTED, **self._headers},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connecting.connect_s),
            trust_env=False,
        )

    async def _close_session(self, session: aiohttp.ClientSession) -> None:
        self._prepared.clear()
        await session.close()

    async def _abandon_session(self, session: aiohttp.ClientSession) -> None:
        self._prepared.clear()
        connector = session.connector
        session.detach()
        if connector is not None:
            await connector.close()

    async def _exchange(
        self, url: URL, body: bytes, reading: Reading, headers: Mapping[str, str] | None
    ) -> HTTPReply | SourceError:
        try:
            post = None if headers else self._prepared.get(url)
            if post is None or post.loop is not asyncio.get_running_loop():
                session = await self._session()
                proxy = self._connecting.proxies.get(url)
                if headers or proxy is not None or not TESTED_VERSION:
                    async with session.post(
                        url, data=_payload(body, reading.sent), headers=headers, proxy=proxy, allow_redirects=False
                    ) as response:
                        return await reading.read(AiohttpReply(response.status, response.headers, response.content))
                post = self._prepare(session, url)
            reply = await post.send(body, reading.sent)
            try:
                return await reading.read(reply)
            finally:
                reply.release()
        except Exception as error:
            return self._failure(error, reading.where)

    def _prepare(self, session: aiohttp.ClientSession, url: URL) -> PreparedPost:
        """Make the request to `url`, and keep it for the next ones."""
        if len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
        post = self._prepared[url] = PreparedPost(session, url)
        return post

    def _failure(self, error: Exception, where: str) -> SourceError:
        if isinstance(error, (ssl.SSLCertVerificationError, aiohttp.ClientConnectorCertificateError)):
            return self._untrusted(where, getattr(error, "certificate_error", error))
        if isinstance(error, aiohttp.ClientHttpProxyError):
            kind = SourceUnusable if error.status == 407 else TransientError
            return kind(f"{where}: the proxy answered {error.status} to CONNECT", status=error.status)
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return self._not_connected(where, f" within {self._connecting.connect_s:g} s")
        if isinstance(error, aiohttp.ClientConnectorSSLError):
            return self._no_handshake(where, error.os_error)
        if isinstance(error, aiohttp.ClientConnectorError):
            return self._not_connected(where, _reason(error))
        if isinstance(error, aiohttp.ClientPayloadError):
            return TransientError(f"{where}: the body of the reply broke off")
        if isinstance(error, (aiohttp.ClientResponseError, HttpProcessingError)):
            return TransientError(f"{where}: the reply is not valid HTTP ({self.redactor.of(error.message)})")
        if isinstance(error, OSError):
            return TransientError(f"{where}: the connection failed{_reason(error)}")
        if isinstance(error, aiohttp.ClientConnectionError):
            return TransientError(f"{where}: the connection was lost")
        # Of any other error (ValueError of a parser, zlib.error, RuntimeError of a closed session) only the type is
        # shown, because its text may hold secrets.
        return TransientError(f"{where}: the request failed with {type(error).__name__}")


class _Connector(aiohttp.TCPConnector):
    """Closes a connection in two cases in which aiohttp keeps it.

    If a server has sent something on an idle connection, aiohttp would take it for the reply to the next request, which
    asks about another sample. And if a request ends before it was written, aiohttp would write the rest of it: after
    its end, or before the next request.
    """

    def _release(self, key: Any, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        tls = key.is_ssl or key.proxy is not None
        super()._release(key, protocol, should_close=_abort_unwritten(protocol, tls=tls) or should_close)

    def close(self, **options: Any) -> Any:
        for protocol in list(self._acquired):
            if isinstance(protocol, ResponseHandler):  # and no connection that is still to be made
                _abort_unwritten(protocol)
        return super().close(**options)

    async def _get(self, key: Any, traces: Any) -> Connection | None:
        protocol = self.take(key)
        return None if protocol is None else Connection(self, key, protocol, self._loop)

    def take(self, server: Any) -> ResponseHandler | None:
        """Take the idle connection to a server that was used last; None if there is none."""
        idle = self._conns.get(server)
        while idle:
            protocol, since = idle.pop()
            fresh = time.monotonic() - since <= KEEP_ALIVE_S  # the clock with which aiohttp notes `since`
            if fresh and protocol.is_connected() and not protocol.should_close:
                self._acquired.add(protocol)
                return protocol
            protocol.close()
        return None


def _abort_unwritten(protocol: ResponseHandler, *, tls: bool = True) -> bool:
    """Close a connection on which a part of a request is still to be written. Returns whether there is one. `tls`:
    whether the connection may be one of TLS.
    """
    transport = protocol.transport
    if transport is None:
        return False
    # A transport of TLS does not count what it has passed on to that of the socket.
    below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None) if tls else None
    if not transport.get_write_buffer_size() and (below is None or not below.get_write_buffer_size()):
        return False
    transport.abort()
    if protocol.writing_paused:
        # Else aiohttp 3.13 and earlier log the error of a future that nobody awaits any more.
        protocol.resume_writing()
    return True


class _Body(aiohttp.BytesPayload):
    """A body that calls `on_sent` when it is written. aiohttp's tracing could do it, but adds 20% to each request."""

    def __init__(self, body: bytes, on_sent: Callable[[], None]) -> None:
        super().__init__(body, content_type="application/json")
        self._on_sent: Callable[[], None] | None = on_sent

    # It depends on the release of aiohttp which of the two it calls, and whether one calls the other.
    async def write(self, writer: AbstractStreamWriter) -> None:
        self._report_sent()
        await super().write(writer)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._report_sent()
        await super().write_with_length(writer, content_length)

    def _report_sent(self) -> None:
        on_sent, self._on_sent = self._on_sent, None
        if on_sent is not None:
            on_sent()


def _payload(body: bytes, on_sent: Callable[[], None]) -> _Body:
    if len(body) <= _LARGE_BODY_BYTES:
        return _Body(body, on_sent)
    with warnings.catch_warnings():
        # aiohttp warns of large bodies and recommends files. Our bodies are in memory already.
        warnings.simplefilter("ignore", ResourceWarning)
        return _Body(body, on_sent)


def _reason(error: OSError) -> str:
    return os_reason(getattr(error, "os_error", error))
