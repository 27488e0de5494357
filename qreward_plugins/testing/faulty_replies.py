"""Plays the faults of HTTP replies and connections.

An HTTP library prevents most of these. So they write to the transport, and return a `Written`, which makes aiohttp send
nothing. A reset is a real one (RST, by SO_LINGER 0), not a normal end of the stream.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from functools import lru_cache

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from .faults import FaultKind, Faults
from .judge_calls import Forms
from .protocols import PROTOCOLS, Protocol

_JSON = "application/json"
_HTML = b"<!DOCTYPE html><html><head><title>Please wait</title></head><body><h1>One moment, please</h1></body></html>"
_CHUNK_BYTES = 256 * 1024
_HUGE_HEADER_CHARS = 1024 * 1024
_HUGE_RETRY_AFTER_S = 3 * 365 * 24 * 3600
_NESTING = 100_000
_CHAT = PROTOCOLS["openai"]


@dataclass(frozen=True)
class FaultInput:
    """The input of a fault: the request, the reply (None for faults without an answer), and the settings."""

    request: web.BaseRequest
    forms: Forms | None
    headers: Mapping[str, str]
    faults: Faults
    protocol: Protocol = _CHAT

    @property
    def reply(self) -> Forms:
        assert self.forms is not None, "a fault of the stage `reply` has an answer"
        return self.forms

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
    if kind.stage == "status":
        return _status(kind, reply)
    if kind is FaultKind.HANG:
        await asyncio.get_running_loop().create_future()
    if kind in (FaultKind.RESET, FaultKind.CLOSE):
        _end(reply.transport, reset=kind is FaultKind.RESET)
        return Written(0)
    if kind in (FaultKind.SLOW_HEADERS, FaultKind.SLOW_BODY):
        await _drip(reply, headers=kind is FaultKind.SLOW_HEADERS)
        return Written(200)
    if kind in _RAW:
        reply.transport.write(_RAW[kind](reply.reply))
        if kind is FaultKind.MID_BODY_RESET:
            _end(reply.transport, reset=True)
        return Written(200)
    if kind is FaultKind.HUGE_BODY:
        return await _huge_body(reply)
    headers = dict(reply.headers)
    if kind in (FaultKind.BAD_GZIP, FaultKind.GZIP_BOMB):
        headers["Content-Encoding"] = "gzip"
    if kind is FaultKind.NO_CONTENT:
        return web.Response(status=204, headers=headers)
    content_type = "text/html" if kind is FaultKind.HTML else _JSON
    return web.Response(body=_BODIES[kind](reply), content_type=content_type, headers=headers)


def sent_status(response: web.StreamResponse) -> int:
    """The status that the client saw; 0 for none."""
    return response.sent_status if isinstance(response, Written) else response.status


def _status(kind: FaultKind, reply: FaultInput) -> web.StreamResponse:
    if kind in (FaultKind.REDIRECT, FaultKind.REDIRECT_LOOP):
        target = reply.faults.redirect_to if kind is FaultKind.REDIRECT else reply.request.path
        return web.Response(status=307, headers={**reply.headers, "Location": target})
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


def _end(transport: asyncio.Transport, *, reset: bool) -> None:
    if not reset:
        transport.close()
        return
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _head(framing: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {_JSON}\r\n{framing}\r\n\r\n".encode("ascii")


def _sized(body: bytes, *, length: int | None = None, extra: str = "") -> bytes:
    return _head(f"{extra}Content-Length: {len(body) if length is None else length}") + body


async def _drip(reply: FaultInput, *, headers: bool) -> None:
    """Write the status line with the headers or the body byte by byte, and the other at once."""
    body = reply.reply.good
    head = _sized(body)[: -len(body)]
    if not headers:
        reply.transport.write(head)
    data = head if headers else body
    for position in range(len(data)):
        reply.transport.write(data[position : position + 1])
        await asyncio.sleep(reply.faults.drip_interval_s)
    if headers:
        reply.transport.write(body)


async def _huge_body(reply: FaultInput) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": _JSON})
    await response.prepare(reply.request)
    for chunk in _huge_json(reply.faults.huge_bytes, *reply.reply.around):
        await response.write(chunk)
    await response.write_eof()
    return response


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


_RAW: Mapping[FaultKind, Callable[[Forms], bytes]] = {
    FaultKind.MID_BODY_RESET: lambda forms: _sized(
        forms.cuttable[: len(forms.cuttable) // 2], length=len(forms.cuttable)
    ),
    FaultKind.TRUNCATED_BODY: lambda forms: _sized(forms.good, length=len(forms.good) + 64),
    FaultKind.SHORT_LENGTH: lambda forms: _sized(forms.cuttable, length=len(forms.cuttable) // 2),
    FaultKind.BAD_CHUNK: lambda forms: (
        _head("Transfer-Encoding: chunked") + b"forty-two\r\n" + forms.good + b"\r\n0\r\n\r\n"
    ),
    FaultKind.CLOSE_AFTER: lambda forms: _sized(forms.good, extra="Connection: keep-alive\r\n"),
    FaultKind.HUGE_HEADER: lambda forms: _sized(forms.good, extra=f"x-filler: {'x' * _HUGE_HEADER_CHARS}\r\n"),
}
"""What is written to the transport; then the connection ends."""

_BODIES: Mapping[FaultKind, Callable[[FaultInput], bytes]] = {
    FaultKind.HTML: lambda reply: _HTML,
    FaultKind.EMPTY: lambda reply: b"",
    FaultKind.WRONG_JSON_TYPE: lambda reply: b'["this", "is", "a", "list"]',
    FaultKind.DEEP_NESTING: lambda reply: b"[" * _NESTING + b"]" * _NESTING,
    FaultKind.BAD_GZIP: lambda reply: b"\x1f\x8bnot gzip at all",
    FaultKind.GZIP_BOMB: lambda reply: _bomb(reply.faults.huge_bytes, *reply.reply.around),
    FaultKind.ERROR_IN_200: lambda reply: orjson.dumps(
        reply.protocol.error(500, "injected fault error_in_200", "error_in_200")
    ),
    FaultKind.NO_CHOICES: lambda reply: reply.reply.without_verdict,
    FaultKind.WRONG_MODEL: lambda reply: reply.reply.of_another_model,
    FaultKind.INVALID_UTF8: lambda reply: reply.reply.invalid_utf8,
    FaultKind.TRUNCATED_JSON: lambda reply: reply.reply.cuttable[: len(reply.reply.cuttable) // 2],
}
"""Bodies of replies with status 200."""
