"""The paths of the server that answer clients of language models, over the engine's sources.

`server.model_calls` says what a reply is. A client sends the server's token as its API key, in the header of its
own format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import anyio
from aiohttp import web

from ..errors import ReplyBroken
from .model_calls import ClientReply, ClientRequest, Proxy, refusal
from .model_calls.formats import FORMATS, client_format, format_of

if TYPE_CHECKING:
    from ..engine import RewardEngine

PREFIXES = ("/v1/", "/v1beta/")
"""How the paths of the proxy begin."""
KEY_HEADERS = ("x-api-key", "x-goog-api-key")
"""Headers in which clients of Anthropic and Gemini send their key."""
READ_WITHIN_S = 60.0
"""Most seconds in which a caller reads a piece of a stream. Then its connection is broken, and its place is free."""
_RETRIED = (429, 503)
"""Statuses after which a client may ask this server again, if a reply says when."""

Admission = Callable[[], AbstractContextManager[None]]


class ProxyPaths:
    """Answers the paths of the proxy. `admission` counts a call while it is under way, or raises a refusal."""

    def __init__(self, engine: RewardEngine, admission: Admission) -> None:
        self._proxy = Proxy(engine)
        self._admission = admission

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the paths to a server."""
        for form in FORMATS:
            if "MODEL" not in form.path:
                router.add_post(f"/v1{form.path}", self._answer)
        # The name of a model may have slashes; the proxy refuses what is no path of it.
        router.add_route("*", "/{version:v1|v1beta}/{path:.*}", self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        path = request.rel_url.raw_path
        incoming = ClientRequest(request.method, path, request.headers, body)
        if format_of(path) is None:
            return whole(await self._proxy.answer(incoming))
        with self._admission():
            reply = await self._proxy.answer(incoming)
            if reply.pieces is None:
                return whole(reply)
            return await self._stream(request, reply)

    @staticmethod
    async def _stream(request: web.Request, reply: ClientReply) -> web.StreamResponse:
        assert reply.pieces is not None
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        try:
            await response.prepare(request)
            async for piece in reply.pieces:
                await written(request, response, piece)
            await written(request, response, None)
        except (ReplyBroken, ConnectionError):
            # Closed without the end of the body, the connection tells the client that the reply is not whole.
            response.force_close()
            if request.transport is not None:
                request.transport.close()
        finally:
            await asyncio.shield(reply.pieces.aclose())
        return response


async def written(request: web.Request, response: web.StreamResponse, piece: bytes | None) -> None:
    """Write a piece of a stream, or its end (None). Raises `ConnectionError` if the caller has gone, or does not read
    it within `READ_WITHIN_S`; its connection is broken then.
    """
    try:
        with anyio.fail_after(READ_WITHIN_S):
            await (response.write_eof() if piece is None else response.write(piece))
    except TimeoutError:
        if request.transport is not None:
            # Closing would wait until the caller has read what is buffered.
            request.transport.abort()
        raise ConnectionAbortedError("the caller does not read") from None


def whole(reply: ClientReply) -> web.Response:
    """Return a reply that is no stream."""
    return web.Response(body=reply.body, status=reply.status, headers=reply.headers)


def in_form(
    request: web.Request, status: int, reason: str, detail: str, retry_after: str | None = None
) -> web.Response:
    """Return an error of the server in the form of a client. With `retry_after`, its SDK asks again by itself."""
    again = retry_after is not None and status in _RETRIED
    headers = {"retry-after": retry_after or ""} if again else {"x-should-retry": "false"}
    cause = "infra" if status >= 500 or status == 429 else "policy"
    form = client_format(request.path, request.headers)
    return whole(refusal(form, status, detail, reason=reason, cause=cause, headers=headers))
