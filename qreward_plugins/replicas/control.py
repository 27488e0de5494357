"""The control routes of servers: pause, load weights, reset the prefix cache, sleep and wake.

`VLLMControl` and `SGLangControl` know the routes of their servers. A server without them is updated by a restart, and
sleeps by being stopped, which works for every program.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

_REPLY_BYTES = 64 * 2**20
"""Most bytes of a reply. The checksums of a large model take a few megabytes."""
_DETAIL_CHARS = 300
_RESET_TRIES = 20
_RESET_EVERY_S = 0.25
_QUICK_S = 60.0


class ControlFailed(Exception):
    """A request to a control route failed. The message has the route and what the server answered."""


class Channel:
    """Sends requests to the control routes of the server at `url`. `headers` are sent with each of them."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = url
        self._headers = {**(headers or {}), "Content-Type": "application/json"}

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        within_s: float,
        query: Sequence[tuple[str, str]] = (),
        answers_json: bool = True,
    ) -> Any:
        """Post JSON, and return the JSON of the reply; None for an empty reply, and without `answers_json`.

        Raises `ControlFailed` for any status but 200, and if the reply takes longer than `within_s` seconds.
        """
        return await self._ask("POST", path, {} if body is None else body, within_s, query, answers_json)

    async def get(self, path: str) -> Any:
        """Return the JSON at `path`; None if the request fails."""
        try:
            return await self._ask("GET", path, None, _QUICK_S)
        except ControlFailed:
            return None

    async def _ask(
        self,
        method: str,
        path: str,
        body: Any,
        within_s: float,
        query: Sequence[tuple[str, str]] = (),
        answers_json: bool = True,
    ) -> Any:
        problem = ""
        try:
            timeout = aiohttp.ClientTimeout(total=within_s)
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                session.request(
                    method,
                    self._url + path,
                    params=list(query),
                    data=None if body is None else orjson.dumps(body),
                    headers=self._headers,
                    allow_redirects=False,
                ) as reply,
            ):
                content = bytearray()
                async for piece in reply.content.iter_any():
                    content += piece
                    if len(content) > _REPLY_BYTES:
                        raise ControlFailed(f"{path}: its answer is too long")
                if reply.status == 200:
                    return orjson.loads(content) if answers_json and content.strip() else None
                problem = f"it answered {reply.status} ({content[:_DETAIL_CHARS].decode('utf-8', 'replace').strip()})"
        except asyncio.TimeoutError:
            problem = f"it gave no answer within {within_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            problem = f"the connection failed ({type(error).__name__})"
        except ValueError:
            problem = "its answer is not JSON"
        raise ControlFailed(f"{path}: {problem}")


class Control(ABC):
    """The requests that control one kind of server while it runs.

    `within_s` is the longest time in seconds that the server may take. Every method raises `ControlFailed`, except
    `version` and `checksum`, which return None.
    """

    @abstractmethod
    async def pause(self, channel: Channel, *, within_s: float) -> None:
        """Wait until the requests under way have ended, and start no other one until `resume`."""

    @abstractmethod
    async def resume(self, channel: Channel) -> None:
        """Start requests again after `pause`."""

    @abstractmethod
    async def load(self, channel: Channel, path: str, version: str, *, within_s: float) -> None:
        """Load the checkpoint `path` in place of the weights."""

    @abstractmethod
    async def join(self, channel: Channel, body: Mapping[str, Any], *, within_s: float) -> None:
        """Join a transfer of tensors from the memory of a trainer."""

    @abstractmethod
    async def receive(
        self, channel: Channel, bodies: Sequence[Mapping[str, Any]], version: str, *, within_s: float
    ) -> None:
        """Receive the tensors of a transfer in place of the weights."""

    @abstractmethod
    async def reset_cache(self, channel: Channel) -> None:
        """Empty the prefix cache, which was computed with the earlier weights."""

    async def version(self, channel: Channel) -> str | None:
        """Return the version of the weights that the server states; None if it states none."""
        return None

    async def checksum(self, channel: Channel) -> str | None:
        """Return a hash of the weights in the memory of the server; None if it has no checksum."""
        return None

    @abstractmethod
    async def sleep(self, channel: Channel, level: int, *, within_s: float) -> None:
        """Free the memory of the devices."""

    @abstractmethod
    async def wake(self, channel: Channel, part: str, *, within_s: float) -> None:
        """Allocate the memory of the devices again. `part` is `weights`, `kv_cache` or `all`."""


class VLLMControl(Control):
    """vLLM in its development mode (`VLLM_SERVER_DEV_MODE=1`)."""

    async def pause(self, channel: Channel, *, within_s: float) -> None:
        await channel.post("/pause", query=[("mode", "wait")], within_s=within_s)

    async def resume(self, channel: Channel) -> None:
        await channel.post("/resume", within_s=_QUICK_S)

    async def load(self, channel: Channel, path: str, version: str, *, within_s: float) -> None:
        # The weight transfer of vLLM has no backend for files. This call needs none, and loads on the devices.
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await channel.post("/collective_rpc", body, within_s=within_s)
        await channel.post("/update_weight_version", {"new_version": version}, within_s=_QUICK_S)

    async def join(self, channel: Channel, body: Mapping[str, Any], *, within_s: float) -> None:
        await channel.post("/init_weight_transfer_engine", {"init_info": body}, within_s=within_s)

    async def receive(
        self, channel: Channel, bodies: Sequence[Mapping[str, Any]], version: str, *, within_s: float
    ) -> None:
        await channel.post("/start_weight_update", within_s=within_s)
        for body in bodies:
            await channel.post("/update_weights", {"update_info": body}, within_s=within_s)
        await channel.post("/finish_weight_update", {"weight_version": version}, within_s=within_s)

    async def reset_cache(self, channel: Channel) -> None:
        for _ in range(_RESET_TRIES):
            reply = await channel.post("/reset_prefix_cache", within_s=_QUICK_S)
            # `success` is false while requests hold blocks of the cache.
            if not (isinstance(reply, Mapping) and reply.get("success") is False):
                return
            await asyncio.sleep(_RESET_EVERY_S)
        raise ControlFailed("/reset_prefix_cache: requests hold blocks of the cache")

    async def version(self, channel: Channel) -> str | None:
        return _text((await channel.get("/weight_info")), "weight_version")

    async def checksum(self, channel: Channel) -> str | None:
        try:
            reply = await channel.post("/weight_checker", {"action": "checksum"}, within_s=10 * _QUICK_S)
        except ControlFailed:  # earlier versions have no such route
            return None
        return _hash_of(reply.get("checksums")) if isinstance(reply, Mapping) else None

    async def sleep(self, channel: Channel, level: int, *, within_s: float) -> None:
        await channel.post("/sleep", query=[("level", str(level)), ("mode", "wait")], within_s=within_s)

    async def wake(self, channel: Channel, part: str, *, within_s: float) -> None:
        await channel.post("/wake_up", query=[] if part == "all" else [("tags", part)], within_s=within_s)


class SGLangControl(Control):
    """SGLang; for `sleep` it is started with `--enable-memory-saver`."""

    async def pause(self, channel: Channel, *, within_s: float) -> None:
        """Do nothing: the pool has drained the server, and SGLang updates its weights between two steps."""

    async def resume(self, channel: Channel) -> None:
        """Do nothing, as `pause` does nothing."""

    async def load(self, channel: Channel, path: str, version: str, *, within_s: float) -> None:
        body = {"model_path": path, "flush_cache": True, "weight_version": version}
        await self._done(channel, "/update_weights_from_disk", body, within_s)

    async def join(self, channel: Channel, body: Mapping[str, Any], *, within_s: float) -> None:
        await self._done(channel, "/init_weights_update_group", body, within_s)

    async def receive(
        self, channel: Channel, bodies: Sequence[Mapping[str, Any]], version: str, *, within_s: float
    ) -> None:
        for number, body in enumerate(bodies, 1):
            # Tensors travel in the body itself, or by the group that `join` has joined.
            route = "tensor" if "serialized_named_tensors" in body else "distributed"
            last = number == len(bodies)
            more: Mapping[str, Any] = (
                {"flush_cache": last, "weight_version": version} if last else {"flush_cache": False}
            )
            await self._done(channel, f"/update_weights_from_{route}", {**body, **more}, within_s)

    async def reset_cache(self, channel: Channel) -> None:
        # SGLang answers with a text; with 400 if requests hold the cache for longer. Older versions ignore `timeout`.
        patience = [("timeout", f"{_RESET_TRIES * _RESET_EVERY_S:g}")]
        await channel.post("/flush_cache", query=patience, within_s=_QUICK_S, answers_json=False)

    async def version(self, channel: Channel) -> str | None:
        for path in ("/model_info", "/get_weight_version"):  # the second one was removed
            stated = _text(await channel.get(path), "weight_version")
            if stated is not None:
                return stated
        return None

    async def sleep(self, channel: Channel, level: int, *, within_s: float) -> None:
        await channel.post("/release_memory_occupation", within_s=within_s)

    async def wake(self, channel: Channel, part: str, *, within_s: float) -> None:
        body = {} if part == "all" else {"tags": [part]}
        await channel.post("/resume_memory_occupation", body, within_s=within_s)

    async def _done(self, channel: Channel, path: str, body: Mapping[str, Any], within_s: float) -> None:
        reply = await channel.post(path, body, within_s=within_s)
        # SGLang answers 200 also if an update failed.
        if isinstance(reply, Mapping) and reply.get("success") is False:
            raise ControlFailed(f"{path}: {str(reply.get('message', ''))[:_DETAIL_CHARS]}")


def _text(reply: Any, key: str) -> str | None:
    value = reply.get(key) if isinstance(reply, Mapping) else None
    return value if isinstance(value, str) else None


def _hash_of(checksums: Any) -> str | None:
    if not isinstance(checksums, Mapping) or not checksums:
        return None
    text = orjson.dumps(dict(checksums), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=16).hexdigest()
