"""Transports for httpx and httpx2: a client keeps its code, and its model calls go through an engine.

    AsyncOpenAI(http_client=httpx2.AsyncClient(transport=QRewardTransport("judges.yaml")), api_key="any")

What a transport answers is that of `proxy`: replies as the sources sent them, and errors in the client's own form. The
SDKs of OpenAI (from 3 on) and Anthropic (from 2 on) use httpx2, other clients httpx. Both have the same classes, so one
transport serves both: it answers each request with the classes of the library that made it.

A client's own time limit (httpx's `read`) raises `ReadTimeout`, as without a transport. A stream that breaks off raises
`RemoteProtocolError`. Everything else is a reply with a status, whose header `x-should-retry: false` keeps SDKs from
asking again.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..config import Config, load_config
from ..engine import RewardEngine
from ..engine.portal import EnginePortal
from ..engine.process_portals import process_portal
from ..errors import ConfigurationError, EngineError, Mistake, ReplyBroken
from ..sources.passed_requests import RawReply
from .formats import client_format
from .proxy import ClientRequest, Pieces, Proxy, refusal

if TYPE_CHECKING:
    import httpx
    import httpx2
    from omegaconf import DictConfig

    class _AsyncTransport(httpx.AsyncBaseTransport, httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any: ...

    class _Transport(httpx.BaseTransport, httpx2.BaseTransport):
        def handle_request(self, request: Any) -> Any: ...

else:
    # Either of them is enough.
    _LIBRARIES = [importlib.import_module(name) for name in ("httpx", "httpx2") if find_spec(name)]
    if not _LIBRARIES:
        problem = 'a transport needs httpx or httpx2: pip install "qreward-plugins[httpx]"'
        raise ModuleNotFoundError(problem, name="httpx")
    _AsyncTransport = type("_AsyncTransport", tuple(each.AsyncBaseTransport for each in _LIBRARIES), {})
    _Transport = type("_Transport", tuple(each.BaseTransport for each in _LIBRARIES), {})


class QRewardTransport(_AsyncTransport):
    """An asynchronous transport for clients of httpx and httpx2, in asyncio.

    Args:
        engine: a path to a YAML file, the same tree as a mapping or DictConfig, or a `Config`: the transport makes an
            engine, and closes it with its client. Or a `RewardEngine`, which its caller closes.

    Raises what `RewardEngine` raises, and `ModuleNotFoundError` if neither httpx nor httpx2 is installed. An engine
    serves one event loop at a time, and so does a transport.
    """

    def __init__(self, engine: str | PathLike[str] | Mapping[str, Any] | DictConfig | Config | RewardEngine) -> None:
        self._own = None if isinstance(engine, RewardEngine) else RewardEngine(_loaded(engine))
        self.engine: RewardEngine = engine if self._own is None else self._own  # type: ignore[assignment]
        """The engine, for its statistics."""
        self._proxy = Proxy(self.engine)

    async def handle_async_request(self, request: Any) -> Any:
        """Answer a request of a client. Cancelling it ends its attempts."""
        exchange = _Exchange(request, await request.aread())
        try:
            return exchange.response(await self._proxy.answer(exchange.incoming), exchange.stream)
        except TimeoutError as error:
            raise exchange.failure(error) from None

    async def aclose(self) -> None:
        """Close the engine, if the transport has made it. Idempotent."""
        if self._own is not None:
            await self._own.aclose()


class QRewardSyncTransport(_Transport):
    """A transport for the synchronous clients of httpx and httpx2; any number of threads may use it.

    Args:
        engine: a path to a YAML file, the same tree as a mapping or DictConfig, or a `Config`: the first request opens
            the engine of this process for it (`process_portal`), which ends with the process. Or the `EnginePortal` of
            an engine, which its caller closes.

    Raises what `RewardEngine` raises, and `ModuleNotFoundError` if neither httpx nor httpx2 is installed.
    """

    def __init__(self, engine: str | PathLike[str] | Mapping[str, Any] | DictConfig | Config | EnginePortal) -> None:
        if isinstance(engine, RewardEngine):
            raise TypeError("a synchronous transport takes the portal of an engine: RewardEngine.portal()")
        self._given = engine if isinstance(engine, EnginePortal) else _loaded(engine)
        self._proxy: Proxy | None = None

    def handle_request(self, request: Any) -> Any:
        """Answer a request of a client. Blocks the calling thread."""
        exchange = _Exchange(request, request.read())

        async def answer(engine: RewardEngine) -> RawReply | Pieces:
            if self._proxy is None or self._proxy.engine is not engine:
                self._proxy = Proxy(engine)
            return await self._proxy.answer(exchange.incoming)

        try:
            # A process that is forked from the one that made the client has an engine of its own.
            portal = self._given if isinstance(self._given, EnginePortal) else process_portal(self._given)
            return exchange.response(portal.run(answer), lambda pieces: exchange.sync_stream(pieces, portal))
        except EngineError as error:
            return exchange.closed(error)
        except TimeoutError as error:
            raise exchange.failure(error) from None


def _loaded(config: str | PathLike[str] | Mapping[str, Any] | DictConfig | Config) -> Config:
    loaded = load_config(config)
    if loaded.engine.server is not None:
        url = loaded.engine.server.url.rstrip("/")
        problem = f"the sources are those of the reward server at {url}."
        remedy = f"Clients need no transport for it: their base URL is {url}/v1."
        raise ConfigurationError([Mistake("engine.server", problem, remedy)])
    return loaded


class _Exchange:
    """One request of a client, and the responses to it in the classes of the client's library."""

    def __init__(self, request: Any, body: bytes) -> None:
        self._request = request
        home = type(request).__module__.partition(".")[0]
        self._library: Any = importlib.import_module("httpx2" if home == "httpx2" else "httpx")
        timeouts = request.extensions.get("timeout")
        read_timeout_s = timeouts.get("read") if isinstance(timeouts, Mapping) else None
        # `raw_path` keeps what is quoted, such as a slash in the name of a model.
        path: str = request.url.raw_path.partition(b"?")[0].decode("ascii", "replace")
        self.incoming = ClientRequest(request.method, path, request.headers, body, read_timeout_s)

    def response(self, reply: RawReply | Pieces, stream: Callable[[Pieces], Any]) -> Any:
        """Return the response with a reply. `stream` makes the library's stream of pieces."""
        head, body = (
            (reply, {"content": reply.body}) if isinstance(reply, RawReply) else (reply.head, {"stream": stream(reply)})
        )
        return self._library.Response(head.status, headers=dict(head.headers), request=self._request, **body)

    def closed(self, why: EngineError) -> Any:
        """Return the response to a request that a closed engine cannot answer."""
        form = client_format(self.incoming.path, self.incoming.headers)
        return self.response(refusal(form, 503, str(why), cause="infra", reason="closed"), self.stream)

    def stream(self, pieces: Pieces) -> Any:
        """Return the pieces as an asynchronous stream of the library."""
        failure = self.failure

        class Stream(self._library.AsyncByteStream):  # type: ignore[misc, name-defined]
            async def __aiter__(self) -> AsyncIterator[bytes]:
                try:
                    async for piece in pieces:
                        yield piece
                except (TimeoutError, ReplyBroken) as error:
                    raise failure(error) from None

            async def aclose(self) -> None:
                await pieces.aclose()

        return Stream()

    def sync_stream(self, pieces: Pieces, portal: EnginePortal) -> Any:
        """Return the pieces as a synchronous stream of the library."""
        failure = self.failure

        async def take(_: RewardEngine) -> bytes | None:
            return await anext(pieces, None)

        class Stream(self._library.SyncByteStream):  # type: ignore[misc, name-defined]
            def __iter__(self) -> Iterator[bytes]:
                try:
                    while (piece := portal.run(take)) is not None:
                        yield piece
                except (TimeoutError, ReplyBroken, EngineError) as error:
                    raise failure(error) from None

            def close(self) -> None:
                with suppress(EngineError):  # the engine is closed, and with it the call
                    portal.run(lambda _: pieces.aclose())

        return Stream()

    def failure(self, error: Exception) -> Any:
        """Return the library's error for a reply that does not come in time, or not whole."""
        if isinstance(error, TimeoutError):
            message = f"nothing came within the {self.incoming.read_timeout_s:g} s that the client waits"
            return self._library.ReadTimeout(message, request=self._request)
        return self._library.RemoteProtocolError(str(error), request=self._request)
