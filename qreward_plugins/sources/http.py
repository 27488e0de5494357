"""Posts one request over HTTP, and returns a reply with a bounded body or one error of this package.

`HTTPClient` holds what does not depend on the library: sessions by event loop, limits on sizes, streams, proxies of the
environment, redaction. `Reading` reads a reply within these limits. `aiohttp_client` and `httpx_client` make the
connections, and define the libraries' replies (`Incoming`).

A client follows no redirects and keeps no cookies, because these could carry the key or a session to another server. It
does not read `~/.netrc`, which could add credentials that are not configured. The libraries' `trust_env` would read it,
so this module reads the proxies of `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` itself. Retries and time limits are the
scheduler's; only connecting and the silence of a stream have time limits here.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
import orjson
from yarl import URL

from ..errors import SourceError, SourceUnusable, TransientError
from ..secrets import Redactor
from .streams import MEDIA_TYPE, EventSink, StreamBroken

KEEP_ALIVE_S = 4.0
"""Seconds for which an idle connection is kept. uvicorn, and with it vLLM and SGLang, closes one after 5 s. The client
closes it earlier, so that it never writes a request to a connection that the server is closing."""
NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""Reasons of OpenSSL for an answer that is not TLS."""
NO_SECRETS = frozenset(
    {"accept", "accept-encoding", "accept-language", "content-type", "http-referer", "referer", "user-agent", "x-title"}
)
"""Headers with common values. They are not redacted, because that would also remove these words from rationales."""

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

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Connecting:
    """What a client needs to connect. `headers` and `plain_headers` go with every request; the values of
    `plain_headers` are not secret. `secrets` are texts in the bodies that must not be shown. `connect_s` is seconds,
    with name resolution and TLS. `proxies` are by URL.
    """

    name: str
    headers: Mapping[str, str] = field(repr=False)
    plain_headers: Mapping[str, str] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)
    verify_tls: bool
    connect_s: float
    proxies: Mapping[URL, URL] = field(repr=False)


class HTTPClient(ABC, Generic[S]):
    """Posts JSON for one source, with one session per event loop.

    The first request in a loop opens a session. `aclose` closes it, or `asyncio.run` when it shuts the loop down, so
    that a later loop never uses connections of an earlier one.
    """

    def __init__(self, connecting: Connecting) -> None:
        self._name = connecting.name
        self._headers = {**connecting.plain_headers, **connecting.headers}
        self._connecting = connecting
        known = [proxy for proxy in connecting.proxies.values() if proxy.password]
        # The second form is that of the header of a proxy. The base64 of a short password alone would be too short.
        passwords = [text for proxy in known for text in (proxy.password or "", f"{proxy.user or ''}:{proxy.password}")]
        sent = [value for key, value in connecting.headers.items() if key.lower() not in NO_SECRETS]
        self.redactor = Redactor([*sent, *passwords, *connecting.secrets])
        """Redacts all secrets that this client sends."""
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[S, AsyncGenerator[None, None]]] = {}
        self._closed = False

    async def post(
        self,
        url: URL,
        body: bytes,
        *,
        on_sent: Callable[[], None],
        max_reply_bytes: int,
        streaming: EventSink | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HTTPReply:
        """Post `body` and read the reply, at most `max_reply_bytes` of it.

        Calls `on_sent` once, when the request is written. Cancelling closes the connection. With `streaming`, a reply
        of server-sent events is read as they come; `max_reply_bytes` then bounds each event and the text. `headers` are
        sent beside those of the client.

        Raises SourceUnusable if another try cannot help: the certificate does not verify, the proxy wants a password,
        or the client is closed. Raises TransientError for every other failure, from name resolution to a broken body.
        """
        if self._closed:
            raise SourceUnusable(f"source {self._name!r} is closed", certain=True)
        reading = Reading(self._name, url, max_reply_bytes, on_sent, streaming)
        outcome = await self._exchange(url, body, reading, headers)
        if isinstance(outcome, HTTPReply):
            return outcome
        try:
            # Raised here, the error has no `__context__` (an error of the library holds the request's headers), and no
            # frame of its traceback holds a part of the reply.
            raise outcome
        finally:
            # Breaks the reference cycle of error, traceback and frame, which would keep the prompt in memory.
            del outcome

    @abstractmethod
    async def _exchange(
        self, url: URL, body: bytes, reading: Reading, headers: Mapping[str, str] | None
    ) -> HTTPReply | SourceError:
        """Send the request, and read the reply with `reading`. Return errors instead of raising them."""

    @abstractmethod
    def _open_session(self) -> S:
        """Open a session in the running loop."""

    @abstractmethod
    async def _close_session(self, session: S) -> None:
        """Close a session in its own loop."""

    @abstractmethod
    async def _abandon_session(self, session: S) -> None:
        """Close what can be closed of a session whose loop was closed without being shut down."""

    async def aclose(self) -> None:
        """Close the sessions. Idempotent. The caller cancels its requests before: one in flight may wait for ever."""
        self._closed = True
        here = asyncio.get_running_loop()
        for loop, (session, keeper) in list(self._sessions.items()):
            del self._sessions[loop]
            if loop is here:
                await keeper.aclose()
            elif loop.is_closed():
                await self._abandon_session(session)
            else:
                asyncio.run_coroutine_threadsafe(keeper.aclose(), loop)

    async def _session(self) -> S:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop, (None, None))[0]
        if session is None:
            # The session is stored before the first await, so that concurrent requests share it.
            closed = [self._sessions.pop(other)[0] for other in list(self._sessions) if other.is_closed()]
            session = self._open_session()
            keeper = self._keep(session)
            self._sessions[loop] = (session, keeper)
            await keeper.__anext__()
            for abandoned in closed:
                await self._abandon_session(abandoned)
        return session

    async def _keep(self, session: S) -> AsyncGenerator[None, None]:
        # A loop that shuts down closes its asynchronous generators. So this generator closes a session that its owner
        # left open; once the loop is closed, it could not be closed any more.
        try:
            yield
        finally:
            await self._close_session(session)

    def _not_connected(self, where: str, why: str) -> TransientError:
        """The error for a server that takes no connection."""
        return TransientError(f"{where}: could not connect{why}; start the server there, or correct its URL")

    def _untrusted(self, where: str, error: BaseException) -> SourceUnusable:
        """The error for a certificate that does not verify."""
        reason = getattr(error, "verify_message", "") or str(error)
        return SourceUnusable(
            f"{where}: the server's certificate does not verify ({self.redactor.of(reason)}); fix the certificate, "
            "or set SSL_CERT_FILE to the certificate of the authority that signed it (verify_tls is on)"
        )

    def _no_handshake(self, where: str, error: BaseException) -> TransientError:
        """The error for a TLS handshake that failed."""
        reason = (getattr(error, "reason", None) if isinstance(error, ssl.SSLError) else None) or type(error).__name__
        hint = "; the server probably speaks http, not https" if reason in NOT_TLS else ""
        return TransientError(f"{where}: the TLS handshake failed ({self.redactor.of(reason)}){hint}")


def proxy_for(url: URL) -> URL | None:
    """Return the HTTP proxy that the environment sets for `url`, or None."""
    if url.host is None or urllib.request.proxy_bypass(url.host):
        return None
    named = urllib.request.getproxies().get(url.scheme)
    proxy = URL(named) if named else None
    return proxy if proxy is not None and proxy.scheme in ("http", "https") else None


def os_reason(error: BaseException) -> str:
    """Return the operating system's words for an error, in brackets; "" if there are none."""
    # The message of a library adds the address and the TLS settings.
    return f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""


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
