"""The other servers of a rollout, in threads of the test process: generation, and a plain scoring endpoint.

Generation answers as SGLang's router and worker do, as far as slime asks them. What it answers follows from the prompt
and the sampling seed (`--sglang-enable-deterministic-inference` gives each sample of a group its own).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from aiohttp import web

from ..judges import EOS, Draft, decode, encode, item_of, never, read_response

ROLLOUT_SEED = 42


class ThreadedServer:
    """An aiohttp application on a loopback port, in a thread with a loop of its own. A context manager."""

    def __init__(self) -> None:
        self.port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name=type(self).__name__, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    def __enter__(self):
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stopping is not None
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application()
        application.add_routes(self.routes())
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._ready.set()
            await self._stopping.wait()
        finally:
            await runner.cleanup()


class GenerateServer(ThreadedServer):
    """The router and the worker in one: /generate, /workers, /abort_request and /v1/loads."""

    def __init__(self, *, holds: Callable[[Draft], bool] = never, loses: Callable[[Draft], bool] = never) -> None:
        """`holds`: drafts whose generation lasts until the first abort. `loses`: drafts whose generation ends as if
        it had been aborted, though nobody asked for that."""
        super().__init__()
        self._holds = holds
        self._loses = loses
        self._aborted: asyncio.Event | None = None
        self._idle: asyncio.Event | None = None
        self._in_flight = 0
        self._aborts = 0

    def routes(self) -> list[web.RouteDef]:
        self._aborted, self._idle = asyncio.Event(), asyncio.Event()
        return [
            web.post("/generate", self._generate),
            web.get("/workers", self._workers),
            web.post("/abort_request", self._abort),
            web.get("/v1/loads", self._loads),
        ]

    async def _generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        seed = asked["sampling_params"]["sampling_seed"]
        draft = Draft(item_of(decode(asked["input_ids"])), seed - ROLLOUT_SEED)
        self._in_flight += 1
        try:
            if self._holds(draft) and not self._aborts:
                await self._aborted.wait()
                return self._answer(asked, "", "abort")
            if self._loses(draft):
                return self._answer(asked, "", "abort")
            return self._answer(asked, draft.response, "stop")
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _answer(self, asked: dict, text: str, reason: str) -> web.Response:
        tokens = [*encode(text), *([EOS] if reason == "stop" else [])]
        meta = {
            "id": "0",
            "finish_reason": {"type": reason},
            "weight_version": "1",
            "prompt_tokens": len(asked["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "e2e_latency": 0.01,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        }
        return web.json_response({"text": text, "meta_info": meta})

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": f"http://{request.host}"}]})

    async def _abort(self, request: web.Request) -> web.Response:
        self._aborts += 1
        self._aborted.set()
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()
        return web.json_response({})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self._in_flight, "num_waiting_reqs": 0}]})


class ScoreServer(ThreadedServer):
    """What `--rm-url` points to: prompt, response and label in, a number or a mapping out."""

    def __init__(self, *, mapping: bool = False) -> None:
        super().__init__()
        self._mapping = mapping

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/score"

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/score", self._score)]

    async def _score(self, request: web.Request) -> web.Response:
        asked = await request.json()
        draft = read_response(asked["response"])
        assert item_of(asked["prompt"]) == draft.item
        return web.json_response({"score": draft.reward, "length": 1.0} if self._mapping else draft.reward)
