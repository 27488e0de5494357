"""Posts one request over HTTP, and returns a reply with a bounded body or one error of this package.

`HTTPClient` holds what does not depend on the library: sessions by event loop, limits on sizes, streams, proxies of the
environment, redaction. `aiohttp_client` and `httpx_client` make the connections.

A client follows no redirects and keeps no cookies, because these could carry the key or a session to another server. It
does not read `~/.netrc`, which could add credentials that are not configured. The libraries' `trust_env` would read it,
so this module reads the proxies of `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` itself. Retries and time limits are the
scheduler's; only connecting and the silence of a stream have time limits here.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import orjson
from yarl import URL

from ..errors import SourceError, SourceUnusable, TransientError
from .redactor import Redactor
from .stream_passing import StreamPassing
from .streams import MEDIA_TYPE, EventParser, StreamBroken, StreamReader

KEEP_ALIVE_S = 4.0
"""Seconds for which an idle connection is kept. uvicorn, and with it vLLM and SGLang, closes one after 5 s. The client
closes it earlier, so that it never writes a request to a connection that the server is closing."""
NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""Reasons of OpenSSL for an answer that is not TLS."""
NO_SECRETS = frozenset(
    {"accept", "accept-encoding", "accept-language", "content-type", "http-referer", "referer", "user-agent", "x-title"}
)
"""Headers with common values. They are not redacted, because that would also remove these words from rationales."""
# The body of an error only explains it. The status counts even if the body is endless or never arrives.
_ERROR_BODY_BYTES = 65_536
_ERROR_BODY_S = 5.0
# A token in an event of its own takes 100 to 300 bytes, so a stream is much larger than the reply that it carries.
_STREAM_FACTOR = 64
# A server that closes a stream properly does so at once after its last event. Then the connection is used again.
_STREAM_END_S = 0.5
_STREAM_END_BYTES = 4096
# A judge that is done ends its stream right after its verdict; ending the stream here would cost the connection.
_GRACE_S = 0.1
# Characters in which an answer is looked for, in all looks at one stream. It takes about 20 ms.
_MOST_LOOKED_AT = 2**24

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What only a stream tells. `first_token_s`: seconds from sending the request to the first token; None without any.
    `tokens`: events with a part of the answer. `cut`: the client ended the stream, because the answer was complete.
    """

    first_token_s: float | None
    tokens: int
    cut: bool


# Not frozen: it is made for every call, and a frozen one takes three times as long.
@dataclass(slots=True)
class HTTPReply:
    """The status, headers and body of a reply. The body of an error may be truncated. `headers` ignore case.

    If it was streamed, the body is the one that the server would have sent without streaming, and `stream` is set. The
    repr leaves out headers and body, because tracebacks may be printed with their variables.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    stream: StreamFacts | None = None


@dataclass(slots=True)
class Streaming:
    """How a streamed reply is read. `idle_s`: most seconds between two events; None: any number. `complete` is
    that of the request, and so is `on_text`. `thoughts_first`: the model thinks, and some servers leave its thoughts in
    the answer.
    """

    reader: StreamReader
    idle_s: float | None = None
    complete: Callable[[str], int] | None = None
    thoughts_first: bool = False
    on_text: Callable[[str], None] | None = None
    _left: int = _MOST_LOOKED_AT

    def may_end(self, reader: StreamReader) -> bool:
        """Whether the stream may end before its server ends it. A text that may be thoughts is read to its end: a
        verdict in thoughts is a draft.
        """
        return self.complete is not None and self._left > 0 and (bool(reader.thoughts) or not self.thoughts_first)

    def length_of(self, text: str) -> int:
        """Return how many characters of `text` are a whole answer; 0 for none."""
        # Each look takes time in proportion to the text, so a long text in small pieces would take quadratic time.
        self._left -= len(text)
        return 0 if self.complete is None else self.complete(text)


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


class Timer(Protocol):
    """A time limit on reading. `expired` is set when it ended the reading."""

    @property
    def expired(self) -> bool: ...

    def restart(self, seconds: float | None) -> None:
        """Set the limit to `seconds` from now; None: no limit."""


class Incoming(ABC):
    """A reply whose body has not been read yet."""

    status: int
    headers: Mapping[str, str]

    @abstractmethod
    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body, decompressed, in pieces of bounded size."""

    @abstractmethod
    def within(self, seconds: float | None) -> AbstractContextManager[Timer]:
        """End the reading inside of the `with` block after `seconds`, without an error."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection, because the rest of the body is not wanted."""


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
        self._redactor = Redactor([*sent, *passwords, *connecting.secrets])
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[S, AsyncGenerator[None, None]]] = {}
        self._closed = False

    @property
    def redactor(self) -> Redactor:
        """Redacts all secrets that this client sends."""
        return self._redactor

    async def post(
        self,
        url: URL,
        body: bytes,
        *,
        on_sent: Callable[[], None],
        max_reply_bytes: int,
        streaming: Streaming | StreamPassing | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HTTPReply:
        """Post `body` and read the reply, at most `max_reply_bytes` of it after decompression.

        Calls `on_sent` once, when the request is written. Cancelling closes the connection. With `streaming`, a reply
        of server-sent events is read as they come; `max_reply_bytes` then bounds each event and the text. `headers` are
        sent beside those of the client.

        Raises SourceUnusable if another try cannot help: the certificate does not verify, the proxy wants a password,
        or the client is closed. Raises TransientError for every other failure, from name resolution to a broken body.
        """
        if self._closed:
            raise SourceUnusable(f"source {self._name!r} is closed", certain=True)
        reading = Reading(self._name, url, max_reply_bytes, streaming)
        outcome = await self._exchange(url, body, on_sent, reading, headers or {})
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
        self, url: URL, body: bytes, on_sent: Callable[[], None], reading: Reading, headers: Mapping[str, str]
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

    def _is_closed(self, session: S) -> bool:
        return False

    async def aclose(self) -> None:
        """Close the sessions. Idempotent; requests in flight fail."""
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
        session, _ = self._sessions.get(loop, (None, None))
        if session is None or self._is_closed(session):
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"


class Reading:
    """Reads the reply of one request, within its limits."""

    __slots__ = ("_streaming", "limit", "sent_at", "where")

    def __init__(self, name: str, url: URL, limit: int, streaming: Streaming | StreamPassing | None) -> None:
        self.where = f"source {name!r} ({url})"
        self.sent_at = 0.0
        """Time at which the request was written, on the event loop's clock."""
        self.limit = limit
        self._streaming = streaming

    async def read(self, incoming: Incoming) -> HTTPReply | SourceError:
        """Read the body. What the library raises passes through."""
        if not 200 <= incoming.status < 300:
            return await self._error(incoming)
        media_type = incoming.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if self._streaming is not None and media_type == MEDIA_TYPE:
            if isinstance(self._streaming, StreamPassing):
                return await self._pass_on(incoming, self._streaming)
            return await self._stream(incoming, self._streaming)
        body = bytearray()
        async for chunk in incoming.chunks():
            body += chunk
            if len(body) > self.limit:
                incoming.abort()
                message = f"{self.where}: reply larger than {self.limit:,} bytes"
                return TransientError(message, status=incoming.status)
        return HTTPReply(incoming.status, incoming.headers, bytes(body))

    async def _error(self, incoming: Incoming) -> HTTPReply:
        limit = min(self.limit, _ERROR_BODY_BYTES)
        body = bytearray()
        try:
            with incoming.within(_ERROR_BODY_S):
                async for chunk in incoming.chunks():
                    body += chunk
                    if len(body) > limit:
                        incoming.abort()
                        break
        except Exception:  # the libraries raise many kinds; the status is known, and the body is only an explanation
            pass
        return HTTPReply(incoming.status, incoming.headers, bytes(body[:limit]))

    async def _stream(self, incoming: Incoming, streaming: Streaming) -> HTTPReply | SourceError:
        reader, parser, loop = streaming.reader, EventParser(self.limit), asyncio.get_running_loop()
        size, first_at, passed_on = 0, None, 0
        answer: str | None = None
        by_then: dict[str, Any] = {}
        over = False
        try:
            with incoming.within(None) as timer:
                async for chunk in incoming.chunks():
                    size += len(chunk)
                    if size > self.limit * _STREAM_FACTOR:
                        raise StreamBroken(f"more than {self.limit * _STREAM_FACTOR:,} bytes of events")
                    for event in parser.feed(chunk):
                        if event.keeps_alive:
                            continue
                        if answer is None:
                            timer.restart(streaming.idle_s)
                        before = len(reader.text)
                        reader.read(event)
                        if answer is None and len(reader.text) > before and streaming.may_end(reader):
                            length = streaming.length_of(reader.text)
                            if length:
                                answer, by_then = reader.text[:length], reader.body()
                                # Most servers end here, too. Then the connection is kept, and the usage is known.
                                timer.restart(_GRACE_S)
                        if reader.ended:
                            break
                    if len(reader.text) + len(reader.thoughts) > self.limit:
                        raise StreamBroken(f"a text larger than {self.limit:,} bytes")
                    if first_at is None and reader.tokens:
                        first_at = loop.time()
                    if streaming.on_text is not None and reader.error is None and len(reader.text) > passed_on:
                        streaming.on_text(reader.text[passed_on:])
                        passed_on = len(reader.text)
                    if reader.ended:
                        break
            over = timer.expired
            if answer is None and over:
                raise StreamBroken(f"no event within {streaming.idle_s:g} s")
            if answer is None and not reader.whole:
                raise StreamBroken("a stream that ended before the answer was whole")
        except Exception as error:
            incoming.abort()
            if answer is None and isinstance(error, StreamBroken):
                return TransientError(f"{self.where} answered with {error}", status=incoming.status)
            if answer is None:
                raise
            # The answer is complete, whatever follows it.
            over = True
        body = reader.body()
        cut = answer is not None and (over or not reader.whole or "error" in body)
        if answer is not None:
            # How much of what follows an answer is seen depends on the speed of the server, so none of it counts.
            body = reader.with_text(by_then, answer)
        if cut:
            incoming.abort()
        elif reader.ended:
            await self._drain(incoming)
        facts = StreamFacts(None if first_at is None else first_at - self.sent_at, reader.tokens, cut)
        return HTTPReply(incoming.status, incoming.headers, orjson.dumps(body), facts)

    async def _pass_on(self, incoming: Incoming, passing: StreamPassing) -> HTTPReply | SourceError:
        """Hand on the events of a stream as they come."""
        size, first_at = 0, None
        try:
            with incoming.within(None) as timer:
                passing.begin(incoming.status, incoming.headers, self.limit)
                async for chunk in incoming.chunks():
                    size += len(chunk)
                    if size > self.limit * _STREAM_FACTOR:
                        raise StreamBroken(f"more than {self.limit * _STREAM_FACTOR:,} bytes of events")
                    if passing.take(chunk):
                        timer.restart(passing.idle_s)
                    if first_at is None and passing.begun:
                        first_at = asyncio.get_running_loop().time()
                    if passing.ended:
                        break
                    if not passing.has_room:
                        timer.restart(None)
                        await passing.wait_for_room()
                        timer.restart(passing.idle_s)
            if timer.expired and not passing.ended:
                raise StreamBroken(f"no event within {passing.idle_s:g} s")
            passing.finish()
        except Exception as error:
            incoming.abort()
            if isinstance(error, StreamBroken):
                return TransientError(f"{self.where} answered with {error}", status=incoming.status)
            raise
        await self._drain(incoming)
        facts = StreamFacts(None if first_at is None else first_at - self.sent_at, passing.events, False)
        return HTTPReply(incoming.status, incoming.headers, orjson.dumps(passing.facts()), facts)

    async def _drain(self, incoming: Incoming) -> None:
        """Read to the end of a stream after its last event, so that its connection can be used again."""
        left = _STREAM_END_BYTES
        try:
            with incoming.within(_STREAM_END_S) as timer:
                async for chunk in incoming.chunks():
                    left -= len(chunk)
                    if left < 0:
                        break
        except Exception:  # the answer is whole, whatever follows
            return
        if left < 0 or timer.expired:
            incoming.abort()


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
