"""Callers that send slowly, or without the token."""

from __future__ import annotations

import asyncio

import pytest

pytestmark = pytest.mark.anyio


async def reply_to(url, text):
    """What a server answers to a request whose body never comes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(text.encode())
        return (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).decode()
    finally:
        writer.close()
        await writer.wait_closed()


HEAD = "POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"


async def test_a_body_that_comes_too_slowly(serve, monkeypatch):
    monkeypatch.setattr("qreward_plugins.server.server.BODY_WITHIN_S", 0.1)
    async with serve() as served:
        assert " 408 " in await reply_to(served.url, HEAD + '\r\n{"prompt"')
    assert served.source.samples == []


async def test_the_token_is_checked_before_the_body_is_there(serve):
    async with serve(token="right") as served:
        assert " 401 " in await reply_to(served.url, HEAD + "Authorization: Bearer wrong\r\n\r\n")
        assert " 401 " in await reply_to(served.url, "GET /engine HTTP/1.1\r\nHost: h\r\n\r\n")
