"""The official SDKs before a real vLLM: over the transports, and over the proxy of the reward server. Which bytes go
each way, and that limits hold, is tested against the judge server (tests/server).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from .servers import metric

for library in ("anthropic", "httpx2", "openai"):
    pytest.importorskip(library)

from tests.server.sdks import SDKS, WAYS, Chat, Responses, tree_of  # noqa: E402

pytestmark = pytest.mark.anyio
TOKENS = 6


@pytest.fixture(scope="module")
def url(served: Callable[[str], str]) -> str:
    return served("chat")


@pytest.fixture(params=SDKS, ids=lambda sdk: sdk.dialect)
def sdk(request: Any) -> Any:
    return request.param


@pytest.fixture(params=WAYS, ids=["transport", "server"])
def door(request: Any, url: str, sdk: Any) -> Any:
    """A client of the SDK, when it is entered."""
    node = {"model": "chat", "dialect": sdk.dialect, "timeouts": {"total_s": 300}, "limits": {"concurrency": 16}}
    return request.param(sdk, tree_of(f"{url}/v1", engine={"deadline_s": 300}, **node), max_retries=0)


def asked(sdk: Any, text: str, tokens: int = TOKENS, *, stream: bool = False) -> dict[str, Any]:
    """What a call says, in the words of an SDK. Its answer has that many tokens."""
    options: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
    if stream and sdk is Chat:
        options["stream_options"] = {"include_usage": True}
    if sdk is Responses:
        return {"input": text, "max_output_tokens": tokens, **options}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, **options}


async def becomes(url: str, busy: bool) -> None:
    """Wait until vLLM runs something, or nothing."""
    async with asyncio.timeout(30):
        while bool(await asyncio.to_thread(metric, url, "num_requests_running")) != busy:
            pass


async def test_calls_and_streams(sdk: Any, door: Any) -> None:
    async def call(number: int) -> str:
        text = f"Why is {number} – or “{number}²” – a number? 数 🙂"
        if number % 2:
            return await client.ask(**asked(sdk, text))
        return "".join([piece async for piece in client.stream(**asked(sdk, text, stream=True))])

    async with door as client:
        assert all(await asyncio.gather(*(call(number) for number in range(8))))


async def test_errors(sdk: Any, door: Any) -> None:
    """vLLM's own refusal comes as it is, and blames nobody; an unknown model does not get there."""
    async with door as client:
        with pytest.raises(sdk.errors.BadRequestError, match="maximum context length") as caught:
            await client.ask(**asked(sdk, "word " * 3000))
        assert caught.value.status_code == 400
        with pytest.raises(sdk.errors.BadRequestError, match="maximum context length"):
            assert [piece async for piece in client.stream(**asked(sdk, "word " * 3000, stream=True))] == []
        with pytest.raises(sdk.errors.NotFoundError, match="no model 'nope'; models: gpt-"):
            await client.ask(**asked(sdk, "Hi"), model="nope")
        for _ in range(3):
            await client.ask(**asked(sdk, "Hi"))


async def test_a_stream_that_nobody_reads_any_more(url: str, sdk: Any, door: Any, say: Any) -> None:
    """vLLM stops to work for it."""
    streams, bound = 8, 1800

    async def begin(number: int) -> None:
        stream = client.stream(**asked(sdk, f"Why {number}?", bound, stream=True))
        async for piece in stream:
            if piece:
                break
        await stream.aclose()

    async with door as client:
        before = metric(url, "generation_tokens_total")
        await asyncio.gather(*(begin(number) for number in range(streams)))
        await becomes(url, busy=False)
        tokens = metric(url, "generation_tokens_total") - before
        say(f"{sdk.dialect}: {streams} streams dropped, {tokens:g} of {streams * bound} tokens")
        assert tokens < streams * bound / 2
        # One that is cancelled while it waits for its first part.
        task = asyncio.ensure_future(client.ask(**asked(sdk, "Why?", bound)))
        await becomes(url, busy=True)
        task.cancel()
        await asyncio.wait([task])
        await becomes(url, busy=False)
        assert await client.ask(**asked(sdk, "Hi")) is not None
