"""One POST over HTTP: a reply with a bounded body, or one error of ours.

The client is aiohttp by itself. Measured for this project, a request costs it a fifth of a millisecond of processor
time where httpx over aiohttp's own transport costs half of one; its connection pool gives every slot back when requests
are cancelled (httpx's keeps some for ever, and cancelling is what a scheduler that hedges does all day); and it tells
when a request is written, which is the moment that a server's limit counts.

Left out on purpose: redirects and cookies (either could carry the key, or a session, elsewhere), `~/.netrc` (it could
attach credentials that nobody configured; that rules out aiohttp's `trust_env`, so the proxies of `HTTPS_PROXY`,
`HTTP_PROXY` and `NO_PROXY` are read here), retries (the scheduler's), and a time limit but for connecting (the
scheduler's too).
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

# Less than the 5 s after which uvicorn, hence vLLM and SGLang, closes an idle connection: the side that closes first
# never writes a request into a connection that is going away.
_KEEP_ALIVE_S = 4.0
_DNS_CACHE_S = 30
_LARGE_BODY_BYTES = 2**20
# The body of an error only explains it: the status must get through even when the body is endless or never comes.
_ERROR_BODY_BYTES = 65_536
_ERROR_BODY_S = 5.0
_NO_SECRETS = frozenset(
    {"accept", "accept-encoding", "accept-language", "content-type", "http-referer", "referer", "user-agent", "x-title"}
)
"""Headers whose values are words of everybody's, which would be struck out of rationales."""


@dataclass(frozen=True, slots=True)
class HTTPReply:
    """What came back; the body of an error may be cut off. `headers` ignore case.

    Not even its representation shows what is in it: tracebacks may be printed with their variables.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


class HTTPClient:
    """Posts JSON for one source, with one session per event loop.

    A session is opened by the first request in a loop and closed by `aclose`, or else when `asyncio.run` shuts its loop
    down, so that a later loop never meets connections of an earlier one. `headers` go with every request, and so do
    `plain_headers`, whose values may be shown; `secrets` are texts of the bodies that must not be shown. `verify_tls`
    and `connect_s` (seconds, name resolution and TLS included) are as in the configuration; `proxies` are found once,
    when the client is made.
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

        `on_sent` is called once, as the request is written. Cancelling closes the connection.

        Raises TransientError for everything between the name server and a broken body, and SourceUnusable for what
        does not mend by itself: a certificate that does not verify, a proxy that wants a password, a closed client.
        """
        outcome = await self._exchange(url, body, on_sent, max_reply_bytes)
        if isinstance(outcome, HTTPReply):
            return outcome
        try:
            # Raised out here, the error has no `__context__` (aiohttp's hold the request's headers), and no frame of
            # its traceback holds anything of the reply.
            raise outcome
        finally:
            # Or else the error, its traceback and this frame would keep each other, and the prompt, alive.
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
            # The session is stored before anything is awaited, so that concurrent requests share it.
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
                # How many at once is the scheduler's business; a limit here would only hide requests from it.
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
                f"{where}: the server's certificate does not verify ({self.redactor.of(reason)}); mend it, "
                "or point SSL_CERT_FILE to the authority that signed it (verify_tls is on)"
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
            return TransientError(f"{where}: the TLS handshake failed ({self.redactor.of(_ssl_reason(error))})")
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
        # Whatever is left (ValueError of a parser, zlib.error, RuntimeError of a session closed meanwhile) is only
        # named: nobody knows what its text holds.
        return TransientError(f"{where}: the request failed with {type(error).__name__}")

    def __repr__(self) -> str:
        return f"HTTPClient({self._name!r})"


def proxy_for(url: URL) -> URL | None:
    """Return the HTTP proxy that the environment names for `url`, or None."""
    if url.host is None or urllib.request.proxy_bypass(url.host):
        return None
    named = urllib.request.getproxies().get(url.scheme)
    proxy = URL(named) if named else None
    return proxy if proxy is not None and proxy.scheme in ("http", "https") else None


class _Body(aiohttp.BytesPayload):
    """A body that tells when it is written. aiohttp's tracing could tell, too, at a fifth of the price of a request."""

    def __init__(self, body: bytes, on_sent: Callable[[], None]) -> None:
        super().__init__(body, content_type="application/json")
        self._on_sent: Callable[[], None] | None = on_sent

    # Which of the two is called, and whether one calls the other, differs between releases of aiohttp.
    async def write(self, writer: AbstractStreamWriter) -> None:
        self._tell()
        await super().write(writer)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._tell()
        await super().write_with_length(writer, content_length)

    def _tell(self) -> None:
        on_sent, self._on_sent = self._on_sent, None
        if on_sent is not None:
            on_sent()


async def _keep(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    # An event loop that is shut down closes the asynchronous generators that were started in it. This is the one chance
    # to close a session whose owner did not: once the loop is closed, nothing can be.
    try:
        yield
    finally:
        await session.close()


async def _abandon(session: aiohttp.ClientSession) -> None:
    """Let go of a session whose loop was closed without being shut down; only its bookkeeping can still be closed."""
    connector = session.connector
    session.detach()
    if connector is not None:
        await connector.close()


async def _read(response: aiohttp.ClientResponse, limit: int) -> HTTPReply | None:
    """Read the body; None if it is larger than `limit`, and then the connection is closed."""
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
    # Closing the response from a timer ends the read with an error, and, unlike a time-out around it, cannot swallow
    # a cancellation that comes at the same moment.
    timer = asyncio.get_running_loop().call_later(_ERROR_BODY_S, response.close)
    try:
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limit:
                response.close()
                break
    except (aiohttp.ClientError, OSError):
        # The status is what counts.
        pass
    finally:
        timer.cancel()
    return HTTPReply(response.status, response.headers, bytes(body[:limit]))


def _payload(body: bytes, on_sent: Callable[[], None]) -> _Body:
    if len(body) <= _LARGE_BODY_BYTES:
        return _Body(body, on_sent)
    with warnings.catch_warnings():
        # aiohttp warns of large bodies, and advises files, which it would read in a thread; ours are in memory.
        warnings.simplefilter("ignore", ResourceWarning)
        return _Body(body, on_sent)


def _errno(error: OSError) -> str:
    # The operating system's own words; aiohttp's text of the error would add its view of the TLS settings.
    reason = getattr(error, "os_error", error)
    return f" ({reason.strerror})" if isinstance(reason, OSError) and reason.strerror else ""


def _ssl_reason(error: aiohttp.ClientConnectorSSLError) -> str:
    return getattr(error.os_error, "reason", None) or type(error.os_error).__name__
