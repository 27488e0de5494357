"""Compressed replies, with both HTTP clients: read whole, or not at all."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins.errors import TransientError
from qreward_plugins.sources.http_reading import Undecodable, decoder_of

pytestmark = pytest.mark.anyio


def raw_deflated(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


def members(data: bytes) -> bytes:
    return b"".join(gzip.compress(data[place : place + 1]) for place in range(len(data)))


COMPRESS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-Gzip", gzip.compress),
    "members of gzip": ("gzip", members),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflated),
}


async def scored(serve: Any, open_service: Any, request_of: Any, body: bytes, coding: str) -> Any:
    async def script(exchange: Any) -> None:
        exchange.reply(body, headers={"Content-Encoding": coding})

    async with serve(script) as server:
        source = open_service(server.score_url)
        try:
            return (await source.send(request_of(), on_sent=lambda: None)).value
        except TransientError as error:
            return error
        finally:
            await source.aclose()


@pytest.mark.parametrize("way", COMPRESS)
async def test_a_bare_number_is_never_read_short(way: str, serve: Any, open_service: Any, request_of: Any) -> None:
    coding, compress = COMPRESS[way]
    whole = compress(b"0.9")
    for length in range(1, len(whole)):
        found = await scored(serve, open_service, request_of, whole[:length], coding)
        if way == "members of gzip" and not isinstance(found, TransientError):
            # Between two members nobody can tell, except that "0." is no JSON.
            assert (length, found) == (len(gzip.compress(b"0")), 0)
            continue
        assert isinstance(found, TransientError), (length, found)
    assert await scored(serve, open_service, request_of, whole, coding) == 0.9


async def test_a_body_that_goes_on_after_its_end_is_not_read(serve: Any, open_service: Any, request_of: Any) -> None:
    for coding, body in (("deflate", zlib.compress(b"0.9") + b"9"), ("gzip", gzip.compress(b"0.9") + b"9")):
        found = await scored(serve, open_service, request_of, body, coding)
        assert isinstance(found, TransientError)
        assert "could not be decoded" in str(found)


@pytest.mark.parametrize("coding", ["", "identity", "utf-8", "none"])
async def test_a_word_that_is_no_compression_changes_nothing(
    coding: str, serve: Any, open_service: Any, request_of: Any
) -> None:
    assert await scored(serve, open_service, request_of, b"0.9", coding) == 0.9


async def test_a_compression_in_a_second_header_is_read(serve: Any, open_service: Any, request_of: Any) -> None:
    body = gzip.compress(b"0.9")

    async def script(exchange: Any) -> None:
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Encoding: gzip\r\n")
        exchange.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    async with serve(script) as server:
        source = open_service(server.score_url)
        assert (await source.send(request_of(), on_sent=lambda: None)).value == 0.9
        await source.aclose()


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "gzip, br"])
async def test_a_compression_that_nobody_asked_for_is_an_error(
    coding: str, serve: Any, open_service: Any, request_of: Any
) -> None:
    found = await scored(serve, open_service, request_of, gzip.compress(b"0.9"), coding)
    assert isinstance(found, TransientError)


async def test_a_stream_of_events_that_is_compressed_is_read_as_it_comes(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    pieces = ["data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": word}}]}) for word in ("fi", "ne")]
    pieces.append("data: " + json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    pieces.append("data: [DONE]")

    async def script(exchange: Any) -> None:
        assert exchange.headers["accept-encoding"] == "gzip, deflate"
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n")
        exchange.write(b"Transfer-Encoding: chunked\r\n\r\n")
        compressor = zlib.compressobj(wbits=31)
        for piece in pieces:
            data = compressor.compress(f"{piece}\n\n".encode()) + compressor.flush(zlib.Z_SYNC_FLUSH)
            exchange.write(b"%x\r\n%s\r\n" % (len(data), data))
            await exchange.writer.drain()
        rest = compressor.flush()
        exchange.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(rest), rest))

    async with serve(script) as server:
        source = open_source(server.base_url, stream=True)
        for _ in range(2):
            assert (await source.send(request_of(), on_sent=lambda: None)).text == "fine"
        # Its end was read, too, so the connection was used again.
        assert server.connections == 1
        await source.aclose()


def test_pieces_are_of_bounded_size() -> None:
    decoder = decoder_of("gzip")
    assert decoder is not None
    sizes = [len(piece) for piece in decoder.feed(gzip.compress(b" " * 10_000_000))]
    decoder.end()
    assert (max(sizes), sum(sizes)) == (65_536, 10_000_000)


def test_an_empty_body_is_whole_and_a_begun_one_is_not() -> None:
    decoder = decoder_of("gzip")
    assert decoder is not None
    decoder.end()
    assert list(decoder.feed(b"\x1f")) == []
    with pytest.raises(Undecodable):
        decoder.end()
