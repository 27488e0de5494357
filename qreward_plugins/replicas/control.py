"""The control routes of servers: pause, load weights, reset the prefix cache, sleep and wake.

`VLLMControl` and `SGLangControl` know the routes of their servers. A server without them is updated by a restart, and
sleeps by being stopped, which works for every program.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson
from yarl import URL

SLEEP_WITHIN_S = 120.0
"""Seconds that a server has to free its devices. It copies the weights to main memory at some gigabytes a second."""
MOST_BYTES = 2**20
"""Most bytes of a reply. The metrics of vLLM have 80 kB."""
_DETAIL_CHARS = 300
_RESET_TRIES = 20
_RESET_EVERY_S = 0.25
_QUICK_S = 60.0


class ServerFailed(Exception):
    """A server did not get ready, has ended, or refused an order. `log`: the last lines that it wrote, not redacted."""

    def __init__(self, problem: str, log: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.log = log


async def fetched(
    method: str, url: str | URL, *, within_s: float, verify_tls: bool = True, **options: Any
) -> tuple[int, bytes | None]:
    """Ask a server of our own once, without redirects. Return the status, and the body; None if that has more than
    `MOST_BYTES`. `options` are those of aiohttp.

    Raises what aiohttp raises, and `asyncio.TimeoutError`.
    """
    async with (
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=within_s),
            connector=aiohttp.TCPConnector(ssl=verify_tls),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            trust_env=False,
        ) as session,
        session.request(method, url, allow_redirects=False, **options) as reply,
    ):
        body = bytearray()
        async for piece in reply.content.iter_any():
            body += piece
            if len(body) > MOST_BYTES:
                return reply.status, None
        return reply.status, bytes(body)


class Control(ABC):
    """Controls the server at `url` while it runs. `headers` are sent with each request; `within_s` is the longest time
    in seconds to load weights, or to wake up. Every method raises `ServerFailed`.
    """

    OPERATIONS = ("pause", "resume", "load", "receive", "sleep", "wake")
    """What a pool may ask for by name."""

    def __init__(self, url: str, headers: Mapping[str, str], within_s: float) -> None:
        self._url = url
        self._headers = {**headers, "Content-Type": "application/json"}
        self._within_s = within_s

    async def pause(self, within_s: float) -> None:  # noqa: B027 -- a default
        """Wait until the requests under way have ended, and start no other one until `resume`. Default: does nothing,
        because the pool has drained the server.
        """

    async def resume(self) -> None:  # noqa: B027 -- a default
        """Start requests again after `pause`. Default: does nothing."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free the memory of the devices. A trainer waits for it, so it may take `SLEEP_WITHIN_S` only."""

    @abstractmethod
    async def wake(self) -> None:
        """Allocate the memory of the devices again."""

    @abstractmethod
    async def load(self, path: str) -> None:
        """Load the checkpoint `path` in place of the weights, and empty the prefix cache, which was computed with the
        earlier ones.
        """

    @abstractmethod
    async def receive(self, begin: Mapping[str, Any] | None, bodies: Sequence[Mapping[str, Any]], version: str) -> None:
        """Receive tensors from the memory of a trainer, and empty the prefix cache. `begin` joins the transfer."""

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        within_s: float = 0.0,
        query: Sequence[tuple[str, str]] = (),
        answers_json: bool = True,
    ) -> Any:
        """Post JSON, and return the JSON of the reply; None for an empty reply, and without `answers_json`."""
        within_s = within_s or self._within_s
        try:
            sent: dict[str, Any] = {"params": query, "data": orjson.dumps(body or {}), "headers": self._headers}
            status, content = await fetched("POST", self._url + path, within_s=within_s, **sent)
            if content is None:
                raise ServerFailed(f"{path}: its answer is too long")
            if status == 200:
                return orjson.loads(content) if answers_json and content.strip() else None
            problem = f"it answered {status} ({content[:_DETAIL_CHARS].decode('utf-8', 'replace').strip()})"
        except asyncio.TimeoutError:
            problem = f"it gave no answer within {within_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            problem = f"the connection failed ({type(error).__name__})"
        except ValueError:
            problem = "its answer is not JSON"
        raise ServerFailed(f"{path}: {problem}")


class VLLMControl(Control):
    """vLLM in its development mode (`VLLM_SERVER_DEV_MODE=1`)."""

    async def pause(self, within_s: float) -> None:
        await self._post("/pause", query=[("mode", "wait")], within_s=within_s)

    async def resume(self) -> None:
        await self._post("/resume", within_s=_QUICK_S)

    async def sleep(self) -> None:
        # Level 1 keeps the weights in the memory of the machine.
        await self._post("/sleep", query=[("level", "1"), ("mode", "wait")], within_s=SLEEP_WITHIN_S)

    async def wake(self) -> None:
        await self._post("/wake_up")

    async def load(self, path: str) -> None:
        # The weight transfer of vLLM has no backend for files. This call needs none, and loads on the devices.
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        await self._reset_cache()

    async def receive(self, begin: Mapping[str, Any] | None, bodies: Sequence[Mapping[str, Any]], version: str) -> None:
        if begin is not None:
            await self._post("/init_weight_transfer_engine", {"init_info": begin})
        await self._post("/start_weight_update")
        for body in bodies:
            await self._post("/update_weights", {"update_info": body})
        await self._post("/finish_weight_update", {"weight_version": version})
        await self._reset_cache()

    async def _reset_cache(self) -> None:
        for _ in range(_RESET_TRIES):
            reply = await self._post("/reset_prefix_cache", within_s=_QUICK_S)
            # `success` is false while requests hold blocks of the cache.
            if not (isinstance(reply, Mapping) and reply.get("success") is False):
                return
            await asyncio.sleep(_RESET_EVERY_S)
        raise ServerFailed("/reset_prefix_cache: requests hold blocks of the cache")


class SGLangControl(Control):
    """SGLang, which updates its weights between two steps; for `sleep` it is started with `--enable-memory-saver`."""

    async def sleep(self) -> None:
        await self._post("/release_memory_occupation", within_s=SLEEP_WITHIN_S)

    async def wake(self) -> None:
        await self._post("/resume_memory_occupation")

    async def load(self, path: str) -> None:
        await self._done("/update_weights_from_disk", {"model_path": path, "flush_cache": True})
        await self._reset_cache()

    async def receive(self, begin: Mapping[str, Any] | None, bodies: Sequence[Mapping[str, Any]], version: str) -> None:
        if begin is not None:
            await self._done("/init_weights_update_group", begin)
        for number, body in enumerate(bodies, 1):
            # Tensors travel in the body itself, or by the group that was joined.
            route = "tensor" if "serialized_named_tensors" in body else "distributed"
            last = number == len(bodies)
            more = {"flush_cache": last, **({"weight_version": version} if last else {})}
            await self._done(f"/update_weights_from_{route}", {**body, **more})
        await self._reset_cache()

    async def _reset_cache(self) -> None:
        # SGLang answers with a text; with 400 if requests hold the cache for longer. Older versions ignore `timeout`.
        patience = [("timeout", f"{_RESET_TRIES * _RESET_EVERY_S:g}")]
        await self._post("/flush_cache", query=patience, within_s=_QUICK_S, answers_json=False)

    async def _done(self, path: str, body: Mapping[str, Any]) -> None:
        reply = await self._post(path, body)
        # SGLang answers 200 also if an update failed.
        if isinstance(reply, Mapping) and reply.get("success") is False:
            raise ServerFailed(f"{path}: {str(reply.get('message', ''))[:_DETAIL_CHARS]}")
