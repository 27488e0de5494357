"""A server that writes whatever bytes a test tells it to, and makers of sources and requests."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from qreward_plugins.samples import Sample
from qreward_plugins.sources import HTTPSource, OpenAISource, Request
from qreward_plugins.testing import FaultKind, Faults

KEY = "sk-test-0123456789abcdefghij"
Script = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Exchange:
    """One request as the server got it, and the means to answer."""

    head: str
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def reply(
        self,
        body: bytes | str | float | Mapping[str, Any],
        status: str = "200 OK",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(body, (Mapping, float)):
            body = json.dumps(body)
        data = body.encode() if isinstance(body, str) else body
        merged = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in merged.items())
        self.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + data)

    def reset(self) -> None:
        self.writer.transport.abort()

    async def hung_up(self) -> None:
        """Wait until the client closes the connection."""
        try:
            while await self.reader.read(1024):
                pass
        except ConnectionError:
            pass


@dataclass
class Server:
    """Serves a script; every connection and request is counted."""

    script: Script
    port: int = 0
    scheme: str = "http"
    connections: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def score_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/score"

    @property
    def base_url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/v1"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                exchange = Exchange(head, b"", reader, writer)
                exchange.body = await reader.readexactly(int(exchange.headers.get("content-length", "0")))
                self.exchanges.append(exchange)
                await self.script(exchange)
                await writer.drain()
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def stop(self, server: asyncio.Server) -> None:
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Closed transports tell their sockets so in the next turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    served = Server(script, scheme="https" if tls else "http")
    server = await asyncio.start_server(served.handle, "127.0.0.1", 0, ssl=tls)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        await served.stop(server)


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`async with serve(script) as server`: a server on loopback."""
    return serving


def completion(content: Any = "fine", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "model": "judge-1", "choices": [choice], **more}


@pytest.fixture
def completed() -> Callable[..., dict[str, Any]]:
    """The body of a completion."""
    return completion


class NextFault:
    """Plays one fault after the other at one server: `each` yields a kind, which the next request meets."""

    def __init__(self) -> None:
        self.faults = Faults(script=self._next, huge_bytes=4_000_000, drip_interval_s=0.0)
        self._pending: list[str] = []

    def each(self, kinds: Iterable[FaultKind]) -> Iterator[FaultKind]:
        for kind in kinds:
            self._pending.append(kind.value)
            yield kind
            assert not self._pending, f"{kind} was not played"

    def _next(self, number: int) -> str | None:
        return self._pending.pop() if self._pending else None


@pytest.fixture
def next_fault() -> NextFault:
    return NextFault()


@pytest.fixture(params=["aiohttp", "httpx"])
def client(request: pytest.FixtureRequest) -> str:
    """The HTTP client of the sources; every test over HTTP runs with both."""
    return str(request.param)


@pytest.fixture
def open_source(client: str) -> Callable[..., OpenAISource]:
    def make(*base_urls: str, **settings: Any) -> OpenAISource:
        settings.setdefault("client", client)
        settings.setdefault("api_key", KEY)
        return OpenAISource("fast", OpenAISource.Config(kind="openai", base_url=base_urls, model="judge", **settings))

    return make


@pytest.fixture
def open_service(client: str) -> Callable[..., HTTPSource]:
    def make(*urls: str, **settings: Any) -> HTTPSource:
        settings.setdefault("client", client)
        settings.setdefault("api_key", KEY)
        return HTTPSource("rm", HTTPSource.Config(kind="http", url=urls, **settings))

    return make


@pytest.fixture
def key() -> str:
    return KEY


@pytest.fixture
def request_of() -> Callable[..., Request]:
    def make(text: str = "Judge this.", **parameters: Any) -> Request:
        sample = Sample(messages=[{"role": "user", "content": "q"}], response="r")
        return Request(sample=sample, messages=({"role": "user", "content": text},), parameters=parameters)

    return make


@pytest.fixture(scope="session")
def self_signed(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """The settings of a server whose certificate no client trusts."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
