"""The control routes of SGLang 0.5.23, as its source has them; there is no build of it for a CPU."""

from __future__ import annotations

import pytest
from aiohttp import web

from qreward_plugins.replicas.control import ServerFailed, SGLangControl

pytestmark = pytest.mark.anyio
KEY = {"Authorization": "Bearer sk-own"}


class Server:
    """Answers as SGLang does: JSON to an update, a text to a flush, and nothing to memory."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.busy = False

    async def __aenter__(self) -> SGLangControl:
        app = web.Application()
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_route("*", "/flush_cache", self.flush)
        app.router.add_post("/release_memory_occupation", self.memory)
        app.router.add_post("/resume_memory_occupation", self.memory)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0]
        return SGLangControl(f"http://{host}:{port}", KEY, 5.0)

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.told.append((body["model_path"], request.headers.get("Authorization", "")))
        if body["model_path"] == "/none":
            return web.json_response(
                {"success": False, "message": "no such model", "num_paused_requests": 0}, status=400
            )
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def flush(self, request: web.Request) -> web.Response:
        assert float(request.query["timeout"]) > 0
        if self.busy:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")

    async def memory(self, request: web.Request) -> web.Response:
        await request.json()
        return web.json_response(None)


async def test_an_update_from_disk():
    server = Server()
    async with server as control:
        await control.load("/new")
        assert server.told == [("/new", "Bearer sk-own")]
        with pytest.raises(ServerFailed, match="no such model"):
            await control.load("/none")
        server.busy = True
        with pytest.raises(ServerFailed, match="Flush cache failed"):
            await control.load("/new")


async def test_memory():
    async with Server() as control:
        await control.sleep()
        await control.wake()
