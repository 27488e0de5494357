"""Readings of the KV caches of servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.sources.replica import Replica
from qreward_plugins.sources.routing import MOST_BYTES, CacheUse, cache_use_in, metrics_url, waiting_in

VLLM = b"""\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="judge"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a } b"} 0.5
vllm:kv_cache_usage_perc_total{engine="0"} 0.9
"""


@pytest.mark.parametrize(
    ("metrics", "use"),
    [
        (VLLM, 0.5),
        (b'vllm:gpu_cache_usage_perc{engine="0"} 0.125', 0.125),
        (b'sglang:token_usage{model_name="m"} 3.0e-1 1700000000\n', 0.3),
        (b"llamacpp:kv_cache_usage_ratio 0\r\n", 0.0),
        (b"sglang:token_usage NaN\n", None),
        (b"sglang:token_usage 1.5\n", None),
        (b"sglang:token_usage -1\n", None),
        (b"sglang:token_usage\n", None),
        (b"sglang:token_usage{}\n", None),
        (b"sglang:token_usage{a\n", None),
        (b"", None),
        (b"<html>", None),
    ],
)
def test_metrics_are_read(metrics: bytes, use: float | None) -> None:
    assert cache_use_in(metrics) == use


@pytest.mark.parametrize(
    ("metrics", "waiting"),
    [
        (b'vllm:num_requests_waiting{engine="0"} 3.0\nvllm:num_requests_waiting{engine="1"} 2.0\n', 5.0),
        (b'vllm:num_requests_waiting_by_reason{engine="0"} 3.0\n', 0.0),
        (b"sglang:num_queue_reqs 7\n", 7.0),
        (b"llamacpp:requests_deferred 1\n", 1.0),
        (b"llamacpp:requests_deferred NaN\nvllm:num_requests_waiting -1\nsglang:num_queue_reqs Inf\n", 0.0),
        (VLLM, 0.0),
    ],
)
def test_what_waits_is_read(metrics: bytes, waiting: float) -> None:
    assert waiting_in(metrics) == waiting


@given(st.binary(max_size=200), st.binary(max_size=40))
def test_any_text_is_read(before: bytes, after: bytes) -> None:
    use = cache_use_in(before + b"\nsglang:token_usage" + after)
    assert use is None or 0.0 <= use <= 1.0


@pytest.mark.parametrize(
    ("base_url", "address"),
    [
        ("http://h:8000/v1", "http://h:8000/metrics"),
        ("http://h:8000", "http://h:8000/metrics"),
        ("http://h:8000/", "http://h:8000/metrics"),
        ("https://h/judge/v1", "https://h/judge/metrics"),
    ],
)
def test_metrics_are_beside_the_api(base_url: str, address: str) -> None:
    assert str(metrics_url(base_url)) == address


@asynccontextmanager
async def served(answer: Callable[[web.Request], web.StreamResponse]) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return answer(request)

    app = web.Application()
    app.router.add_get("/metrics", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@pytest.mark.anyio
async def test_a_reading_is_taken_in_the_background_and_kept_for_a_second() -> None:
    asked = []

    def answer(request: web.Request) -> web.Response:
        asked.append(dict(request.headers))
        return web.Response(body=VLLM)

    async with served(answer) as url:
        loop, replica, cache_use = asyncio.get_running_loop(), Replica(url), CacheUse(verify_tls=True)
        now = loop.time()
        for _ in range(3):
            cache_use.refresh([replica], now)
        assert replica.cache_use(now, 60.0) is None
        assert cache_use._task is not None
        await cache_use._task
        assert replica.cache_use(loop.time(), 60.0) == 0.5
        cache_use.refresh([replica], now + 0.9)
        assert len(asked) == 1
        cache_use.refresh([replica], now + 1.0)
        await cache_use._task
        assert len(asked) == 2
        assert "Authorization" not in asked[0]
        await cache_use.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: web.Response(status=404),
        lambda request: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        lambda request: web.Response(text="no such metric"),
        lambda request: web.Response(body=b"x" * MOST_BYTES + b"\nsglang:token_usage 0.5\n"),
    ],
)
@pytest.mark.anyio
async def test_a_server_that_does_not_say_it_has_no_reading(
    answer: Callable[[web.Request], web.StreamResponse],
) -> None:
    async with served(answer) as url:
        loop, replica, cache_use = asyncio.get_running_loop(), Replica(url), CacheUse(verify_tls=True)
        gone = Replica("http://127.0.0.1:1/v1")
        cache_use.refresh([replica, gone], loop.time())
        assert cache_use._task is not None
        await cache_use._task
        assert replica.cache_use(loop.time(), 60.0) is gone.cache_use(loop.time(), 60.0) is None
        await cache_use.aclose()


@pytest.mark.anyio
async def test_closing_ends_a_reading_that_hangs() -> None:
    hung = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hung.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    cache_use = CacheUse(verify_tls=True)
    cache_use.refresh([Replica(f"http://127.0.0.1:{port}")], asyncio.get_running_loop().time())
    await hung.wait()
    task = cache_use._task
    assert task is not None
    await cache_use.aclose()
    await cache_use.aclose()
    assert task.cancelled()
    cache_use.refresh([Replica(f"http://127.0.0.1:{port}")], 1e9)
    assert cache_use._task is None
    server.close()
    await server.wait_closed()
