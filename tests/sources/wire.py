"""A server that writes whatever bytes a test tells it to, and what sources are asked with."""

from __future__ import annotations

import asyncio
import inspect
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from qreward_plugins.errors import QRewardError
from qreward_plugins.samples import Sample
from qreward_plugins.sources import Reply, Request
from qreward_plugins.testing import FaultKind, Faults

KEY = "sk-test-0123456789abcdefghij"
PATIENCE_S = 20.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@dataclass
class Exchange:
    """One request as the server got it, and the means to answer. The first is number 1."""

    number: int
    head: str
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def reply(self, body: Any, status: str = "200 OK", headers: Mapping[str, str] | None = None) -> None:
        """Answer with bytes, a text as it is, or anything else as JSON."""
        if not isinstance(body, (str, bytes)):
            body = json.dumps(body)
        data = body.encode() if isinstance(body, str) else body
        merged = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in merged.items())
        self.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + data)

    def begin_events(self) -> None:
        """Begin a stream of events, which `event` goes on with; an empty one ends it."""
        self.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def event(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def reset(self) -> None:
        self.writer.transport.abort()

    async def hung_up(self) -> None:
        """Wait until the client closes the connection."""
        try:
            while await self.reader.read(1024):
                pass
        except ConnectionError:
            pass


Script = Any
"""How a server answers: a function of the exchange, sync or async; or a body; or a list of these, one for each request,
of which the last one is for all further ones."""


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
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[bytes]:
        return [exchange.body for exchange in self.exchanges]

    @property
    def score_url(self) -> str:
        return f"{self.url}/score"

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                exchange = Exchange(len(self.exchanges) + 1, head, b"", reader, writer)
                exchange.body = await reader.readexactly(int(exchange.headers.get("content-length", "0")))
                self.exchanges.append(exchange)
                await self._answer(exchange)
                await writer.drain()
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, exchange: Exchange) -> None:
        script = self.script
        if isinstance(script, list):
            script = script[min(exchange.number, len(script)) - 1]
        if not callable(script):
            exchange.reply(script)
        elif inspect.isawaitable(pending := script(exchange)):
            await pending

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


def completion(content: Any = "fine", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "model": "judge-1", "choices": [choice], **more}


def request_of(text: str = "Judge this.", **parameters: Any) -> Request:
    sample = Sample(messages=[{"role": "user", "content": "q"}], response="r")
    return Request(sample=sample, messages=({"role": "user", "content": text},), parameters=parameters)


def nothing() -> None:
    pass


async def outcome_of(source: Any, request: Request | list[Request], on_sent: Callable[[], None] = nothing) -> Any:
    """The reply, or the error. Of several requests in one: the list of these, or the error of all."""
    send = source.send_batch if isinstance(request, list) else source.send
    try:
        return await asyncio.wait_for(send(request, on_sent=on_sent), PATIENCE_S)
    except QRewardError as error:
        return error


async def asked(source: Any, *requests: Any) -> list[Any]:
    """The outcomes of requests, one after the other. The source is closed then."""
    try:
        return [await outcome_of(source, request) for request in requests or [request_of()]]
    finally:
        await source.aclose()


async def text_of(source: Any) -> str:
    reply = await outcome_of(source, request_of())
    assert isinstance(reply, Reply), reply
    return reply.text


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
