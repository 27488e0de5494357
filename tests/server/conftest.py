"""A reward server on a real socket, over an engine whose one source does what the response says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from qreward_plugins import InvalidReply, RewardEngine, Sample, SampleRefused, TransientError
from qreward_plugins.server.server import RewardServer
from qreward_plugins.sources import Reply, Request

pytestmark = pytest.mark.anyio


class Obedient:
    """Its reply is the last word of the response: a number, or what goes wrong. "hold" waits for `release`."""

    name, model, slots = "obedient", "obedient-1", None

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.release = asyncio.Event()
        self.holding = asyncio.Event()
        self.cancelled = 0

    async def send(self, request: Request, *, on_sent: Any) -> Reply:
        on_sent()
        self.samples.append(request.sample)
        word = request.sample.response.split()[-1]
        if word == "hold":
            self.holding.set()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
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
    """The parts of a running server."""

    def __init__(self, server: RewardServer, engine: RewardEngine, source: Obedient) -> None:
        self.server, self.engine, self.source = server, engine, source
        self.url = server.url

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
async def _serve(*, engine: Any = None, **options: Any) -> AsyncIterator[Served]:
    source = Obedient()
    config = {
        "sources": {"obedient": {"kind": "http", "url": "http://127.0.0.1:9/score"}},
        "judges": {"quality": {"kind": "function"}},
        "engine": {"seed": 7, "max_attempts": 1, "deadline_s": 20, "shared": "off", **(engine or {})},
    }
    async with (
        RewardEngine(config, sources={"obedient": source}) as opened,
        RewardServer(opened, port=0, **options) as server,
    ):
        yield Served(server, opened, source)


@pytest.fixture
def serve():
    return _serve


@pytest.fixture
def row():
    """A row whose response says what the source does."""

    def make(word: object = 0.5, **columns: Any) -> dict[str, Any]:
        return {"prompt": "How much?", "response": f"So much: {word}", **columns}

    return make
