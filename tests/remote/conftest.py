"""A reward server in a thread of its own, over an engine whose one source does what the response says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from qreward_plugins import RewardEngine, Sample, TransientError
from qreward_plugins.server.server import RewardServer
from qreward_plugins.sources import Reply, Request


class Words:
    """Its reply is the last word of the response: a number, or "hold", which waits for `release`, or "break"."""

    name, model, slots = "words", "words-1", None

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.holding = threading.Event()
        self.release = threading.Event()
        self.cancelled = threading.Event()

    async def send(self, request: Request, *, on_sent: Any) -> Reply:
        on_sent()
        self.samples.append(request.sample)
        word = request.sample.response.split()[-1]
        if word == "hold":
            self.holding.set()
            try:
                while not self.release.is_set():  # noqa: ASYNC110 -- another thread sets it
                    await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            word = "1"
        if word == "break":
            raise TransientError("it is down")
        return Reply(value={"score": float(word), "clarity": float(word) / 2, "note": "fine"}, model=self.model)

    async def aclose(self) -> None:
        self.release.set()


class Serving:
    """A server on one port, which can be stopped and started again."""

    def __init__(self, portal: Any, options: dict[str, Any], engine: dict[str, Any], judge: dict[str, Any]) -> None:
        self._portal, self._options, self._engine, self._judge = portal, options, engine, judge
        self.source = Words()
        self.port = 0
        self.url = ""
        self.engine: RewardEngine
        self.server: RewardServer | None = None

    def start(self, **judge: Any) -> None:
        config = {
            "sources": {"words": {"kind": "http", "url": "http://127.0.0.1:9/score", "version": "1"}},
            "judges": {"quality": {"kind": "function", "components": ["clarity"], **self._judge, **judge}},
            "engine": {"seed": 7, "max_attempts": 1, "deadline_s": 20, "shared": "off", **self._engine},
        }

        async def open_all() -> None:
            self.engine = RewardEngine(config, sources={"words": self.source})
            self.server = RewardServer(self.engine, port=self.port, **self._options)
            await self.server.start()

        self._portal.call(open_all)
        assert self.server is not None
        self.url = self.server.url
        self.port = int(self.url.rpartition(":")[2])

    def drain(self, within_s: float) -> int:
        assert self.server is not None
        return self._portal.call(self.server.drain, within_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the server's event loop, so that what is sent to it meanwhile arrives at once."""
        stopped, go = threading.Event(), threading.Event()

        async def wait() -> None:
            stopped.set()
            go.wait(10)

        waiting = self._portal.start_task_soon(wait)
        assert stopped.wait(10)
        yield
        go.set()
        waiting.result(10)

    def stop(self, *, engine_first: bool = False) -> None:
        """Stop listening and break all connections, as after a kill; `engine_first`: as after a SIGTERM."""

        async def close_all() -> None:
            server, self.server = self.server, None
            if server is None:
                return
            if engine_first:
                await self.engine.aclose()
            else:
                for connection in list(server._engines._open):
                    transport = connection._socket._req.transport
                    if transport is not None:
                        transport.abort()
            await server.aclose()
            self.source.release.clear()
            await self.engine.aclose()
            self.source.release.clear()

        self._portal.call(close_all)


@contextmanager
def _serving(*, engine: Any = None, judge: Any = None, **options: Any) -> Iterator[Serving]:
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        serving = Serving(portal, options, engine or {}, judge or {})
        serving.start()
        stack.callback(serving.stop)
        yield serving


@pytest.fixture
def serving():
    return _serving


@pytest.fixture
def remote():
    """The tree of an engine that scores at a server."""

    def make(serving: Serving, **server: Any) -> dict[str, Any]:
        return {"engine": {"server": {"url": serving.url, **server} if server else serving.url, "deadline_s": 15}}

    return make
