"""Streams the chat completions of a judge server, and plays the faults of streams."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from .faults import FaultKind, Faults

_TYPE = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_CHARS_PER_TOKEN = 4
_PIECE_BYTES = 65_536
_DONE = b"data: [DONE]\n\n"


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
    options: Mapping[str, Any],
    headers: Mapping[str, str],
    faults: Faults,
    *,
    fault: FaultKind | None,
    interval_s: float,
) -> web.StreamResponse:
    """Send a completion, which is the body of a reply without streaming, as events: one for each token, every
    `interval_s` seconds. Raises `ConnectionError` if the client has disconnected.
    """
    extra = {"Content-Encoding": "gzip"} if fault is FaultKind.STREAM_GZIP_BOMB else {}
    response = web.StreamResponse(headers={**headers, **_TYPE, **extra})
    await response.prepare(request)
    async for piece in _pieces(orjson.loads(reply), options, faults, fault):
        await response.write(piece)
        if interval_s and piece.startswith(b"data: {"):
            await asyncio.sleep(interval_s)
    if fault is FaultKind.STREAM_RESET:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError
    await response.write_eof()
    return response


async def _pieces(
    completion: Mapping[str, Any], options: Mapping[str, Any], faults: Faults, fault: FaultKind | None
) -> AsyncIterator[bytes]:
    choice = completion["choices"][0]
    message = choice["message"]
    key = "content" if message.get("refusal") is None else "refusal"
    text = message[key] or ""
    if fault is FaultKind.STREAM_ODD:
        text = text.replace('"rationale": "', '"rationale": "\u20ac\U0001f600 ', 1)
    tokens = [text[at : at + _CHARS_PER_TOKEN] for at in range(0, len(text), _CHARS_PER_TOKEN)]
    usage = completion["usage"]

    def event(delta: Mapping[str, Any], finish: str | None = None, /, **more: Any) -> bytes:
        one = {"index": 0, "delta": delta, "finish_reason": finish}
        head = {"id": completion["id"], "object": "chat.completion.chunk", "model": completion["model"]}
        return b"data: " + orjson.dumps({**head, "choices": [one], **more}) + b"\n\n"

    continuous = bool(options.get("continuous_usage_stats"))
    good = [event({"role": "assistant", "content": ""})]
    for number, token in enumerate(tokens, 1):
        stated: dict[str, Any] = {"usage": {**usage, "completion_tokens": number}} if continuous else {}
        good.append(event({key: token}, **stated))
    end = [event({}, choice["finish_reason"])]
    if options.get("include_usage"):
        end.append(b"data: " + orjson.dumps({"choices": [], "model": completion["model"], "usage": usage}) + b"\n\n")
    end.append(_DONE)
    half = len(good) // 2
    if fault is FaultKind.STREAM_GZIP_BOMB:
        compressor = zlib.compressobj(1, wbits=31)
        async for piece in _huge(event, faults):
            yield compressor.compress(piece)
        yield compressor.flush()
    elif fault is None:
        for piece in (*good, *end):
            yield piece
    elif fault in (FaultKind.STREAM_ODD, FaultKind.STREAM_DRIP):
        whole = b"".join((*good, *end))
        if fault is FaultKind.STREAM_ODD:
            whole = b"\xef\xbb\xbf: hello\n" + whole.replace(b"\n\n", b"\r\n: still here\r\n\r\n")
        for at in range(len(whole)):
            yield whole[at : at + 1]
            if fault is FaultKind.STREAM_DRIP:
                await asyncio.sleep(faults.drip_interval_s)
            elif not at % 64:
                await asyncio.sleep(0)
    elif fault is FaultKind.STREAM_NO_DONE:
        for piece in (*good, end[0]):
            yield piece
    elif fault is FaultKind.STREAM_AFTER_FINISH:
        for piece in (*good[:half], end[0], *good[half:], *end[1:]):
            yield piece
    else:
        for piece in good[:half]:
            yield piece
        async for piece in _BROKEN[fault](event, faults):
            yield piece
        if fault not in (FaultKind.STREAM_CUT, FaultKind.STREAM_RESET):
            for piece in (*good[half:], *end):
                yield piece


_Event = Callable[..., bytes]


def _one(piece: Callable[[_Event], bytes]) -> Callable[[_Event, Faults], AsyncIterator[bytes]]:
    async def pieces(event: _Event, faults: Faults) -> AsyncIterator[bytes]:
        yield piece(event)

    return pieces


async def _nothing(event: _Event, faults: Faults) -> AsyncIterator[bytes]:
    nothing: tuple[bytes, ...] = ()
    for piece in nothing:
        yield piece


async def _silent(event: _Event, faults: Faults) -> AsyncIterator[bytes]:
    await asyncio.get_running_loop().create_future()
    yield b""


async def _comments(event: _Event, faults: Faults) -> AsyncIterator[bytes]:
    while True:
        yield b": keep-alive\n\n"
        await asyncio.sleep(faults.drip_interval_s or 0.005)


async def _endless(event: _Event, faults: Faults) -> AsyncIterator[bytes]:
    piece = event({"content": "and so on " * 20})
    while True:
        yield piece * 100
        await asyncio.sleep(0)


async def _huge(event: _Event, faults: Faults) -> AsyncIterator[bytes]:
    yield b'data: {"filler": "'
    for _ in range(0, faults.huge_bytes, _PIECE_BYTES):
        yield b"a" * _PIECE_BYTES
    yield b'"}\n\n'


_BROKEN: Mapping[FaultKind, Callable[[_Event, Faults], AsyncIterator[bytes]]] = {
    FaultKind.STREAM_CUT: _nothing,
    FaultKind.STREAM_RESET: _nothing,
    FaultKind.STREAM_BAD_JSON: _one(lambda event: b'data: {"choices": [\n\n'),
    FaultKind.STREAM_BAD_UTF8: _one(lambda event: event({"content": "x"}).replace(b'"x"', b'"\xff\xfe"')),
    FaultKind.STREAM_ERROR: _one(
        lambda event: b'data: {"error": {"message": "injected fault stream_error", "code": 500}}\n\n'
    ),
    FaultKind.STREAM_TWO_CHOICES: _one(lambda event: event({"content": "x"}).replace(b'"index":0', b'"index":1')),
    FaultKind.STREAM_HUGE_EVENT: _huge,
    FaultKind.STREAM_ENDLESS: _endless,
    FaultKind.STREAM_SILENT: _silent,
    FaultKind.STREAM_COMMENTS: _comments,
}
