"""Reads how much of their KV caches the servers of a source use, from their `/metrics`.

Readings are taken in the background while requests are sent, at most once a second for each replica, so that no request
waits for one. A server that does not answer, or has no such metric, has no reading, and the next strategy decides.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress

import aiohttp
from yarl import URL

from .replica import Replica

EVERY_S = 1.0
"""Seconds between two readings of a replica."""
WITHIN_S = 3.0
"""Seconds for a reading. vLLM under load takes half a second."""
MOST_BYTES = 1_048_576
"""Most bytes of metrics that are read. vLLM has 80 kB."""

_NAMES = (
    b"vllm:kv_cache_usage_perc",
    b"vllm:gpu_cache_usage_perc",
    b"sglang:token_usage",
    b"llamacpp:kv_cache_usage_ratio",
)
"""Shares from 0 to 1 in all of them, vLLM's too. The second is that of older versions of vLLM."""


class CacheUse:
    """Keeps the readings of replicas fresh while they are used. `verify_tls` is that of their source.

    It sends no key: the metrics of these servers are open, and a key must not go where none is needed.
    """

    def __init__(self, *, verify_tls: bool) -> None:
        self._verify_tls = verify_tls
        self._task: asyncio.Task[None] | None = None
        self._read_at = -math.inf
        self._closed = False

    def refresh(self, replicas: Sequence[Replica], now: float) -> None:
        """Start a reading of `replicas` in the background if the last one is old; `now` is the event loop's time."""
        if self._closed or 0 <= now - self._read_at < EVERY_S:
            return
        task = self._task
        if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
            return
        self._read_at = now
        self._task = asyncio.get_running_loop().create_task(self._read_all(tuple(replicas)), name="qreward-kv-cache")

    async def aclose(self) -> None:
        """End the reading that is under way. Idempotent."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait([task])

    async def _read_all(self, replicas: Iterable[Replica]) -> None:
        timeout = aiohttp.ClientTimeout(total=WITHIN_S)
        connector = aiohttp.TCPConnector(ssl=self._verify_tls)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
            await asyncio.gather(*(self._read(session, replica) for replica in replicas))

    async def _read(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        use = None
        try:
            async with session.get(metrics_url(replica.base_url), allow_redirects=False) as reply:
                if reply.status == 200:
                    use = cache_use_in(await _body(reply))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            pass  # a server without metrics has no reading, and what is wrong with it shows in its calls
        replica.cache_read(use, asyncio.get_running_loop().time())


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in reply.content.iter_chunked(65_536):
        body += chunk
        if len(body) > MOST_BYTES:
            break
    return bytes(body[:MOST_BYTES])


def metrics_url(base_url: str) -> URL:
    """Return the address of a server's metrics: `/metrics`, beside the `/v1` of its API."""
    url = URL(base_url)
    path = url.path.rstrip("/")
    return url.with_path(f"{path.removesuffix('/v1')}/metrics")


def cache_use_in(metrics: bytes) -> float | None:
    """Return the share of the KV cache that is in use, from 0 to 1; None if the metrics do not say it. Of several
    engines in a server, the fullest counts.
    """
    found: list[float] = []
    text = b"\n" + metrics
    for name in _NAMES:
        at = text.find(b"\n" + name)
        while at >= 0:
            end = text.find(b"\n", at + 1)
            line = text[at + 1 : None if end < 0 else end]
            # Of the rest of the line, the labels are in braces, and a time may follow the value.
            words = line[len(name) :].rpartition(b"}")[2].split()
            if line[len(name) : len(name) + 1] in (b"{", b" ", b"\t") and words:
                with suppress(ValueError):
                    found.append(float(words[0]))
            at = text.find(b"\n" + name, at + 1)
    return max((share for share in found if 0.0 <= share <= 1.0), default=None)
