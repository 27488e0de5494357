"""Plays the faults of HTTP replies and connections.

An HTTP library prevents most of these. So they write to the transport, and return a `Written`, which makes aiohttp send
nothing. A reset is a real one (RST, by SO_LINGER 0), not a normal end of the stream.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from functools import lru_cache
from typing import Protocol as Interface

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from .faults import FaultKind, Faults
from .protocols import PROTOCOLS, Protocol

_JSON = "application/json"
_HTML = b"<!DOCTYPE html><html><head><title>Please wait</title></head><body><h1>One moment, please</h1></body></html>"
_CHUNK_BYTES = 256 * 1024
_HUGE_HEADER_CHARS = 1024 * 1024
_HUGE_RETRY_AFTER_S = 3 * 365 * 24 * 3600
_NESTING = 100_000
_CHAT = PROTOCOLS["openai"]


class ReplyForms(Interface):
    """The body of a good reply, and its faulty variants."""

    @property
    def good(self) -> bytes: ...

    @property
    def cuttable(self) -> bytes:
        """A good body of which no prefix is a valid reply."""
        ...

    @property
    def without_verdict(self) -> bytes: ...

    @property
    def of_another_model(self) -> bytes: ...

    @property
    def invalid_utf8(self) -> bytes: ...

    @property
    def around_filler(self) -> tuple[bytes, bytes]:
        """The start and the end of a huge reply, around its filler."""
        ...


@dataclass(frozen=True)
class FaultInput:
    """The input of a fault: the request, the reply (None for faults without an answer), and the settings."""

    request: web.BaseRequest
    forms: ReplyForms | None
    headers: Mapping[str, str]
    faults: Faults
    protocol: Protocol = _CHAT

    @property
    def reply(self) -> ReplyForms:
        assert self.forms is not None, "a fault of the stage `reply` has an answer"
        return self.forms

    @property
    def body(self) -> bytes:
        return self.reply.good

    @property
    def transport(self) -> asyncio.Transport:
        """The connection. Raises `ConnectionResetError` if the client has disconnected."""
        transport = self.request.transport
        if not isinstance(transport, asyncio.Transport) or transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        return transport


class Written(web.StreamResponse):
    """A reply that was written already, or that has no bytes (`status` 0). The connection ends with it."""

    def __init__(self, status: int) -> None:
        super().__init__(status=status or 200)
        self.sent_status = status
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


async def play(kind: FaultKind, reply: FaultInput) -> web.StreamResponse:
    """Play this fault, and return the response for aiohttp to send, or a `Written`.

    Cancelled when the client disconnects or the server stops. Raises `ConnectionError` if the client has disconnected.
    """
    if kind in _PLAYERS:
        return await _PLAYERS[kind](reply)
    return _error(kind, reply)


def sent_status(response: web.StreamResponse) -> int:
    """The status that the client saw; 0 for none."""
    return response.sent_status if isinstance(response, Written) else response.status


def _error(kind: FaultKind, reply: FaultInput) -> web.StreamResponse:
    status = int(kind.value.split("_")[1])
    headers: dict[str, str] = {}  # without the announced limits: some kinds must not say when to retry
    after_s = reply.faults.retry_after_s
    retry_s = None
    if kind in (FaultKind.ERROR_429_SECONDS, FaultKind.ERROR_503_SECONDS):
        headers["Retry-After"] = str(after_s)
    elif kind is FaultKind.ERROR_429_DATE:
        # An HTTP date is wall-clock time by definition.
        when = datetime.now(timezone.utc) + timedelta(seconds=after_s)
        headers["Retry-After"] = format_datetime(when, usegmt=True)
    elif kind is FaultKind.ERROR_429_HUGE:
        headers["Retry-After"] = str(_HUGE_RETRY_AFTER_S)
    elif kind is FaultKind.ERROR_429_NEGATIVE:
        headers["Retry-After"] = "-5"
    elif kind is FaultKind.ERROR_429_RESET:
        headers |= reply.protocol.announce("requests", None, 0, after_s)
        retry_s = float(after_s)
    if kind in (FaultKind.ERROR_502, FaultKind.ERROR_504):
        return web.Response(status=status, body=_HTML, content_type="text/html", headers=headers)
    body = orjson.dumps(reply.protocol.error(status, f"injected fault {kind.value}", kind.value, retry_s))
    return web.Response(status=status, body=body, content_type=_JSON, headers=headers)


async def _redirect(reply: FaultInput) -> web.StreamResponse:
    return web.Response(status=307, headers={**reply.headers, "Location": reply.faults.redirect_to})


async def _redirect_loop(reply: FaultInput) -> web.StreamResponse:
    return web.Response(status=307, headers={**reply.headers, "Location": reply.request.path})


def _reset_now(transport: asyncio.Transport) -> None:
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def _reset(reply: FaultInput) -> web.StreamResponse:
    _reset_now(reply.transport)
    return Written(0)


async def _close(reply: FaultInput) -> web.StreamResponse:
    reply.transport.close()
    return Written(0)


async def _hang(reply: FaultInput) -> web.StreamResponse:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("a hang ends only by cancellation")


def _head(length: int, *, content_type: str = _JSON, extra: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{extra}Content-Length: {length}\r\n\r\n".encode("ascii")


async def _drip(reply: FaultInput, data: bytes) -> None:
    for position in range(len(data)):
        reply.transport.write(data[position : position + 1])
        await asyncio.sleep(reply.faults.drip_interval_s)


async def _slow_headers(reply: FaultInput) -> web.StreamResponse:
    body = reply.body
    await _drip(reply, _head(len(body)))
    reply.transport.write(body)
    return Written(200)


async def _slow_body(reply: FaultInput) -> web.StreamResponse:
    body = reply.body
    reply.transport.write(_head(len(body)))
    await _drip(reply, body)
    return Written(200)


async def _mid_body_reset(reply: FaultInput) -> web.StreamResponse:
    body = reply.reply.cuttable
    transport = reply.transport
    transport.write(_head(len(body)) + body[: len(body) // 2])
    _reset_now(transport)
    return Written(200)


async def _truncated_body(reply: FaultInput) -> web.StreamResponse:
    body = reply.body
    reply.transport.write(_head(len(body) + 64) + body)
    return Written(200)


async def _short_length(reply: FaultInput) -> web.StreamResponse:
    body = reply.reply.cuttable
    reply.transport.write(_head(len(body) // 2) + body)
    return Written(200)


async def _bad_chunk(reply: FaultInput) -> web.StreamResponse:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {_JSON}\r\nTransfer-Encoding: chunked\r\n\r\n".encode("ascii")
    reply.transport.write(head + b"forty-two\r\n" + reply.body + b"\r\n0\r\n\r\n")
    return Written(200)


async def _close_after(reply: FaultInput) -> web.StreamResponse:
    body = reply.body
    reply.transport.write(_head(len(body), extra="Connection: keep-alive\r\n") + body)
    return Written(200)


async def _huge_header(reply: FaultInput) -> web.StreamResponse:
    body = reply.body
    reply.transport.write(_head(len(body), extra=f"x-filler: {'x' * _HUGE_HEADER_CHARS}\r\n") + body)
    return Written(200)


async def _huge_body(reply: FaultInput) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": _JSON})
    await response.prepare(reply.request)
    for chunk in _huge_json(reply.faults.huge_bytes, *reply.reply.around_filler):
        await response.write(chunk)
    await response.write_eof()
    return response


async def _gzip_bomb(reply: FaultInput) -> web.StreamResponse:
    body = _bomb(reply.faults.huge_bytes, *reply.reply.around_filler)
    return web.Response(body=body, content_type=_JSON, headers={**reply.headers, "Content-Encoding": "gzip"})


async def _bad_gzip(reply: FaultInput) -> web.StreamResponse:
    headers = {**reply.headers, "Content-Encoding": "gzip"}
    return web.Response(body=b"\x1f\x8bnot gzip at all", content_type=_JSON, headers=headers)


def _huge_json(size: int, head: bytes, tail: bytes) -> Iterator[bytes]:
    """A reply of `size` bytes (or slightly more), in chunks."""
    yield head
    for start in range(0, size - len(head) - len(tail), _CHUNK_BYTES):
        yield b"a" * min(_CHUNK_BYTES, size - len(head) - len(tail) - start)
    yield tail


@lru_cache(maxsize=4)
def _bomb(size: int, head: bytes, tail: bytes) -> bytes:
    compressor = zlib.compressobj(1, wbits=31)
    return b"".join([*map(compressor.compress, _huge_json(size, head, tail)), compressor.flush()])


def _with_body(body: bytes, content_type: str = _JSON) -> Callable[[FaultInput], Awaitable[web.StreamResponse]]:
    async def player(reply: FaultInput) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type, headers=reply.headers)

    return player


async def _error_in_200(reply: FaultInput) -> web.StreamResponse:
    body = orjson.dumps(reply.protocol.error(500, "injected fault error_in_200", "error_in_200"))
    return web.Response(body=body, content_type=_JSON, headers=reply.headers)


async def _no_choices(reply: FaultInput) -> web.StreamResponse:
    return web.Response(body=reply.reply.without_verdict, content_type=_JSON, headers=reply.headers)


async def _wrong_model(reply: FaultInput) -> web.StreamResponse:
    return web.Response(body=reply.reply.of_another_model, content_type=_JSON, headers=reply.headers)


async def _truncated_json(reply: FaultInput) -> web.StreamResponse:
    body = reply.reply.cuttable
    return web.Response(body=body[: len(body) // 2], content_type=_JSON, headers=reply.headers)


async def _invalid_utf8(reply: FaultInput) -> web.StreamResponse:
    return web.Response(body=reply.reply.invalid_utf8, content_type=_JSON, headers=reply.headers)


async def _no_content(reply: FaultInput) -> web.StreamResponse:
    return web.Response(status=204, headers=reply.headers)


_PLAYERS: Mapping[FaultKind, Callable[[FaultInput], Awaitable[web.StreamResponse]]] = {
    FaultKind.REDIRECT: _redirect,
    FaultKind.REDIRECT_LOOP: _redirect_loop,
    FaultKind.RESET: _reset,
    FaultKind.CLOSE: _close,
    FaultKind.HANG: _hang,
    FaultKind.SLOW_HEADERS: _slow_headers,
    FaultKind.SLOW_BODY: _slow_body,
    FaultKind.MID_BODY_RESET: _mid_body_reset,
    FaultKind.TRUNCATED_BODY: _truncated_body,
    FaultKind.SHORT_LENGTH: _short_length,
    FaultKind.BAD_CHUNK: _bad_chunk,
    FaultKind.CLOSE_AFTER: _close_after,
    FaultKind.TRUNCATED_JSON: _truncated_json,
    FaultKind.HTML: _with_body(_HTML, "text/html"),
    FaultKind.EMPTY: _with_body(b""),
    FaultKind.NO_CONTENT: _no_content,
    FaultKind.INVALID_UTF8: _invalid_utf8,
    FaultKind.WRONG_JSON_TYPE: _with_body(b'["this", "is", "a", "list"]'),
    FaultKind.DEEP_NESTING: _with_body(b"[" * _NESTING + b"]" * _NESTING),
    FaultKind.NO_CHOICES: _no_choices,
    FaultKind.ERROR_IN_200: _error_in_200,
    FaultKind.WRONG_MODEL: _wrong_model,
    FaultKind.HUGE_BODY: _huge_body,
    FaultKind.HUGE_HEADER: _huge_header,
    FaultKind.BAD_GZIP: _bad_gzip,
    FaultKind.GZIP_BOMB: _gzip_bomb,
}
