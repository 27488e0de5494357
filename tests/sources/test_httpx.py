"""What only the httpx client has: HTTP/2, SOCKS, client certificates, `httpx.Auth`, and its own mistakes."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import logging
import ssl
from collections.abc import Generator
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import orjson
import pytest

from qreward_plugins import RewardEngine
from qreward_plugins.errors import SourceError, SourceUnusable, TransientError

from ..kit import each_of, mistakes_of
from .wire import asked, completion, outcome_of, request_of, serving, text_of

pytestmark = pytest.mark.anyio
SIGNING = __name__
TOKEN = "tok-0123456789-abcdef-secret"


@pytest.fixture
def client():
    return "httpx"


def tls(folder, *, clients="", protocols=("http/1.1",)):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.set_alpn_protocols(list(protocols))
    if clients:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(folder / f"{clients}.pem")
    return context


async def test_mutual_tls(open_source, certificates, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "server.pem"))
    cert = [str(certificates / "client.pem"), str(certificates / "client.key")]
    async with serving(completion(), tls(certificates, clients="client")) as server:
        [reply] = await asked(open_source(server.base_url, httpx={"cert": cert}))
        assert reply.text == "fine"
        [error] = await asked(open_source(server.base_url))
        assert isinstance(error, TransientError)


async def test_http2_carries_many_requests_over_one_connection(open_source, certificates):
    connections = 0
    writers: set[Any] = set()

    async def handle(reader, writer):
        nonlocal connections
        connections += 1
        writers.add(writer)
        http = h2.connection.H2Connection(config=h2.config.H2Configuration(client_side=False))
        http.initiate_connection()
        writer.write(http.data_to_send())
        while data := await reader.read(65_536):
            for event in http.receive_data(data):
                if isinstance(event, h2.events.StreamEnded):
                    http.send_headers(event.stream_id, [(":status", "200"), ("content-type", "application/json")])
                    http.send_data(event.stream_id, orjson.dumps(completion()), end_stream=True)
            writer.write(http.data_to_send())
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls(certificates, protocols=("h2",)))
    port = server.sockets[0].getsockname()[1]
    source = open_source(f"https://127.0.0.1:{port}/v1", verify_tls=False, httpx={"http2": True})
    replies = await asyncio.gather(*(outcome_of(source, request_of(str(n))) for n in range(20)))
    assert [reply.text for reply in replies] == ["fine"] * 20
    assert connections == 1
    assert source.slots == 100, "what waits inside of httpx and is cancelled breaks its pool"
    await source.aclose()
    server.close()
    for writer in writers:
        writer.close()
    for _ in range(5):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("password", ["right-password-1", "wrong-password-1"])
async def test_socks_with_a_password(password, open_source, caplog):
    caplog.set_level(logging.DEBUG)
    targets: list[str] = []

    async def socks(reader, writer):
        try:
            await reader.readexactly(2 + (await reader.readexactly(2))[1] - 2)
            writer.write(b"\x05\x02")
            user = await reader.readexactly((await reader.readexactly(2))[1])
            given = await reader.readexactly((await reader.readexactly(1))[0])
            if (user, given) != (b"me", b"right-password-1"):
                writer.write(b"\x01\x01")
                return
            writer.write(b"\x01\x00")
            await reader.readexactly(4)
            targets.append((await reader.readexactly((await reader.readexactly(1))[0])).decode())
            await reader.readexactly(2)
            writer.write(b"\x05\x00\x00\x01\x7f\x00\x00\x01\x00\x00")
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
            inner_writer.write(await reader.readuntil(b"}]}"))
            writer.write(await inner_reader.read(65_536))
            inner_writer.close()
        finally:
            writer.close()

    proxy = await asyncio.start_server(socks, "127.0.0.1", 0)
    url = f"socks5://me:{password}@127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    async with serving(completion()) as server:
        source = open_source("http://judge.example/v1", httpx={"proxy": url})
        if password.startswith("right"):
            assert await text_of(source) == "fine"
            assert targets == ["judge.example"]
        else:
            error = await outcome_of(source, request_of())
            assert isinstance(error, SourceUnusable)
            assert "the proxy refused the user or the password" in str(error)
        await source.aclose()
        proxy.close()
        await asyncio.sleep(0.01)
    assert password not in caplog.text + repr(source) + repr(source._node)


# Factories of `httpx.Auth`, as a configuration names them


class Renewing(httpx.Auth):
    """Sends a token, and asks for another one after a 401, as OAuth and digest do."""

    requires_response_body = True

    def __init__(self) -> None:
        self.number = 0

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {TOKEN}-{self.number}"
        response = yield request
        if response.status_code == 401 and self.number == 0:
            self.number = 1
            request.headers["Authorization"] = f"Bearer {TOKEN}-{self.number}"
            yield request


class Raising(httpx.Auth):
    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        raise KeyError(TOKEN)
        yield request


def broken() -> httpx.Auth:
    raise KeyError(TOKEN)


def nothing() -> None:
    return None


async def test_auth_signs_and_is_never_shown(open_source):
    async def script(exchange):
        given = exchange.headers["authorization"]
        if given == f"Bearer {TOKEN}-1" and len(server.exchanges) < 3:
            exchange.reply(completion(f"you sent {given}"))
        else:
            exchange.reply({"error": {"message": f"bad key {given}"}}, "401 Unauthorized")

    async with serving(script) as server:
        source = open_source(server.base_url, api_key=None, httpx={"auth": f"{SIGNING}:Renewing"})
        reply = await outcome_of(source, request_of())
        assert TOKEN in reply.text
        assert TOKEN not in reply.cleaned(reply.text)
        assert len(server.exchanges) == 2
        [error] = await asked(source)
    assert isinstance(error, SourceUnusable)
    assert "bad key" in str(error)
    assert TOKEN not in str(error)
    [error] = await asked(open_source("http://127.0.0.1:9/v1", api_key=None, httpx={"auth": f"{SIGNING}:Raising"}))
    assert ("failed with KeyError" in str(error), TOKEN in str(error)) == (True, False)


@pytest.mark.parametrize(("status", "head"), [("200 OK", "Content-Encoding: gzip\r\n"), ("401 Unauthorized", "")])
async def test_what_an_auth_reads_is_bounded(open_source, status, head):
    written = 0

    async def script(exchange):
        nonlocal written
        exchange.write(f"HTTP/1.1 {status}\r\n{head}Content-Length: 999999999\r\n\r\n".encode())
        while not exchange.writer.is_closing() and written < 99_000_000:
            exchange.write(b"x" * 65_536)
            written += 65_536
            await exchange.writer.drain()

    async with serving(script) as server:
        source = open_source(
            server.base_url, api_key=None, httpx={"auth": f"{SIGNING}:Renewing"}, max_reply_bytes=100_000
        )
        [error] = await asked(source)
        assert isinstance(error, SourceError)
    assert written < 20_000_000


@each_of(
    ("httpx", "settings", "path", "said"),
    [
        ({"cert": "nowhere.pem"}, {}, "httpx.cert", "No such file or directory"),
        ({"cert": __file__}, {}, "httpx.cert", "the certificate or its key is not valid"),
        ({"auth": f"{SIGNING}:broken"}, {}, "httpx.auth", "raised KeyError"),
        ({"auth": f"{SIGNING}:nothing"}, {}, "httpx.auth", "of type NoneType, not an httpx.Auth"),
        ({"auth": f"{SIGNING}:Renewing"}, {"headers": {"authorization": "x"}}, "httpx.auth", "Authorization, too"),
        ({}, {"client": "aiohttp"}, "", "these are options of `client: httpx`"),
        ({"auth": "a:b"}, {"api_key": "k"}, "", "set auth or api_key, not both"),
        ({"proxy": "socks4://p:1"}, {}, "httpx.proxy", "a proxy starts with http://"),
        ({"proxy": "http://me:secret@p:99999"}, {}, "httpx.proxy", "a proxy starts with http://"),
    ],
)
def test_mistakes_are_named(httpx, settings, path, said):
    node = {"kind": "openai", "base_url": "https://a/v1", "model": "judge", "client": "httpx", "httpx": httpx}
    tree = {"sources": {"fast": {**node, **settings}}, "judges": {"j": {"kind": "llm"}}}
    [(place, told)] = mistakes_of(RewardEngine, tree).items()
    assert (place.startswith(f"sources.fast.{path}"), said in told) == (True, True), told
    assert not any(secret in told for secret in (TOKEN, "secret"))


@pytest.mark.parametrize(
    ("missing", "options", "path"),
    [
        ("httpx", {}, "client"),
        ("h2", {"http2": True}, "httpx.http2"),
        ("socksio", {"proxy": "socks5://p:1"}, "httpx.proxy"),
    ],
)
def test_a_missing_package_is_one_error_that_names_the_extra(open_source, monkeypatch, missing, options, path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == missing else found(name, *more)
    )
    [(place, said)] = mistakes_of(open_source, "https://a/v1", httpx=options).items()
    assert (place, "pip install 'qreward-plugins[httpx]'" in said) == (f"sources.fast.{path}", True)


@each_of("password", ["pw123", "a-long-password"])
def test_the_header_of_a_proxy_is_redacted(open_source, password):
    source = open_source("http://judge.example/v1", httpx={"proxy": f"http://me:{password}@127.0.0.1:9"})
    header = base64.b64encode(f"me:{password}".encode()).decode()
    said = source._http.redactor.of(f"407, Proxy-Authorization: Basic {header} ({password})")
    assert header[:10] not in said
    assert password not in said
