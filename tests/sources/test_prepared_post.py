"""Prepared posts: what they send is what aiohttp sends, and no connection stays behind, however an exchange ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from yarl import URL

from qreward_plugins.errors import TransientError
from qreward_plugins.sources.aiohttp_client import TESTED_VERSION, AiohttpClient, PreparedPost
from qreward_plugins.sources.http import Connecting
from qreward_plugins.sources.http_reading import ACCEPTED

pytestmark = pytest.mark.anyio

BODY = b'{"question": "\xc3\xa9"}'
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nSet-Cookie: session=1\r\n\r\n{}"


class RawServer:
    """Records the bytes of each request, and answers each with `reply`. `connections` counts those that were made."""

    def __init__(self, reply: bytes) -> None:
        self.reply = reply
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()
        """Set when a client has closed a connection."""
        self.asked = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.asked.set()
                writer.write(self.reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()


@asynccontextmanager
async def served(reply: bytes = REPLY) -> AsyncIterator[tuple[RawServer, URL]]:
    raw = RawServer(reply)
    server = await asyncio.start_server(raw.handle, "127.0.0.1", 0)
    async with server:
        yield raw, URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions?version=1")


def client_with(headers: dict[str, str] | None = None) -> AiohttpClient:
    return AiohttpClient(Connecting("judge", headers or {}, {}, (), True, 5.0, {}))


async def post(client: AiohttpClient, url: URL, on_sent: Callable[[], None] = lambda: None, **options: Any) -> Any:
    return await client.post(url, BODY, on_sent=on_sent, max_reply_bytes=1000, **options)


def acquired(client: AiohttpClient) -> int:
    """Connections that are not given back."""
    return sum(len(session.connector._acquired) for session, _ in client._sessions.values())


def test_the_installed_aiohttp_is_a_tested_version() -> None:
    # If not: run tests/sources with it, and raise the version in prepared_post.
    assert TESTED_VERSION


async def test_another_version_of_aiohttp_sends_by_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qreward_plugins.sources.aiohttp_client.TESTED_VERSION", False)
    monkeypatch.setattr(PreparedPost, "__init__", None)
    async with served() as (server, url):
        client = client_with()
        assert (await post(client, url)).body == b"{}"
        assert len(server.requests) == 1
        await client.aclose()


async def test_a_request_has_the_same_bytes_as_one_of_aiohttp() -> None:
    headers = {"Authorization": "Bearer key", "X-Name": "J\xfcrgen"}
    async with served() as (server, url):
        client = client_with(headers)
        await post(client, url)
        await client.aclose()
        async with aiohttp.ClientSession(headers={"Accept-Encoding": ACCEPTED, **headers}) as session:
            await session.post(url, data=aiohttp.BytesPayload(BODY, content_type="application/json"))
    prepared, usual = (sorted(request.split(b"\r\n")) for request in server.requests)
    assert prepared == usual


async def test_requests_share_a_connection_and_send_no_cookie_back() -> None:
    async with served() as (server, url):
        client = client_with()
        for _ in range(3):
            reply = await post(client, url)
            assert (reply.status, reply.body) == (200, b"{}")
        await client.aclose()
    assert server.connections == 1
    assert not any(b"cookie" in request.lower() for request in server.requests)


async def test_interim_replies_are_passed_over() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    async with served(interim + REPLY) as (server, url):
        client = client_with()
        assert [(await post(client, url)).status for _ in range(2)] == [200, 200]
        await client.aclose()
    assert server.connections == 1


@pytest.mark.parametrize("status", ["000", "099"])
async def test_a_status_that_does_not_exist_is_a_reply(status: str) -> None:
    async with served(f"HTTP/1.1 {status} Odd\r\nContent-Length: 2\r\n\r\n{{}}".encode()) as (_, url):
        client = client_with()
        assert (await asyncio.wait_for(post(client, url), 10)).status == int(status)
        await client.aclose()


async def test_a_server_that_switches_protocols_is_an_error_and_its_connection_is_closed() -> None:
    async with served(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n") as (
        server,
        url,
    ):
        client = client_with()
        assert (await post(client, url)).status == 101
        await asyncio.wait_for(server.closed.wait(), 10)
        assert acquired(client) == 0
        await client.aclose()


async def test_nothing_is_written_if_the_call_must_not_be_sent_any_more() -> None:
    def withheld() -> None:
        raise asyncio.CancelledError

    async with served() as (server, url):
        client = client_with()
        await post(client, url)
        with pytest.raises(asyncio.CancelledError):
            await post(client, url, on_sent=withheld)
        assert acquired(client) == 0
        await asyncio.wait_for(server.closed.wait(), 10)
        await client.aclose()
    assert len(server.requests) == 1


@pytest.mark.parametrize("reply", [b"", REPLY[:-1]], ids=["before the headers", "in the body"])
async def test_cancelling_closes_the_connection(reply: bytes) -> None:
    async with served(reply) as (server, url):
        client = client_with()
        task = asyncio.create_task(post(client, url))
        await asyncio.wait_for(server.asked.wait(), 10)
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.closed.wait(), 10)
        assert acquired(client) == 0
        await client.aclose()


BEYOND_ALL_BUFFERS = b"x" * 2**24
WAYS = pytest.mark.parametrize("options", [{}, {"headers": {"X-Further": "1"}}], ids=["prepared", "by the session"])


async def arrived(listening: socket.socket) -> int:
    """The bytes that arrive on the first connection from now on, until its client closes it."""
    loop, total = asyncio.get_running_loop(), 0
    connection, _ = await loop.sock_accept(listening)
    with connection, contextlib.suppress(ConnectionError):
        while chunk := await loop.sock_recv(connection, 2**20):
            total += len(chunk)
    return total


@WAYS
@pytest.mark.parametrize("ending", ["cancelled", "closed"])
async def test_the_rest_of_a_request_that_has_ended_is_never_written(ending: str, options: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        client, sent = client_with(), asyncio.Event()
        url = URL(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
        task = asyncio.create_task(
            client.post(url, BEYOND_ALL_BUFFERS, on_sent=sent.set, max_reply_bytes=1000, **options)
        )
        await asyncio.wait_for(sent.wait(), 10)
        for _ in range(5):
            await asyncio.sleep(0)
        if ending == "cancelled":
            task.cancel()
        else:
            await asyncio.wait_for(client.aclose(), 10)
        with pytest.raises(asyncio.CancelledError if ending == "cancelled" else TransientError):
            await asyncio.wait_for(task, 10)
        assert await asyncio.wait_for(arrived(listening), 30) < len(BEYOND_ALL_BUFFERS)
        await client.aclose()


@WAYS
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
async def test_the_connection_of_a_request_that_was_answered_before_it_was_written_is_not_used_again(
    tls: bool, options: Any, self_signed: ssl.SSLContext
) -> None:
    connections = 0

    async def refuse_unread(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\n{}" if connections == 1 else REPLY)
        writer.transport.pause_reading()
        with contextlib.suppress(ConnectionError):
            await over.wait()
        writer.transport.abort()

    over = asyncio.Event()
    certified = self_signed if tls else None
    async with await asyncio.start_server(refuse_unread, "127.0.0.1", 0, ssl=certified) as server:
        client = AiohttpClient(Connecting("judge", {}, {}, (), False, 5.0, {}))
        url = URL(f"http{'s' * tls}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        refused = await client.post(url, BEYOND_ALL_BUFFERS, on_sent=lambda: None, max_reply_bytes=1000, **options)
        assert (refused.status, refused.body) == (413, b"{}")
        assert (await asyncio.wait_for(post(client, url), 10)).status == 200
        await client.aclose()
        over.set()
    assert connections == 2


async def test_a_reply_that_is_too_large_closes_its_connection() -> None:
    async with served(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 2000) as (server, url):
        client = client_with()
        with pytest.raises(TransientError, match="larger than 1,000 bytes"):
            await post(client, url)
        await asyncio.wait_for(server.closed.wait(), 10)
        assert acquired(client) == 0
        await client.aclose()


@pytest.mark.parametrize("reply", [b"SMTP ready\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"])
async def test_what_is_not_http_is_an_error_of_its_own(reply: bytes) -> None:
    async with served(reply) as (_, url):
        client = client_with()
        with pytest.raises(TransientError, match="not valid HTTP"):
            await post(client, url)
        assert acquired(client) == 0
        await client.aclose()


async def test_further_headers_of_a_call_are_sent_by_the_session() -> None:
    async with served() as (server, url):
        client = client_with()
        await post(client, url, headers={"X-Further": "1"})
        await post(client, url)
        await client.aclose()
    assert [b"X-Further: 1" in request for request in server.requests] == [True, False]


@pytest.mark.parametrize("name", ["Transfer-Encoding", "Content-Encoding", "Expect"])
async def test_headers_that_change_how_the_body_is_sent_make_it_impossible(name: str) -> None:
    values = {"Transfer-Encoding": "chunked", "Content-Encoding": "gzip", "Expect": "100-continue"}
    async with aiohttp.ClientSession(headers={name: values[name]}) as session:
        assert not PreparedPost(session, URL("http://127.0.0.1/v1")).can_send


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nX-Other: b", "a\rb", "a\0b", "a\x7fb"])
async def test_a_header_with_a_control_character_is_refused(value: str) -> None:
    async with aiohttp.ClientSession(headers={"X-Name": value}) as session:
        with pytest.raises(ValueError, match="line break"):
            PreparedPost(session, URL("http://127.0.0.1/v1"))


async def test_requests_to_many_replicas_are_not_kept_for_ever() -> None:
    client = client_with()
    async with served() as (_, url):
        for number in range(200):
            await post(client, url.with_path(f"/{number}"))
        assert 0 < sum(map(len, client._prepared.values())) <= 64
        await client.aclose()
    assert not client._prepared
