"""Posts requests with httpx: HTTP/2, SOCKS proxies, client certificates, and any `httpx.Auth`.

It behaves as the client over aiohttp. Two things need care:

- httpx reports that a request is sent through the extension `trace` of httpcore.
- If requests wait in httpx's pool and are cancelled, their slots stay taken for ever (httpx 0.28, httpcore 1.0.9). So
  the pool has no limit, and `slots` of the source keeps the scheduler below 100 requests at once.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import anyio
import httpx
from yarl import URL

from ..errors import SourceError, SourceUnusable, TransientError
from .http import ACCEPTED, KEEP_ALIVE_S, NO_SECRETS, Connecting, HTTPClient, HTTPReply, Incoming, Reading, os_reason

_MOST_WRAPPERS = 8
"""Streams around that of httpcore: those of httpx and of its authentication."""


class HttpxIncoming(Incoming):
    """A reply whose body is still to be read."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self._response = response
        # One for all readers, so that the next one goes on where the last one stopped, and that it can be closed.
        self._chunks = self._pieces()

    def chunks(self) -> AsyncIterator[bytes]:
        return self._chunks

    async def aclose(self) -> None:
        await self._chunks.aclose()
        await self._response.aclose()

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        if self._response.is_closed:
            # Its `httpx.Auth` has read it.
            yield self._response.content
            return
        # `aiter_raw` would give the connection back to the pool before it is checked.
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        async for chunk in self._response.stream:
            yield chunk
        if _has_more(self._response.stream):
            await self._response.extensions["network_stream"].aclose()


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


_LIMIT = "qreward_max_reply_bytes"
_TOKEN_REPLY_BYTES = 1_048_576
"""Largest reply to a request of an `httpx.Auth`, such as for a token, in bytes."""
_KNOWN_HEADERS = NO_SECRETS | {"host", "connection", "content-length", "transfer-encoding"}
_MOST_CREDENTIALS = 16
"""Credentials of an `httpx.Auth` that are kept for redaction. They are renewed from time to time."""

# httpcore logs the password of a SOCKS proxy at level DEBUG.
logging.getLogger("httpcore.socks").addFilter(lambda record: "auth=" not in record.getMessage())


class HttpxClient(HTTPClient[httpx.AsyncClient]):
    """An `HTTPClient` over httpx. `context` has the client's certificate, if there is one."""

    def __init__(
        self, connecting: Connecting, *, context: ssl.SSLContext, http2: bool = False, auth: httpx.Auth | None = None
    ) -> None:
        super().__init__(connecting)
        self._context = context
        self._http2 = http2
        self._auth = auth
        self._credentials: dict[str, None] = {}
        self._configured = self.redactor
        """Redacts what the configuration holds. `redactor` also redacts what the `httpx.Auth` has added."""

    def _note(self, headers: httpx.Headers) -> None:
        """Remember what the `httpx.Auth` added to a request: a server may echo it."""
        own = {name.lower() for name in self._headers}
        for name, value in headers.multi_items():
            if name.lower() in own or name.lower() in _KNOWN_HEADERS or value in self._credentials:
                continue
            self._credentials[value] = None
            if len(self._credentials) > _MOST_CREDENTIALS:
                del self._credentials[next(iter(self._credentials))]
            self.redactor = self._configured.beside(self._credentials)

    def _open_session(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers={"Accept-Encoding": ACCEPTED, **self._headers},
            transport=self._transport(None),
            mounts={str(url.origin()): self._transport(proxy) for url, proxy in self._connecting.proxies.items()},
            auth=self._auth,
            # Keeps no cookies.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            # `_exchange` limits the connecting as a whole; httpx would limit each of its steps.
            timeout=None,
            trust_env=False,
            follow_redirects=False,
        )

    async def _close_session(self, session: httpx.AsyncClient) -> None:
        await session.aclose()

    async def _abandon_session(self, session: httpx.AsyncClient) -> None:
        """Does nothing: its sockets are closed when they are collected; httpx can close them only in their own loop."""

    def _transport(self, proxy: URL | None) -> httpx.AsyncBaseTransport:
        transport = httpx.AsyncHTTPTransport(
            verify=self._context,
            http2=self._http2,
            proxy=None if proxy is None else self._proxy(proxy),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,
        )
        return transport if self._auth is None else _Authorized(transport, self._note)

    def _proxy(self, url: URL) -> httpx.Proxy:
        return httpx.Proxy(str(url), ssl_context=self._context if url.scheme == "https" else None)

    async def _exchange(
        self, url: URL, body: bytes, reading: Reading, headers: Mapping[str, str] | None
    ) -> HTTPReply | SourceError:
        incoming: HttpxIncoming | None = None
        connecting = anyio.CancelScope()
        watch = _Watch(connecting, self._connecting.connect_s, reading.sent)
        try:
            client = await self._session()
            with connecting:
                request = client.build_request(
                    "POST",
                    str(url),
                    content=body,
                    headers={**(headers or {}), "Content-Type": "application/json"},
                    extensions={"trace": watch.trace, _LIMIT: reading.limit},
                )
                response = await client.send(request, stream=True)
                incoming = HttpxIncoming(response)
            if incoming is None:
                return self._not_connected(reading.where, f" within {self._connecting.connect_s:g} s")
            try:
                return await reading.read(incoming)
            finally:
                await incoming.aclose()
        except Exception as error:
            return self._failure(error, reading.where, answered=incoming is not None)
        finally:
            await watch.aclose()

    def _failure(self, error: Exception, where: str, *, answered: bool) -> SourceError:
        causes = list(_causes(error))
        untrusted = _first(causes, ssl.SSLCertVerificationError)
        if untrusted is not None and not answered:
            return self._untrusted(where, untrusted)
        if isinstance(error, httpx.ProxyError):
            return self._refused_by_proxy(error, where)
        failed = next((cause for cause in causes if isinstance(cause, OSError) and cause.strerror), error)
        if isinstance(error, httpx.ConnectError):
            handshake = _first(causes, ssl.SSLError)
            if handshake is not None:
                return self._no_handshake(where, handshake)
            return self._not_connected(where, os_reason(failed))
        if answered and isinstance(error, httpx.RemoteProtocolError):
            return TransientError(f"{where}: the body of the reply broke off")
        if isinstance(error, httpx.RemoteProtocolError):
            if "disconnected without" in str(error):
                return TransientError(f"{where}: the connection was lost")
            return TransientError(f"{where}: the reply is not valid HTTP ({self.redactor.of(str(error))})")
        if isinstance(error, (httpx.NetworkError, OSError)):
            return TransientError(f"{where}: the connection failed{os_reason(failed)}")
        # Of any other error only the type is shown, because its text may hold secrets.
        return TransientError(f"{where}: the request failed with {type(error).__name__}")

    def _refused_by_proxy(self, error: httpx.ProxyError, where: str) -> SourceError:
        message = str(error)
        status = int(message[:3]) if message[:3].isdecimal() else None
        if status is not None:
            kind = SourceUnusable if status == 407 else TransientError
            return kind(f"{where}: the proxy answered {status} to CONNECT", status=status)
        if "username/password" in message.lower() or "requested" in message.lower():
            return SourceUnusable(f"{where}: the proxy refused the user or the password")
        return TransientError(f"{where}: the proxy refused the connection ({self.redactor.of(message)})")


class _Authorized(httpx.AsyncBaseTransport):
    """Calls `note` with the headers of the requests that an `httpx.Auth` signs or makes, and bounds the replies that it
    may read as a whole, which httpx does not.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, note: Callable[[httpx.Headers], None]) -> None:
        self._transport = transport
        self._note = note

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._note(request.headers)
        response = await self._transport.handle_async_request(request)
        # httpx would decompress what an `httpx.Auth` reads.
        response.headers.pop("Content-Encoding", None)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _CappedStream(response.stream, request.extensions.get(_LIMIT, _TOKEN_REPLY_BYTES))
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


class _CappedStream(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._limit
        async for chunk in self._stream:
            left -= len(chunk)
            # What is over the limit is passed on once, for `Reading` to say so.
            yield chunk
            if left < 0:
                return

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Watch:
    """Watches the steps of one request: limits the connecting, and reports when the request is written."""

    def __init__(self, scope: anyio.CancelScope, connect_s: float, on_sent: Callable[[], None]) -> None:
        self._scope = scope
        self._connect_s = connect_s
        self._on_sent: Callable[[], None] | None = on_sent
        self._connected: Any = None

    async def aclose(self) -> None:
        """Close a connection whose TLS handshake did not end: httpcore leaves it open if it is cancelled."""
        connected, self._connected = self._connected, None
        if connected is not None:
            with anyio.CancelScope(shield=True):
                await connected.aclose()

    async def trace(self, name: str, info: Mapping[str, Any]) -> None:
        """Take in an event of httpcore."""
        if self._on_sent is None:
            return
        if name == "connection.connect_tcp.started" or name == "socks.connect_tcp.started":
            self._scope.deadline = anyio.current_time() + self._connect_s
        elif name.endswith(".connect_tcp.complete"):
            self._connected = info["return_value"]
        elif name.endswith(".start_tls.complete"):
            self._connected = None
        elif name.endswith(".send_request_headers.started") and info["request"].method != b"CONNECT":
            self._connected = None
            on_sent, self._on_sent = self._on_sent, None
            self._scope.deadline = float("inf")
            on_sent()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what caused it."""
    left: list[BaseException] = [error]
    for _ in range(32):
        if not left:
            return
        one = left.pop(0)
        yield one
        left += [cause for cause in (one.__cause__ or one.__context__,) if cause is not None]
        left += getattr(one, "exceptions", ())


def _first(causes: list[BaseException], kind: type[BaseException]) -> BaseException | None:
    return next((cause for cause in causes if isinstance(cause, kind)), None)
