"""Posts requests with bare aiohttp, the default client.

A request costs 0.2 ms of processor time (measured for this project; httpx over aiohttp's transport: 0.5 ms). Its
connection pool frees every slot when requests are cancelled; httpx's pool does not, and a scheduler that hedges cancels
often. And it can report when a request is written, which is when a server's limit counts it.
"""

from __future__ import annotations

import asyncio
import ssl
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from ..errors import SourceError, SourceUnusable, TransientError
from .http import KEEP_ALIVE_S, HTTPClient, os_reason
from .http_reading import HTTPReply, Incoming, Reading, Timer

_DNS_CACHE_S = 30
_LARGE_BODY_BYTES = 2**20


class AiohttpClient(HTTPClient[aiohttp.ClientSession]):
    """An `HTTPClient` over aiohttp."""

    def _open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=_Connector(
                # The scheduler limits concurrency. A second limit here would queue requests unseen.
                limit=0,
                keepalive_timeout=KEEP_ALIVE_S,
                ttl_dns_cache=_DNS_CACHE_S,
                ssl=self._connecting.verify_tls,
            ),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connecting.connect_s),
            trust_env=False,
        )

    def _is_closed(self, session: aiohttp.ClientSession) -> bool:
        return session.closed

    async def _close_session(self, session: aiohttp.ClientSession) -> None:
        await session.close()

    async def _abandon_session(self, session: aiohttp.ClientSession) -> None:
        connector = session.connector
        session.detach()
        if connector is not None:
            await connector.close()

    async def _exchange(
        self, url: URL, body: bytes, on_sent: Callable[[], None], reading: Reading, headers: Mapping[str, str] | None
    ) -> HTTPReply | SourceError:
        loop = asyncio.get_running_loop()

        def sent() -> None:
            reading.sent_at = loop.time()
            on_sent()

        try:
            session = self._open(loop) or await self._session()
            async with session.post(
                url,
                data=_payload(body, sent if reading.streams else on_sent),
                headers=headers,
                proxy=self._connecting.proxies.get(url),
                allow_redirects=False,
            ) as response:
                return await reading.read(_Incoming(response))
        except Exception as error:
            return self._failure(error, reading.where)

    def _failure(self, error: Exception, where: str) -> SourceError:
        if isinstance(error, (ssl.SSLCertVerificationError, aiohttp.ClientConnectorCertificateError)):
            return self._untrusted(where, getattr(error, "certificate_error", error))
        if isinstance(error, aiohttp.ClientHttpProxyError):
            kind = SourceUnusable if error.status == 407 else TransientError
            return kind(f"{where}: the proxy answered {error.status} to CONNECT", status=error.status)
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return TransientError(f"{where}: could not connect within {self._connecting.connect_s:g} s")
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return TransientError(f"{where}: the name {self.redactor.of(error.host)!r} could not be resolved")
        if isinstance(error, aiohttp.ClientProxyConnectionError):
            return TransientError(f"{where}: could not connect to the proxy{_reason(error)}")
        if isinstance(error, aiohttp.ClientConnectorSSLError):
            return self._no_handshake(where, error.os_error)
        if isinstance(error, aiohttp.ClientConnectorError):
            return TransientError(f"{where}: could not connect{_reason(error)}")
        if isinstance(error, aiohttp.ServerDisconnectedError):
            return TransientError(f"{where}: the server closed the connection without an answer")
        if isinstance(error, aiohttp.ClientPayloadError):
            return TransientError(f"{where}: the body of the reply broke off or could not be decoded")
        if isinstance(error, aiohttp.ClientResponseError):
            return TransientError(f"{where}: the reply is not valid HTTP ({self.redactor.of(error.message)})")
        if isinstance(error, OSError):
            return TransientError(f"{where}: the connection failed{_reason(error)}")
        if isinstance(error, aiohttp.ClientConnectionError):
            return TransientError(f"{where}: the connection was lost")
        # Of any other error (ValueError of a parser, zlib.error, RuntimeError of a closed session) only the type is
        # shown, because its text may hold secrets.
        return TransientError(f"{where}: the request failed with {type(error).__name__}")


class _Connector(aiohttp.TCPConnector):
    """Closes an idle connection on which a server has sent something. aiohttp would take it for the reply to the next
    request, which asks about another sample.
    """

    async def _get(self, key: Any, traces: Any) -> Any:
        while True:
            connection = await super()._get(key, traces)
            if connection is None or connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()


class _Incoming(Incoming):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self._response = response

    def chunks(self) -> AsyncIterator[bytes]:
        return self._response.content.iter_any()

    async def body(self, limit: int) -> bytes | None:
        content = self._response.content
        first = await content.readany()
        if content.at_eof():  # mostly the whole body has come with the headers
            return first if len(first) <= limit else None
        body = bytearray(first)
        while len(body) <= limit and not content.at_eof():
            body += await content.readany()
        return bytes(body) if len(body) <= limit else None

    def within(self, seconds: float | None) -> AbstractContextManager[Timer]:
        return _within(self._response, seconds)

    def abort(self) -> None:
        self._response.close()


@contextmanager
def _within(response: aiohttp.ClientResponse, seconds: float | None) -> Iterator[_Timer]:
    timer = _Timer(response)
    timer.restart(seconds)
    try:
        yield timer
    except Exception:
        if not timer.expired:
            raise
    finally:
        timer.restart(None)


class _Timer:
    """Closes the response when its time is up, which ends the reading with an error. A time-out around the read could
    swallow a cancellation that arrives at the same moment.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
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
        self._response.close()


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
