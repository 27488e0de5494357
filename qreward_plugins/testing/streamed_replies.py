"""Streams the replies of a judge server, and plays the faults of streams."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from .faults import FaultKind, Faults
from .protocols import Events, Protocol

_TYPE = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_PIECE_BYTES = 65_536
_RATIONALE = rb"\"rationale\": \""


def wants_stream(body: bytes) -> Mapping[str, Any] | None:
    """Return the `stream_options` of a request that asks for a stream; None for one that does not."""
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(read, dict) or read.get("stream") is not True:
        return None
    options = read.get("stream_options")
    return options if isinstance(options, dict) else {}


async def stream(
    request: web.BaseRequest,
    reply: bytes,
    protocol: Protocol,
    options: Mapping[str, Any],
    headers: Mapping[str, str],
    faults: Faults,
    *,
    fault: FaultKind | None,
    interval_s: float,
) -> web.StreamResponse:
    """Send a reply, given its body without streaming, as events: one for each token, every `interval_s` seconds.

    Raises `ConnectionError` if the client has disconnected."""
    extra = {"Content-Encoding": "gzip"} if fault is FaultKind.STREAM_GZIP_BOMB else {}
    response = web.StreamResponse(headers={**headers, **_TYPE, **extra})
    await response.prepare(request)
    if fault is FaultKind.STREAM_ODD:
        reply = reply.replace(_RATIONALE, _RATIONALE + "\u20ac\U0001f600 ".encode(), 1)
    async for piece in _pieces(protocol.events(orjson.loads(reply), options), faults, fault):
        await response.write(piece)
        if interval_s and b"data: {" in piece:
            await asyncio.sleep(interval_s)
    if fault is FaultKind.STREAM_RESET:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError
    await response.write_eof()
    return response


async def _pieces(events: Events, faults: Faults, fault: FaultKind | None) -> AsyncIterator[bytes]:
    good, end = events.good, events.end
    half = len(good) // 2
    if fault is FaultKind.STREAM_GZIP_BOMB:
        compressor = zlib.compressobj(1, wbits=31)
        async for piece in _huge(events, faults):
            yield compressor.compress(piece)
        yield compressor.flush()
    elif fault is None:
        for piece in (*good, *end):
            yield piece
    elif fault in (FaultKind.STREAM_ODD, FaultKind.STREAM_DRIP):
        whole = b"".join((*good, *end))
        if fault is FaultKind.STREAM_ODD:
            crlf = whole.replace(b"\n\n", b"\n: still here\n\n").replace(b"\n", b"\r\n")
            whole = b"\xef\xbb\xbf: hello\n" + crlf
        for at in range(len(whole)):
            yield whole[at : at + 1]
            if fault is FaultKind.STREAM_DRIP:
                await asyncio.sleep(faults.drip_interval_s)
            elif not at % 64:
                await asyncio.sleep(0)
    elif fault is FaultKind.STREAM_NO_DONE:
        for piece in (*good, *end[: events.whole]):
            yield piece
    elif fault is FaultKind.STREAM_AFTER_FINISH:
        for piece in (*good, end[0], events.part("x"), *end[1:]):
            yield piece
    else:
        for piece in good[:half]:
            yield piece
        async for piece in _BROKEN[fault](events, faults):
            yield piece
        if fault not in (FaultKind.STREAM_CUT, FaultKind.STREAM_RESET):
            for piece in (*good[half:], *end):
                yield piece


def _one(piece: Callable[[Events], bytes]) -> Callable[[Events, Faults], AsyncIterator[bytes]]:
    async def pieces(events: Events, faults: Faults) -> AsyncIterator[bytes]:
        yield piece(events)

    return pieces


async def _nothing(events: Events, faults: Faults) -> AsyncIterator[bytes]:
    nothing: tuple[bytes, ...] = ()
    for piece in nothing:
        yield piece


async def _silent(events: Events, faults: Faults) -> AsyncIterator[bytes]:
    await asyncio.get_running_loop().create_future()
    yield b""


async def _comments(events: Events, faults: Faults) -> AsyncIterator[bytes]:
    while True:
        yield events.ping
        await asyncio.sleep(faults.drip_interval_s or 0.005)


async def _endless(events: Events, faults: Faults) -> AsyncIterator[bytes]:
    piece = events.part("and so on " * 20)
    while True:
        yield piece * 100
        await asyncio.sleep(0)


async def _huge(events: Events, faults: Faults) -> AsyncIterator[bytes]:
    yield b'data: {"filler": "'
    for _ in range(0, faults.huge_bytes, _PIECE_BYTES):
        yield b"a" * _PIECE_BYTES
    yield b'"}\n\n'


_BROKEN: Mapping[FaultKind, Callable[[Events, Faults], AsyncIterator[bytes]]] = {
    FaultKind.STREAM_CUT: _nothing,
    FaultKind.STREAM_RESET: _nothing,
    FaultKind.STREAM_BAD_JSON: _one(lambda events: b'data: {"choices": [\n\n'),
    FaultKind.STREAM_BAD_UTF8: _one(lambda events: events.part("x").replace(b'"x"', b'"\xff\xfe"')),
    FaultKind.STREAM_ERROR: _one(lambda events: events.error),
    FaultKind.STREAM_TWO_CHOICES: _one(lambda events: events.second),
    FaultKind.STREAM_HUGE_EVENT: _huge,
    FaultKind.STREAM_ENDLESS: _endless,
    FaultKind.STREAM_SILENT: _silent,
    FaultKind.STREAM_COMMENTS: _comments,
}
