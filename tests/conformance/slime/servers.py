"""The server that generates, in a thread of the test process.

It answers as SGLang's router and worker do, as far as slime asks them. What it answers follows from the prompt
and the sampling seed (`--sglang-enable-deterministic-inference` gives each sample of a group its own).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from qreward_plugins.testing.fake_trainer import BackgroundLoop

from ..judges import EOS, Draft, decode, encode, item_of, never

ROLLOUT_SEED = 42


class GenerateServer:
    """The router and the worker in one, on a loopback port: /generate, /workers, /abort_request and /v1/loads. A
    context manager.
    """

    def __init__(self, *, holds: Callable[[Draft], bool] = never, loses: Callable[[Draft], bool] = never) -> None:
        """`holds`: drafts whose generation lasts until the first abort. `loses`: drafts whose generation ends as if
        it had been aborted, though nobody asked for that."""
        self._loop = BackgroundLoop("generate-server", type(self).__name__)
        self._holds = holds
        self._loses = loses
        self._in_flight = 0
        self._aborts = 0

    def __enter__(self):
        self._loop.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        self._aborted, self._idle = asyncio.Event(), asyncio.Event()
        application = web.Application()
        application.router.add_post("/generate", self._generate)
        application.router.add_get("/workers", self._workers)
        application.router.add_post("/abort_request", self._abort)
        application.router.add_get("/v1/loads", self._loads)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

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
