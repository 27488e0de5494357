"""The official SDKs before a real vLLM: over the transports, and over the proxy of `qreward serve`. Which bytes go each
way, and that limits hold, is tested against the judge server (tests/server).
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from qreward_plugins.server.transport import QRewardTransport
from tests.kit import Program

anthropic = pytest.importorskip("anthropic")
httpx2 = pytest.importorskip("httpx2")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.anyio


def generated(url: str) -> int:
    """Return how many tokens the server has generated since its start."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        found = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", reply.read().decode(), re.MULTILINE)
    return sum(int(float(count)) for count in found)


def running(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        [count] = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", reply.read().decode(), re.MULTILINE)
    return float(count)


TOKENS = 6


class Chat:
    """OpenAI's SDK on chat completions."""

    dialect, library = "openai", openai

    def __init__(self, http: Any, url: str) -> None:
        self.client = openai.AsyncOpenAI(http_client=http, base_url=f"{url}/v1", api_key="any", max_retries=0)

    async def ask(self, text: str, tokens: int = TOKENS, model: str = "gpt-5") -> str:
        messages: Any = [{"role": "user", "content": text}]
        reply = await self.client.chat.completions.create(model=model, messages=messages, max_tokens=tokens)
        assert reply.model == "chat"
        return reply.choices[0].message.content

    async def stream(self, text: str, tokens: int = TOKENS) -> AsyncIterator[str]:
        messages: Any = [{"role": "user", "content": text}]
        options = {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
        async with await self.client.chat.completions.create(
            model="gpt-5", messages=messages, max_tokens=tokens, stream=True, **options
        ) as chunks:
            async for chunk in chunks:
                yield (chunk.choices[0].delta.content or "") if chunk.choices else ""


class Responses(Chat):
    """OpenAI's SDK on responses."""

    dialect = "responses"

    async def ask(self, text: str, tokens: int = TOKENS, model: str = "gpt-5") -> str:
        reply = await self.client.responses.create(model=model, input=text, max_output_tokens=tokens)
        assert reply.model == "chat"
        return reply.output_text

    async def stream(self, text: str, tokens: int = TOKENS) -> AsyncIterator[str]:
        options = {"extra_body": {"ignore_eos": True}}
        async with await self.client.responses.create(
            model="gpt-5", input=text, max_output_tokens=tokens, stream=True, **options
        ) as events:
            async for event in events:
                yield event.delta if event.type == "response.output_text.delta" else ""


class Messages:
    """Anthropic's SDK."""

    dialect, library = "anthropic", anthropic

    def __init__(self, http: Any, url: str) -> None:
        self.client = anthropic.AsyncAnthropic(http_client=http, base_url=url, api_key="any", max_retries=0)

    async def ask(self, text: str, tokens: int = TOKENS, model: str = "gpt-5") -> str:
        messages: Any = [{"role": "user", "content": text}]
        reply = await self.client.messages.create(model=model, messages=messages, max_tokens=tokens)
        assert reply.model == "chat"
        return "".join(block.text for block in reply.content)

    async def stream(self, text: str, tokens: int = TOKENS) -> AsyncIterator[str]:
        messages: Any = [{"role": "user", "content": text}]
        async with self.client.messages.stream(
            model="gpt-5", messages=messages, max_tokens=tokens, extra_body={"ignore_eos": True}
        ) as stream:
            async for piece in stream.text_stream:
                yield piece


SDKS: list[Any] = [Chat, Responses, Messages]


def tree(url: str, sdk: Any) -> dict[str, Any]:
    node = {"kind": "openai", "base_url": f"{url}/v1", "model": "chat", "dialect": sdk.dialect}
    return {
        "sources": {"own": {**node, "timeouts": {"total_s": 300}, "limits": {"concurrency": 16}}},
        "models": {"gpt-*": {"sources": "own"}},
        "engine": {"seed": 1, "deadline_s": 300, "shared": "off"},
    }


@asynccontextmanager
async def by_transport(config: Mapping[str, Any], sdk: Any, folder: Path) -> AsyncIterator[Any]:
    async with httpx2.AsyncClient(transport=QRewardTransport(config)) as http:
        yield sdk(http, "http://no.host.of.this.name.example")


@asynccontextmanager
async def by_server(config: Mapping[str, Any], sdk: Any, folder: Path) -> AsyncIterator[Any]:
    path = folder / "judges.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    with Program("-m", "qreward_plugins.cli", "serve", path, "--port", "0") as server:
        line = await asyncio.to_thread(server.line, "reward server at ")
        async with httpx2.AsyncClient(timeout=300) as http:
            yield sdk(http, line.partition("reward server at ")[2].split(";")[0])
        assert (await asyncio.to_thread(server.end, signal.SIGTERM))[0] == 0


@pytest.fixture(params=[by_transport, by_server], ids=["transport", "serve"])
def door(request: Any) -> Any:
    return request.param


@pytest.fixture(params=SDKS, ids=lambda sdk: sdk.dialect)
def sdk(request: Any) -> Any:
    return request.param


@pytest.fixture(scope="module")
def url(served: Callable[[str], str]) -> str:
    return served("chat")


def settled(url: str, within_s: float = 10.0) -> float:
    """Wait until vLLM runs nothing; return the seconds that it took."""
    began = time.monotonic()
    while running(url):
        assert time.monotonic() < began + within_s, "vLLM goes on working for nobody"
        time.sleep(0.05)
    return time.monotonic() - began


def busy(url: str, within_s: float = 30.0) -> None:
    """Wait until vLLM runs something."""
    until = time.monotonic() + within_s
    while not running(url):
        assert time.monotonic() < until, "vLLM does not begin"
        time.sleep(0.01)


async def test_calls_and_streams(url: str, sdk: Any, door: Any, tmp_path: Path) -> None:
    async def call(number: int) -> str:
        text = f"Why is {number} – or “{number}²” – a number? 数 🙂"
        if number % 2:
            return await client.ask(text)
        return "".join([piece async for piece in client.stream(text)])

    async with door(tree(url, sdk), sdk, tmp_path) as client:
        assert all(await asyncio.gather(*(call(number) for number in range(8))))


async def test_errors(url: str, sdk: Any, door: Any, tmp_path: Path) -> None:
    """vLLM's own refusal comes as it is, and blames nobody; an unknown model does not get there."""
    async with door(tree(url, sdk), sdk, tmp_path) as client:
        with pytest.raises(sdk.library.BadRequestError, match="maximum context length") as caught:
            await client.ask("word " * 3000)
        assert caught.value.status_code == 400
        with pytest.raises(sdk.library.BadRequestError, match="maximum context length"):
            assert [piece async for piece in client.stream("word " * 3000)] == []
        with pytest.raises(sdk.library.NotFoundError, match="no model 'nope'; models: gpt-"):
            await client.ask("Hi", model="nope")
        for _ in range(3):
            await client.ask("Hi")


async def test_a_stream_that_nobody_reads_any_more(url: str, sdk: Any, door: Any, tmp_path: Path, say: Any) -> None:
    """vLLM stops to work for it."""
    streams, bound = 8, 1800

    async def begin(number: int) -> None:
        stream = client.stream(f"Why {number}?", bound)
        async for piece in stream:
            if piece:
                break
        await stream.aclose()

    async with door(tree(url, sdk), sdk, tmp_path) as client:
        before = generated(url)
        await asyncio.gather(*(begin(number) for number in range(streams)))
        stopped_s = await asyncio.to_thread(settled, url)
        tokens = generated(url) - before
        say(
            f"{sdk.dialect}: {streams} streams dropped, {tokens} of {streams * bound} tokens, "
            f"quiet {stopped_s:.1f} s later"
        )
        assert tokens < streams * bound / 2
        # One that is cancelled while it waits for its first part.
        task = asyncio.ensure_future(client.ask("Why?", bound))
        await asyncio.to_thread(busy, url)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.to_thread(settled, url)
        assert await client.ask("Hi") is not None
