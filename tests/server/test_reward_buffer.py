"""What the `RewardBuffer` of the molecular verifier promises its callers, each shown for the server and its engine.

The buffer (MolGenDocking, `mol_gen_docking/server_utils/buffer.py`) collects `/get_reward` queries, sends them on after
`buffer_time`, at most `max_batch_size` at once, as one merged list, gives each query its own part of the results, and
fails the queries of a batch that failed. Here the key `batch` of a source says the same: `max_wait_s` and `max_size`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from qreward_plugins import RewardEngine, TransientError
from qreward_plugins.config import Batch
from qreward_plugins.server.server import RewardServer
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply

from ..kit import comes

pytestmark = pytest.mark.anyio


class Buffered:
    """A server whose one source takes several calls in one request, of which it serves one at a time."""

    def __init__(self, *, max_size, max_wait_s, service_s=0.05):
        self.requests: list[list[str]] = []
        self._batch = Batch(max_size=max_size, max_wait_s=max_wait_s)
        self._service_s = service_s
        self.source = SimulatedSource(
            "scorer",
            batch=self._batch,
            behaviour=lambda number, request, now: self._serve(number, [request], now),
            batch_behaviour=self._serve,
            answer=lambda request: Reply(value=float(request.sample.response)),
            concurrency=1,
        )

    def _serve(self, number, requests, now):
        self.requests.append([request.sample.response for request in requests])
        return TransientError("the whole request failed") if "13" in self.requests[-1] else self._service_s

    def tree(self):
        node = {"kind": "http", "url": "http://127.0.0.1:9", "limits": {"concurrency": 1}}
        return {
            "sources": {"scorer": {**node, "batch": self._batch.model_dump()}},
            "judges": {"docking": {"kind": "function"}},
            "engine": {"seed": 7, "max_attempts": 1, "shared": "off", "deadline_s": 20},
        }


async def get_rewards(buffered, queries):
    """The replies to callers that ask at the same time, a few steps after one that keeps the source busy."""
    import aiohttp

    async with (
        RewardEngine(buffered.tree(), sources={"scorer": buffered.source}) as engine,
        RewardServer(engine, port=0) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        async def ask(query):
            metadata = [{} for _ in query] if isinstance(query, list) else {}
            async with session.post(
                server.url + "/get_reward", json={"metadata": metadata, "query": query, "prompts": None}
            ) as reply:
                return reply.status, await reply.json()

        first = asyncio.ensure_future(ask("0"))
        await comes(lambda: buffered.requests)
        replies = await asyncio.gather(*map(ask, queries))
        await first
        return replies


async def test_size_flush_and_merge():
    """Queries of many callers go in one request, and no request holds more than `max_size`."""
    buffered = Buffered(max_size=8, max_wait_s=10.0, service_s=0.15)
    replies = await get_rewards(buffered, [str(number) for number in range(20, 36)])
    assert [reply["reward"] for _, reply in replies] == [float(number) for number in range(20, 36)]
    assert sorted(map(len, buffered.requests)) == [1, 8, 8]


async def test_time_flush():
    """A request that is not full is sent when its time is up, and at once if the source has nothing to do."""
    buffered = Buffered(max_size=1000, max_wait_s=10.0, service_s=0.05)
    began_at = asyncio.get_running_loop().time()
    replies = await get_rewards(buffered, ["1", "2", "3"])
    assert [reply["reward"] for _, reply in replies] == [1.0, 2.0, 3.0]
    assert asyncio.get_running_loop().time() - began_at < 5
    assert sorted(map(len, buffered.requests)) == [1, 3]


async def test_split():
    """Each caller gets the results of its own queries, in its order: lists, single ones, and an empty list."""
    buffered = Buffered(max_size=64, max_wait_s=10.0)
    queries: list[Any] = [["5", "4", "3"], "7", [], ["1", "2"]]
    replies = await get_rewards(buffered, queries)
    assert [status for status, _ in replies] == [200] * 4
    assert replies[0][1]["rewards"] == [5.0, 4.0, 3.0]
    assert replies[1][1]["reward"] == 7.0
    assert replies[2][1]["rewards"] == []
    assert replies[3][1]["rewards"] == [1.0, 2.0]
    assert max(map(len, buffered.requests)) > 3
