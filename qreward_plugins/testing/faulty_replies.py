"""Writes the replies of a judge server, good and faulty, whole and streamed.

An HTTP library prevents most faults. So they write to the transport, and return a `Written`, which makes aiohttp send
nothing. A reset is a real one (RST, by SO_LINGER 0), not a normal end of the stream.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from functools import lru_cache
from typing import Any

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from .faults import FaultKind, Faults
from .faulty_answers import half
from .judge_calls import JudgeReply
from .protocols import Events, Protocol

_JSON = "application/json"
_HTML = b"<!DOCTYPE html><html><head><title>Please wait</title></head><body><h1>One moment, please</h1></body></html>"
_CHUNK_BYTES = 64 * 1024
_HUGE_HEADER_CHARS = 1024 * 1024
_HUGE_RETRY_AFTER_S = 3 * 365 * 24 * 3600
_NESTING = 100_000
_ELSEWHERE = "http://elsewhere.invalid/v1/chat/completions"
_RATIONALE = rb"\"rationale\": \""


@dataclass(frozen=True)
class JudgeExchange:
    """A request, and what its reply is made of."""

    request: web.BaseRequest
    protocol: Protocol
    faults: Faults
    headers: Mapping[str, str]
    body: JudgeReply | None
    """None for faults without an answer."""
    stream: Mapping[str, Any] | None = None
    """The `stream_options` of a request that asks for a stream; None for one that does not."""
    interval_s: float = 0.0
    """Seconds between two events of a stream."""

    @property
    def reply(self) -> JudgeReply:
        assert self.body is not None, "there is an answer"
        return self.body

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


def sent_status(response: web.StreamResponse) -> int:
    """The status that the client saw; 0 for none."""
    return response.sent_status if isinstance(response, Written) else response.status


async def respond(exchange: JudgeExchange, fault: FaultKind | None) -> web.StreamResponse:
    """Play this fault, or none, and return the response for aiohttp to send, or a `Written`.

    Cancelled when the client disconnects or the server stops. Raises `ConnectionError` if the client has disconnected.
    """
    if fault is None or fault.stage in ("verdict", "list", "stream"):  # the reply itself has the first two already
        if exchange.stream is None:
            return web.Response(body=exchange.reply.good, content_type=_JSON, headers=exchange.headers)
        return await _streamed(exchange, fault)
    if fault.stage == "status":
        return _status(fault, exchange)
    if fault is FaultKind.HANG:
        await asyncio.get_running_loop().create_future()
    if fault in (FaultKind.RESET, FaultKind.CLOSE):
        _end(exchange.transport, reset=fault is FaultKind.RESET)
        return Written(0)
    if fault in (FaultKind.SLOW_HEADERS, FaultKind.SLOW_BODY):
        await _drip(exchange, headers=fault is FaultKind.SLOW_HEADERS)
        return Written(200)
    if fault in _RAW:
        exchange.transport.write(_RAW[fault](exchange.reply))
        if fault is FaultKind.MID_BODY_RESET:
            _end(exchange.transport, reset=True)
        return Written(200)
    headers = dict(exchange.headers)
    if fault is FaultKind.HUGE_BODY:
        response = web.StreamResponse(headers={**headers, "Content-Type": _JSON})
        await response.prepare(exchange.request)
        for chunk in _huge(exchange.faults.huge_bytes, *exchange.reply.around):
            await response.write(chunk)
        await response.write_eof()
        return response
    if fault in (FaultKind.BAD_GZIP, FaultKind.GZIP_BOMB):
        headers["Content-Encoding"] = "gzip"
    if fault is FaultKind.NO_CONTENT:
        return web.Response(status=204, headers=headers)
    content_type = "text/html" if fault is FaultKind.HTML else _JSON
    return web.Response(body=_BODIES[fault](exchange), content_type=content_type, headers=headers)


def _status(kind: FaultKind, exchange: JudgeExchange) -> web.StreamResponse:
    if kind in (FaultKind.REDIRECT, FaultKind.REDIRECT_LOOP):
        target = _ELSEWHERE if kind is FaultKind.REDIRECT else exchange.request.path
        return web.Response(status=307, headers={**exchange.headers, "Location": target})
    status = int(kind.value.split("_")[1])
    headers: dict[str, str] = {}  # without the announced limits: some kinds must not say when to retry
    after_s = exchange.faults.retry_after_s
    retry_s = None
    # An HTTP date is wall-clock time by definition.
    date = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=after_s), usegmt=True)
    retry_after = {
        FaultKind.ERROR_429_SECONDS: str(after_s),
        FaultKind.ERROR_503_SECONDS: str(after_s),
        FaultKind.ERROR_429_DATE: date,
        FaultKind.ERROR_429_HUGE: str(_HUGE_RETRY_AFTER_S),
        FaultKind.ERROR_429_NEGATIVE: "-5",
    }
    if kind in retry_after:
        headers["Retry-After"] = retry_after[kind]
    elif kind is FaultKind.ERROR_429_RESET:
        headers |= exchange.protocol.announce("requests", None, 0, after_s)
        retry_s = float(after_s)
    if kind in (FaultKind.ERROR_502, FaultKind.ERROR_504):
        return web.Response(status=status, body=_HTML, content_type="text/html", headers=headers)
    body = orjson.dumps(exchange.protocol.error(status, f"injected fault {kind.value}", kind.value, retry_s))
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


async def _drip(exchange: JudgeExchange, *, headers: bool) -> None:
    """Write the status line with the headers or the body byte by byte, and the other at once."""
    body = exchange.reply.good
    head = _sized(body)[: -len(body)]
    if not headers:
        exchange.transport.write(head)
    data = head if headers else body
    for position in range(len(data)):
        exchange.transport.write(data[position : position + 1])
        await asyncio.sleep(exchange.faults.drip_interval_s)
    if headers:
        exchange.transport.write(body)


def _huge(size: int, head: bytes, tail: bytes) -> Iterator[bytes]:
    """`size` bytes (or slightly more) with these ends, in chunks."""
    yield head
    for start in range(0, size - len(head) - len(tail), _CHUNK_BYTES):
        yield b"a" * min(_CHUNK_BYTES, size - len(head) - len(tail) - start)
    yield tail


@lru_cache(maxsize=4)
def _bomb(size: int, head: bytes, tail: bytes) -> bytes:
    compressor = zlib.compressobj(1, wbits=31)
    return b"".join([*map(compressor.compress, _huge(size, head, tail)), compressor.flush()])


_RAW: Mapping[FaultKind, Callable[[JudgeReply], bytes]] = {
    FaultKind.MID_BODY_RESET: lambda reply: _sized(half(reply.cuttable), length=len(reply.cuttable)),
    FaultKind.TRUNCATED_BODY: lambda reply: _sized(reply.good, length=len(reply.good) + 64),
    FaultKind.SHORT_LENGTH: lambda reply: _sized(reply.cuttable, length=len(reply.cuttable) // 2),
    FaultKind.BAD_CHUNK: lambda reply: (
        _head("Transfer-Encoding: chunked") + b"forty-two\r\n" + reply.good + b"\r\n0\r\n\r\n"
    ),
    FaultKind.CLOSE_AFTER: lambda reply: _sized(reply.good, extra="Connection: keep-alive\r\n"),
    FaultKind.HUGE_HEADER: lambda reply: _sized(reply.good, extra=f"x-filler: {'x' * _HUGE_HEADER_CHARS}\r\n"),
}
"""What is written to the transport; then the connection ends."""

_BODIES: Mapping[FaultKind, Callable[[JudgeExchange], bytes]] = {
    FaultKind.HTML: lambda exchange: _HTML,
    FaultKind.EMPTY: lambda exchange: b"",
    FaultKind.WRONG_JSON_TYPE: lambda exchange: b'["this", "is", "a", "list"]',
    FaultKind.DEEP_NESTING: lambda exchange: b"[" * _NESTING + b"]" * _NESTING,
    FaultKind.BAD_GZIP: lambda exchange: b"\x1f\x8bnot gzip at all",
    FaultKind.GZIP_BOMB: lambda exchange: _bomb(exchange.faults.huge_bytes, *exchange.reply.around),
    FaultKind.ERROR_IN_200: lambda exchange: orjson.dumps(
        exchange.protocol.error(500, "injected fault error_in_200", "error_in_200")
    ),
    FaultKind.NO_CHOICES: lambda exchange: exchange.reply.without_answer,
    FaultKind.WRONG_MODEL: lambda exchange: exchange.reply.of_another_model,
    FaultKind.INVALID_UTF8: lambda exchange: exchange.reply.invalid_utf8,
    FaultKind.TRUNCATED_JSON: lambda exchange: half(exchange.reply.cuttable),
}
"""Bodies of replies with status 200."""


async def _streamed(exchange: JudgeExchange, fault: FaultKind | None) -> web.StreamResponse:
    """Send the reply as events: one for each token, every `interval_s` seconds."""
    assert exchange.stream is not None
    headers = {**exchange.headers, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    if fault is FaultKind.STREAM_GZIP_BOMB:
        headers["Content-Encoding"] = "gzip"
    response = web.StreamResponse(headers=headers)
    await response.prepare(exchange.request)
    body = exchange.reply.good
    if fault is FaultKind.STREAM_ODD:
        body = body.replace(_RATIONALE, _RATIONALE + "\u20ac\U0001f600 ".encode(), 1)
    events = exchange.protocol.events(orjson.loads(body), exchange.stream)
    async for piece in _pieces(events, exchange.faults, fault):
        await response.write(piece)
        if exchange.interval_s and b"data: {" in piece:
            await asyncio.sleep(exchange.interval_s)
    if fault is FaultKind.STREAM_RESET:
        exchange.transport.abort()
        raise ConnectionResetError
    await response.write_eof()
    return response


async def _pieces(events: Events, faults: Faults, fault: FaultKind | None) -> AsyncIterator[bytes]:
    """The bytes of a stream. A fault that is in no table here leaves it as it is."""
    good, end = list(events.good), list(events.end)
    half = len(good) // 2
    if fault is FaultKind.STREAM_NO_DONE:
        end = end[: events.whole]
    elif fault is FaultKind.STREAM_AFTER_FINISH:
        end.insert(1, events.part("x"))
    elif fault in (FaultKind.STREAM_CUT, FaultKind.STREAM_RESET):
        good, end = good[:half], []
    elif fault in _BETWEEN:
        good.insert(half, _BETWEEN[fault](events))
    elif fault in (FaultKind.STREAM_ODD, FaultKind.STREAM_DRIP):
        whole = b"".join((*good, *end))
        if fault is FaultKind.STREAM_ODD:
            crlf = whole.replace(b"\n\n", b"\n: still here\n\n").replace(b"\n", b"\r\n")
            whole = b"\xef\xbb\xbf: hello\n" + crlf
        good, end = [whole[at : at + 1] for at in range(len(whole))], []
    elif fault in _ENDLESS:
        for piece in good[:half]:
            yield piece
        while True:
            yield _ENDLESS[fault](events)
            await asyncio.sleep(0 if fault is FaultKind.STREAM_ENDLESS else faults.drip_interval_s or 0.005)
    elif fault is FaultKind.STREAM_SILENT:
        for piece in good[:half]:
            yield piece
        await asyncio.get_running_loop().create_future()
    elif fault is FaultKind.STREAM_GZIP_BOMB:
        good, end = [_bomb(faults.huge_bytes, *_HUGE_EVENT)], []
    elif fault is FaultKind.STREAM_HUGE_EVENT:
        for piece in (*good[:half], *_huge(faults.huge_bytes, *_HUGE_EVENT)):
            yield piece
        good = good[half:]
    drip_s = faults.drip_interval_s if fault is FaultKind.STREAM_DRIP else None
    for number, piece in enumerate((*good, *end)):
        yield piece
        if drip_s is not None or (fault is FaultKind.STREAM_ODD and not number % 64):
            await asyncio.sleep(drip_s or 0)


_HUGE_EVENT = (b'data: {"filler": "', b'"}\n\n')

_BETWEEN: Mapping[FaultKind | None, Callable[[Events], bytes]] = {
    FaultKind.STREAM_BAD_JSON: lambda events: b'data: {"choices": [\n\n',
    FaultKind.STREAM_BAD_UTF8: lambda events: events.part("x").replace(b'"x"', b'"\xff\xfe"'),
    FaultKind.STREAM_ERROR: lambda events: events.error,
    FaultKind.STREAM_TWO_CHOICES: lambda events: events.second,
}
"""The event in the middle of the answer."""

_ENDLESS: Mapping[FaultKind | None, Callable[[Events], bytes]] = {
    FaultKind.STREAM_ENDLESS: lambda events: events.part("and so on " * 20) * 100,
    FaultKind.STREAM_COMMENTS: lambda events: events.ping,
}
"""What follows the first half of the answer without end."""
