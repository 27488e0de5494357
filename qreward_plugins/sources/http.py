"""Posts one request over HTTP, and returns a reply with a bounded body or one error of this package.

The client is bare aiohttp, for three reasons. A request costs 0.2 ms of processor time (measured for this project;
httpx over aiohttp's transport: 0.5 ms). Its connection pool frees every slot when requests are cancelled; httpx's pool
does not, and a scheduler that hedges cancels often. And it can report when a request is written, which is when a
server's limit counts it.

The client follows no redirects and keeps no cookies, because these could carry the key or a session to another server.
It does not read `~/.netrc`, which could add credentials that are not configured. aiohttp's `trust_env` would read it,
so this module reads the proxies of `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` itself. Retries and time limits are the
scheduler's; only connecting has a time limit here.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from ..errors import SourceError, SourceUnusable, TransientError
from .redactor import Redactor

# uvicorn, and with it vLLM and SGLang, closes an idle connection after 5 s. The client closes it earlier, so that it
# never writes a request to a connection that the server is closing.
_KEEP_ALIVE_S = 4.0
_DNS_CACHE_S = 30
_LARGE_BODY_BYTES = 2**20
# The body of an error only explains it. The status counts even if the body is endless or never arrives.
_ERROR_BODY_BYTES = 65_536
_ERROR_BODY_S = 5.0
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""Reasons of OpenSSL for an answer that is not TLS."""
_NO_SECRETS = frozenset(
    {"accept", "accept-encoding", "accept-language", "content-type", "http-referer", "referer", "user-agent", "x-title"}
)
"""Headers with common values. They are not redacted, because that would also remove these words from rationales."""


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True)
class HTTPReply:
    """The status, headers and body of a reply. The body of an error may be truncated. `headers` ignore case.

    The repr leaves out headers and body, because tracebacks may be printed with their variables.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


class HTTPClient:
    """Posts JSON for one source, with one session per event loop.

    The first request in a loop opens a session. `aclose` closes it, or `asyncio.run` when it shuts the loop down, so
    that a later loop never uses connections of an earlier one. `headers` and `plain_headers` go with every request; the
    values of `plain_headers` are not secret. `secrets` are texts in the bodies that must not be shown. `verify_tls` and
    `connect_s` (seconds, with name resolution and TLS) are those of the configuration. The proxies are read once, in
    the constructor.
    """

    def __init__(
        self,
        name: str,
        urls: tuple[URL, ...],
        headers: Mapping[str, str],
        *,
        plain_headers: Mapping[str, str] | None = None,
        secrets: tuple[str, ...] = (),
        verify_tls: bool,
        connect_s: float,
    ) -> None:
        self._name = name
        self._headers = {**(plain_headers or {}), **headers}
        self._verify_tls = verify_tls
        self._connect_s = connect_s
        self._proxies = {url: proxy_for(url) for url in urls}
        passwords = [proxy.password for proxy in self._proxies.values() if proxy and proxy.password]
        sent = [value for key, value in headers.items() if key.lower() not in _NO_SECRETS]
        self.redactor = Redactor([*sent, *passwords, *secrets])
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[None, None]]] = {}
        self._closed = False

    async def post(self, url: URL, body: bytes, *, on_sent: Callable[[], None], max_reply_bytes: int) -> HTTPReply:
        """Post `body` and read the reply, at most `max_reply_bytes` of it after decompression.

        Calls `on_sent` once, when the request is written. Cancelling closes the connection.

        Raises SourceUnusable if another try cannot help: the certificate does not verify, the proxy wants a password,
        or the client is closed. Raises TransientError for every other failure, from name resolution to a broken body.
        """
        outcome = await self._exchange(url, body, on_sent, max_reply_bytes)
        if isinstance(outcome, HTTPReply):
            return outcome
        try:
            # Raised here, the error has no `__context__` (an error of aiohttp holds the request's headers), and no
            # frame of its traceback holds a part of the reply.
            raise outcome
        finally:
            # Breaks the reference cycle of error, traceback and frame, which would keep the prompt in memory.
            del outcome

    async def aclose(self) -> None:
        """Close the sessions. Idempotent; requests in flight fail."""
        self._closed = True
        await self._close_sessions()

    async def _close_sessions(self) -> None:
        here = asyncio.get_running_loop()
        for loop, (session, keeper) in list(self._sessions.items()):
            del self._sessions[loop]
            if loop is here:
                await keeper.aclose()
            elif loop.is_closed():
                await _abandon(session)
            else:
                asyncio.run_coroutine_threadsafe(keeper.aclose(), loop)

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session, _ = self._sessions.get(loop, (None, None))
        if session is None or session.closed:
            # The session is stored before the first await, so that concurrent requests share it.
            closed = [self._sessions.pop(other)[0] for other in list(self._sessions) if other.is_closed()]
            session = self._open_session()
            keeper = _keep(session)
            self._sessions[loop] = (session, keeper)
            await keeper.__anext__()
            for abandoned in closed:
                await _abandon(abandoned)
        return session

    def _open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                # The scheduler limits concurrency. A second limit here would queue requests unseen.
                limit=0,
                keepalive_timeout=_KEEP_ALIVE_S,
                ttl_dns_cache=_DNS_CACHE_S,
                ssl=self._verify_tls,
            ),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_s),
            trust_env=False,
        )

    async def _exchange(
        self, url: URL, body: bytes, on_sent: Callable[[], None], limit: int
    ) -> HTTPReply | SourceError:
        if self._closed:
            return SourceUnusable(f"source {self._name!r} is closed", certain=True)
        try:
            session = await self._session()
            async with session.post(
                url, data=_payload(body, on_sent), proxy=self._proxies.get(url), allow_redirects=False
            ) as response:
                if not 200 <= response.status < 300:
                    return await _read_error(response, limit)
                reply = await _read(response, limit)
                if reply is not None:
                    return reply
                said = f"source {self._name!r} ({url}): reply larger than {limit:,} bytes"
                return TransientError(said, status=response.status)
        except Exception as error:
            return self._failure(error, url)

    def _failure(self, error: Exception, url: URL) -> SourceError:
        where = f"source {self._name!r} ({url})"
        if isinstance(error, (ssl.SSLCertVerificationError, aiohttp.ClientConnectorCertificateError)):
            cause = getattr(error, "certificate_error", error)
            reason = getattr(cause, "verify_message", "") or str(cause)
            return SourceUnusable(
                f"{where}: the server's certificate does not verify ({self.redactor.of(reason)}); fix the certificate, "
                "or set SSL_CERT_FILE to the certificate of the authority that signed it (verify_tls is on)"
            )
        if isinstance(error, aiohttp.ClientHttpProxyError):
            kind = SourceUnusable if error.status == 407 else TransientError
            return kind(f"{where}: the proxy answered {error.status} to CONNECT", status=error.status)
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return TransientError(f"{where}: could not connect within {self._connect_s:g} s")
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return TransientError(f"{where}: the name {self.redactor.of(error.host)!r} could not be resolved")
        if isinstance(error, aiohttp.ClientProxyConnectionError):
            return TransientError(f"{where}: could not connect to the proxy{_errno(error)}")
        if isinstance(error, aiohttp.ClientConnectorSSLError):
            reason = _ssl_reason(error)
            hint = "; the server probably speaks http, not https" if reason in _NOT_TLS else ""
            return TransientError(f"{where}: the TLS handshake failed ({self.redactor.of(reason)}){hint}")
        if isinstance(error, aiohttp.ClientConnectorError):
            return TransientError(f"{where}: could not connect{_errno(error)}")
        if isinstance(error, aiohttp.ServerDisconnectedError):
            return TransientError(f"{where}: the server closed the connection without an answer")
        if isinstance(error, aiohttp.ClientPayloadError):
            return TransientError(f"{where}: the body of the reply broke off or could not be decoded")
        if isinstance(error, aiohttp.ClientResponseError):
            return TransientError(f"{where}: the reply is not valid HTTP ({self.redactor.of(error.message)})")
        if isinstance(error, OSError):
            return TransientError(f"{where}: the connection failed{_errno(error)}")
        if isinstance(error, aiohttp.ClientConnectionError):
            return TransientError(f"{where}: the connection was lost")
        # Of any other error (ValueError of a parser, zlib.error, RuntimeError of a closed session) only the type is
        # shown, because its text may hold secrets.
        return TransientError(f"{where}: the request failed with {type(error).__name__}")

    def __repr__(self) -> str:
        return f"HTTPClient({self._name!r})"


def proxy_for(url: URL) -> URL | None:
    """Return the HTTP proxy that the environment sets for `url`, or None."""
    if url.host is None or urllib.request.proxy_bypass(url.host):
        return None
    named = urllib.request.getproxies().get(url.scheme)
    proxy = URL(named) if named else None
    return proxy if proxy is not None and proxy.scheme in ("http", "https") else None


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


async def _keep(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    # A loop that shuts down closes its asynchronous generators. So this generator closes a session that its owner left
    # open; once the loop is closed, it could not be closed any more.
    try:
        yield
    finally:
        await session.close()


async def _abandon(session: aiohttp.ClientSession) -> None:
    """Close what can be closed of a session whose loop was closed without being shut down: its connector."""
    connector = session.connector
    session.detach()
    if connector is not None:
        await connector.close()


async def _read(response: aiohttp.ClientResponse, limit: int) -> HTTPReply | None:
    """Read the body. If it is larger than `limit`, close the connection and return None."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            response.close()
            return None
    return HTTPReply(response.status, response.headers, bytes(body))


async def _read_error(response: aiohttp.ClientResponse, limit: int) -> HTTPReply:
    limit = min(limit, _ERROR_BODY_BYTES)
    body = bytearray()
    # A timer closes the response, which ends the read with an error. A time-out around the read could swallow a
    # cancellation that arrives at the same moment.
    timer = asyncio.get_running_loop().call_later(_ERROR_BODY_S, response.close)
    try:
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limit:
                response.close()
                break
    except (aiohttp.ClientError, OSError):
        # The status is known, and the body is only an explanation.
        pass
    finally:
        timer.cancel()
    return HTTPReply(response.status, response.headers, bytes(body[:limit]))


def _payload(body: bytes, on_sent: Callable[[], None]) -> _Body:
    if len(body) <= _LARGE_BODY_BYTES:
        return _Body(body, on_sent)
    with warnings.catch_warnings():
        # aiohttp warns of large bodies and recommends files. Our bodies are in memory already.
        warnings.simplefilter("ignore", ResourceWarning)
        return _Body(body, on_sent)


def _errno(error: OSError) -> str:
    # The operating system's message is short; aiohttp's adds the TLS settings.
    reason = getattr(error, "os_error", error)
    return f" ({reason.strerror})" if isinstance(reason, OSError) and reason.strerror else ""


def _ssl_reason(error: aiohttp.ClientConnectorSSLError) -> str:
    return getattr(error.os_error, "reason", None) or type(error.os_error).__name__
