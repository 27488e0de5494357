"""The control routes of SGLang 0.5.23, as its source has them; there is no build of it for a CPU."""

from __future__ import annotations

import pytest
from aiohttp import web

from qreward_plugins.replicas.control import Channel, ControlFailed, SGLangControl
from qreward_plugins.replicas.operations import ServerOperations
from qreward_plugins.replicas.spec import PoolSpec
from qreward_plugins.replicas.topology import Topology

pytestmark = pytest.mark.anyio
KEY = {"Authorization": "Bearer sk-own"}


class Server:
    """Answers as SGLang does: JSON to an update, a text to a flush, and nothing to memory."""

    def __init__(self) -> None:
        self.version = "default"
        self.told: list[tuple[str, str]] = []
        self.busy = False

    async def __aenter__(self) -> Channel:
        app = web.Application()
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_route("*", "/flush_cache", self.flush)
        app.router.add_get("/model_info", self.info)
        app.router.add_post("/release_memory_occupation", self.memory)
        app.router.add_post("/resume_memory_occupation", self.memory)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0]
        return Channel(f"http://{host}:{port}", KEY)

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.told.append((body["model_path"], request.headers.get("Authorization", "")))
        if body["model_path"] == "/none":
            return web.json_response(
                {"success": False, "message": "no such model", "num_paused_requests": 0}, status=400
            )
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def flush(self, request: web.Request) -> web.Response:
        assert float(request.query["timeout"]) > 0
        if self.busy:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": self.version})

    async def memory(self, request: web.Request) -> web.Response:
        await request.json()
        return web.json_response(None)


async def test_an_update_from_disk():
    control, server = SGLangControl(), Server()
    async with server as channel:
        await control.load(channel, "/new", "7", within_s=5)
        await control.reset_cache(channel)
        assert await control.version(channel) == "7"
        assert server.told == [("/new", "Bearer sk-own")]
        with pytest.raises(ControlFailed, match="no such model"):
            await control.load(channel, "/none", "8", within_s=5)
        server.busy = True
        with pytest.raises(ControlFailed, match="Flush cache failed"):
            await control.reset_cache(channel)


async def test_memory():
    async with Server() as channel:
        await SGLangControl().sleep(channel, 1, within_s=5)
        await SGLangControl().wake(channel, "weights", within_s=5)


@pytest.mark.parametrize(("stated", "told"), [(["same", "same"], ""), (["old", "new"], "new"), ([None, None], "")])
async def test_a_checksum_that_never_changes_is_no_identity_of_weights_from_memory(stated, told):
    """Otherwise the journal would answer with verdicts of the earlier weights."""

    class Stated(SGLangControl):
        async def receive(self, channel, bodies, version, *, within_s):
            assert bodies == [{"tensors": 1}]

        async def reset_cache(self, channel):
            pass

        async def version(self, channel):
            return "step-1"

        async def checksum(self, channel):
            return stated.pop(0)

    spec = PoolSpec("own", "sglang", "judge", Topology())
    operations = ServerOperations(spec, Stated(), "http://127.0.0.1:9")
    assert await operations.receive(None, [{"tensors": 1}], "step-1") == {"identity": told}
