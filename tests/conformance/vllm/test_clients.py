"""The official SDKs before a real vLLM: over the transports, and over the proxy of `qreward serve`.

vLLM itself tells what it saw: a middleware in its process (`seen.py`) records times and bodies of all calls.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from qreward_plugins.server.transport import QRewardTransport

from .servers import get

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


CALLS = 72
"""Calls of each SDK under each limit."""
TOKENS = 6
WINDOW_S = 5.0
STARVED_S = 1.0
"""A server that waits for a core reads requests later than they were sent, and so closer together (docs/limits.md)."""
LIMITS: Mapping[str, Mapping[str, float]] = {
    "concurrency": {"concurrency": 3},
    "requests": {"requests_per_minute": 360, "window_s": WINDOW_S},
    "tokens": {"tokens_per_minute": 28_800, "window_s": WINDOW_S, "concurrency": 8},
}


@dataclass
class Passed:
    """The bodies that a client has sent, and those that it was given."""

    requests: list[bytes] = field(default_factory=list)
    replies: list[bytearray] = field(default_factory=list)


class Recorded(httpx2.AsyncBaseTransport):
    """A transport that records what another one passes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.passed = Passed()

    async def handle_async_request(self, request: Any) -> Any:
        self.passed.requests.append(await request.aread())
        response = await self.inner.handle_async_request(request)
        body = bytearray()
        self.passed.replies.append(body)
        response.stream = RecordedStream(response.stream, body)
        if response.is_stream_consumed:
            body += response.content
        return response

    async def aclose(self) -> None:
        await self.inner.aclose()


class RecordedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: Any, body: bytearray) -> None:
        self.inner, self.body = inner, body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self.inner:
            self.body += piece
            yield piece

    async def aclose(self) -> None:
        await self.inner.aclose()


class Chat:
    """OpenAI's SDK on chat completions."""

    dialect, path, library = "openai", "/v1/chat/completions", openai

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

    dialect, path = "responses", "/v1/responses"

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

    dialect, path, library = "anthropic", "/v1/messages", anthropic

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


def tree(url: str, sdk: Any, limits: Mapping[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    node = {"kind": "openai", "base_url": f"{url}/v1", "model": "chat", "dialect": sdk.dialect}
    return {
        "sources": {"own": {**node, "timeouts": {"total_s": 300}, "limits": dict(limits or {"concurrency": 16})}},
        "models": {"gpt-*": {"sources": "own"}},
        "engine": {"seed": 1, "deadline_s": 300, "shared": "off", **engine},
    }


@asynccontextmanager
async def by_transport(config: Mapping[str, Any], sdk: Any, folder: Path) -> AsyncIterator[tuple[Any, Passed]]:
    recorded = Recorded(QRewardTransport(config))
    async with httpx2.AsyncClient(transport=recorded) as http:
        yield sdk(http, "http://no.host.of.this.name.example"), recorded.passed


@asynccontextmanager
async def by_server(config: Mapping[str, Any], sdk: Any, folder: Path) -> AsyncIterator[tuple[Any, Passed]]:
    path = folder / "judges.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    command = [sys.executable, "-m", "qreward_plugins.cli", "serve", str(path), "--port", "0"]
    log = folder / "serve.log"
    with log.open("wb") as out:
        process = await asyncio.to_thread(subprocess.Popen, command, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 120
        while "reward server at " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            await asyncio.sleep(0.1)
        url = log.read_text().partition("reward server at ")[2].split(";")[0]
        recorded = Recorded(httpx2.AsyncHTTPTransport())
        async with httpx2.AsyncClient(transport=recorded, timeout=300) as http:
            yield sdk(http, url), recorded.passed
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=[by_transport, by_server], ids=["transport", "serve"])
def door(request: Any) -> Any:
    return request.param


@pytest.fixture(params=SDKS, ids=lambda sdk: sdk.dialect)
def sdk(request: Any) -> Any:
    return request.param


@pytest.fixture(scope="module")
def url(served: Callable[[str], str]) -> str:
    return served("chat")


@pytest.fixture(autouse=True)
def forget(url: str) -> Iterator[None]:
    get(f"{url}/seen")
    yield
    settled(url)


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


def pairs(body: bytes) -> Any:
    """Parse a body; the order of its keys counts."""
    return repr(json.loads(body, object_pairs_hook=lambda found: [(k, "*" if k == "model" else v) for k, v in found]))


def tokens_of(reply: bytes) -> int:
    """The tokens that a reply, or the last usage of a stream, states."""
    found = 0
    for line in reply.splitlines():
        text = line.removeprefix(b"data: ")
        if text.startswith(b"{"):
            event = json.loads(text)
            usage = event.get("usage") or (event.get("response") or event.get("message") or {}).get("usage") or {}
            keys = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
            found = max(found, sum(usage.get(key) or 0 for key in keys))
    return found


def most_in_window(events: list[tuple[float, int]], window_s: float) -> int:
    """The most that any half-open window holds, of amounts at times."""
    events = sorted(events)
    most = inside = first = 0
    for at, amount in events:
        inside += amount
        while events[first][0] <= at - window_s:
            inside -= events[first][1]
            first += 1
        most = max(most, inside)
    return most


@pytest.mark.parametrize("limit", LIMITS)
async def test_limits_and_bodies(url: str, sdk: Any, limit: str, door: Any, tmp_path: Path, say: Any) -> None:
    limits = LIMITS[limit]

    async def call(number: int) -> str:
        text = f"Why is {number} – or “{number}²” – a number? 数 🙂"
        if number % 2:
            return await client.ask(text)
        return "".join([piece async for piece in client.stream(text)])

    async with door(tree(url, sdk, limits), sdk, tmp_path) as (client, passed):
        began = time.monotonic()
        await asyncio.gather(*(call(number) for number in range(CALLS)))
        took_s = time.monotonic() - began
    calls = get(f"{url}/seen")
    assert [each["status"] for each in calls] == [200] * CALLS
    assert {each["path"] for each in calls} == {sdk.path}
    replies = [decoded(each["reply"]) for each in calls]
    assert Counter(replies) == Counter(map(bytes, passed.replies))
    assert Counter(pairs(decoded(each["request"])) for each in calls) == Counter(map(pairs, passed.requests))
    assert {json.loads(decoded(each["request"]))["model"] for each in calls} == {"chat"}

    at_once = max(each["under_way"] for each in calls)
    requests = most_in_window([(each["at"], 1) for each in calls], WINDOW_S - STARVED_S)
    amounts = [(each["at"], tokens_of(reply)) for each, reply in zip(calls, replies, strict=True)]
    tokens = most_in_window(amounts, WINDOW_S - STARVED_S)
    say(
        f"{sdk.dialect}, {limit}: {CALLS} calls in {took_s:.1f} s; at vLLM at most {at_once} at once, "
        f"{requests} requests and {tokens} tokens a window"
    )
    share = WINDOW_S / 60
    assert at_once <= limits.get("concurrency", CALLS)
    assert requests <= limits.get("requests_per_minute", math.inf) * share
    assert tokens <= limits.get("tokens_per_minute", math.inf) * share
    # The limit bounded the calls, so it was tested.
    if limit == "concurrency":
        assert at_once == limits["concurrency"]
    else:
        assert took_s >= 2 * WINDOW_S


def decoded(text: str) -> bytes:
    return base64.b64decode(text)


async def test_errors(url: str, sdk: Any, door: Any, tmp_path: Path) -> None:
    """vLLM's own refusal comes as it is, and blames nobody; an unknown model does not get there."""
    async with door(tree(url, sdk), sdk, tmp_path) as (client, passed):
        with pytest.raises(sdk.library.BadRequestError, match="maximum context length") as caught:
            await client.ask("word " * 3000)
        assert caught.value.status_code == 400
        assert caught.value.response.headers["x-qreward-source"] == "own"
        [call] = get(f"{url}/seen")
        assert (call["status"], decoded(call["reply"])) == (400, bytes(passed.replies[0]))
        with pytest.raises(sdk.library.BadRequestError, match="maximum context length"):
            assert [piece async for piece in client.stream("word " * 3000)] == []
        with pytest.raises(sdk.library.NotFoundError, match="no model 'nope'; models: gpt-"):
            await client.ask("Hi", model="nope")
        assert [each["status"] for each in get(f"{url}/seen")] == [400]
        for _ in range(3):
            await client.ask("Hi")
    assert [each["status"] for each in get(f"{url}/seen")] == [200] * 3


async def test_a_model_that_vllm_does_not_have(url: str, sdk: Any, door: Any, tmp_path: Path) -> None:
    config = tree(url, sdk)
    config["sources"]["own"]["model"] = "other"
    async with door(config, sdk, tmp_path) as (client, _):
        with pytest.raises(sdk.library.InternalServerError, match="does not exist") as caught:
            await client.ask("Hi")
    assert caught.value.status_code == 503


async def test_a_stream_that_nobody_reads_any_more(url: str, sdk: Any, door: Any, tmp_path: Path, say: Any) -> None:
    """vLLM stops to work for it."""
    streams, bound = 8, 1800

    async def begin(number: int) -> None:
        stream = client.stream(f"Why {number}?", bound)
        async for piece in stream:
            if piece:
                break
        await stream.aclose()

    async with door(tree(url, sdk), sdk, tmp_path) as (client, _):
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
