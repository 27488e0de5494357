"""A reward server on a real socket, over an engine whose one source does what the response says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from qreward_plugins import InvalidReply, RewardEngine, Sample, SampleRefused, TransientError
from qreward_plugins.server.server import RewardServer
from qreward_plugins.sources import Reply, Request, Source

from ..sources import wire


class Signal(asyncio.Event):
    """An event that nobody waits for without an end."""

    async def wait(self) -> bool:  # type: ignore[override]
        with anyio.fail_after(30):
            await super().wait()
        return True


class Obedient(Source):
    """Its reply is the last word of the response: a number, or what goes wrong. "hold" waits for `release`."""

    name, model = "obedient", "obedient-1"

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.release, self.holding, self.cancelled = Signal(), Signal(), Signal()

    async def send(self, request: Request, *, on_sent: Any) -> Reply:
        on_sent()
        self.samples.append(request.sample)
        word = request.sample.response.split()[-1]
        if word == "hold":
            self.holding.set()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            word = "1"
        if word == "refuse":
            raise SampleRefused("too long for it")
        if word == "break":
            raise TransientError("it is down")
        if word == "babble":
            raise InvalidReply("no number")
        return Reply(value={"score": float(word), "clarity": float(word) / 2}, model=self.model)

    async def aclose(self) -> None:
        self.release.set()


class Served:
    """A running server on one port, which can be stopped and started again."""

    server: RewardServer
    engine: RewardEngine

    def __init__(self, engine: Any = None, judge: Any = None, source: Any = None, **options: Any) -> None:
        self._engine, self._judge, self._source, self._options = engine or {}, judge or {}, source or {}, options
        self._port = 0

    async def start(self, **judge: Any) -> None:
        source = {"kind": "http", "url": "http://127.0.0.1:9/score", "version": "1", **self._source}
        config = {
            "sources": {"obedient": source},
            "judges": {"quality": {"kind": "function", "components": ["clarity"], **self._judge, **judge}},
            "engine": {"seed": 7, "max_attempts": 1, "deadline_s": 60, "shared": "off", **self._engine},
        }
        self.source = Obedient()
        self.engine = RewardEngine(config, sources={"obedient": self.source})
        self.server = RewardServer(self.engine, port=self._port, **self._options)
        await self.server.start()
        self.url = self.server.url
        self._port = int(self.url.rpartition(":")[2])

    async def stop(self) -> None:
        await self.engine.aclose()
        await self.server.aclose()

    def remote(self, **server: Any) -> dict[str, Any]:
        """The tree of an engine that scores here."""
        return {"engine": {"server": {"url": self.url, **server} if server else self.url, "deadline_s": 15}}

    @asynccontextmanager
    async def remote_engine(self, **server: Any) -> AsyncIterator[RewardEngine]:
        """An engine that scores here. Making it waits for the server, which is in this event loop."""
        async with await asyncio.to_thread(RewardEngine, self.remote(**server)) as engine:
            yield engine

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """The status, the JSON and the headers of a reply."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        async with aiohttp.ClientSession() as session, session.post(self.url + path, data=data, headers=headers) as got:
            return got.status, json.loads(await got.read()), got.headers

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path, headers=headers) as got:
            return got.status, await got.text()


@asynccontextmanager
async def _serve(**options: Any) -> AsyncIterator[Served]:
    served = Served(**options)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()


@pytest.fixture
def serve():
    """Serves in the event loop of the test."""
    return _serve


@contextmanager
def _serving(**options: Any) -> Iterator[Served]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(_serve(**options)) as served:
        yield served


@pytest.fixture
def serving():
    """Serves in a thread."""
    return _serving


@pytest.fixture
def row():
    """A row whose response says what the source does."""

    def make(word: object = 0.5, **columns: Any) -> dict[str, Any]:
        return {"prompt": "How much?", "response": f"So much: {word}", **columns}

    return make


@pytest.fixture
def sample():
    """A sample whose response says what the source does."""

    def make(word: object, **fields: Any) -> Sample:
        return Sample([{"role": "user", "content": "How much?"}], f"So much: {word}", **fields)

    return make


class Peer:
    """A server on a socket that sends bytes. Its n-th `POST` is answered by the n-th reply, all later ones by the last:
    bytes, or None: nothing comes. `facts`: what each `GET` is answered by in turn, and all later ones by the last.
    """

    def __init__(self, *replies: Any, facts: Sequence[bytes] = (b"",)) -> None:
        self.replies, self.facts, self.bodies = replies, [*facts], list[Any]()
        self._serving = wire.serving(self._answer)

    async def __aenter__(self) -> Peer:
        self.url = (await self._serving.__aenter__()).url
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._serving.__aexit__(*error)

    async def _answer(self, exchange: wire.Exchange) -> None:
        reply: Any = self.facts.pop(0) if self.facts[1:] else self.facts[0]
        if not exchange.head.startswith("GET"):
            self.bodies.append(exchange.json)
            reply = self.replies[min(len(self.bodies), len(self.replies)) - 1]
        if reply is None:
            await exchange.hung_up()
        else:
            exchange.write(reply)
        exchange.writer.close()


def replying(body: Any, status: int = 200, *headers: str, kind: str = "application/json") -> bytes:
    """A whole reply."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + body


def lines(*rows: Any, missing: int = 0) -> bytes:
    """A reply of lines; `missing`: bytes that its head promises and that do not come."""
    body = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    head = replying(body + b"x" * missing, kind="application/x-ndjson")
    return head[: len(head) - missing]
