"""Clients of language models over a transport or at a server, and judge servers that answer them with `TEXT`."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import openai

from qreward_plugins import RewardEngine
from qreward_plugins.server.server import RewardServer
from qreward_plugins.server.transport import QRewardTransport
from qreward_plugins.testing import JudgeServer

KEY = "sk-source-0123456789abcdef"
CALLERS_KEY = "sk-caller-fedcba9876543210"
TEXT = "Hello there, how are you today, my friend of many years?"
ASKED: Any = [{"role": "user", "content": "Hi"}]


class Chat:
    """OpenAI's SDK on chat completions."""

    dialect, model, errors = "openai", "gpt-5", openai

    def __init__(self, *, api_key: str = CALLERS_KEY, url: str | None = None, **options: Any) -> None:
        base_url = url and f"{url}/v1"
        self.client = openai.AsyncOpenAI(api_key=api_key, base_url=base_url, **options)

    async def ask(self, **options: Any) -> str:
        reply = await self.client.chat.completions.create(**{"model": self.model, "messages": ASKED, **options})
        return reply.choices[0].message.content

    async def stream(self, **options: Any) -> Any:
        options = {"model": self.model, "messages": ASKED, "stream": True, **options}
        async with await self.client.chat.completions.create(**options) as chunks:
            async for chunk in chunks:
                if chunk.choices and chunk.choices[0].delta.content:
                    yield chunk.choices[0].delta.content


class Responses(Chat):
    """OpenAI's SDK on responses."""

    dialect = "responses"

    async def ask(self, **options: Any) -> str:
        return (await self.client.responses.create(**{"model": self.model, "input": "Hi", **options})).output_text

    async def stream(self, **options: Any) -> Any:
        options = {"model": self.model, "input": "Hi", "stream": True, **options}
        async with await self.client.responses.create(**options) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    yield event.delta


class Messages:
    """Anthropic's SDK."""

    dialect, model, errors = "anthropic", "gpt-5", anthropic

    def __init__(self, *, api_key: str = CALLERS_KEY, url: str | None = None, **options: Any) -> None:
        self.client = anthropic.AsyncAnthropic(api_key=api_key, base_url=url, **options)

    async def ask(self, **options: Any) -> str:
        options = {"model": self.model, "max_tokens": 99, "messages": ASKED, **options}
        reply = await self.client.messages.create(**options)
        return reply.content[0].text

    async def stream(self, **options: Any) -> Any:
        options = {"model": self.model, "max_tokens": 99, "messages": ASKED, **options}
        async with self.client.messages.stream(**options) as stream:
            async for text in stream.text_stream:
                yield text


SDKS = [Chat, Responses, Messages]


def tree_of(*servers: Any, engine: Mapping[str, Any] | None = None, models: Any = None, **node: Any) -> dict[str, Any]:
    """A configuration with a source for each server (or URL), named s0, s1 ... It hedges nothing, so that the number of
    requests is that of the calls however slow the machine is.
    """
    node = {"kind": "openai", "model": "judge", "api_key": KEY, **node}
    sources = {f"s{n}": {**node, "base_url": getattr(each, "base_url", each)} for n, each in enumerate(servers)}
    return {
        "sources": sources,
        "judges": {"quality": {"kind": "llm"}},
        "models": {"gpt-*": {"sources": list(sources)}} if models is None else models,
        "engine": {"seed": 1, "deadline_s": 60, "shared": "off", "scheduling": {"hedge": False}, **(engine or {})},
    }


def turns(*names: str, strategy: str = "round_robin") -> dict[str, Any]:
    """The group of all models over these sources."""
    return {"*": {"sources": list(names or ("s0", "s1")), "strategy": strategy}}


@asynccontextmanager
async def over_transport(sdk: Any, tree: Any, library: Any = httpx2, **options: Any) -> AsyncIterator[Any]:
    """A client of an SDK over a transport; `client.engine` is the transport's engine."""
    transport = QRewardTransport(tree)
    async with library.AsyncClient(transport=transport) as http:
        client = sdk(http_client=http, **options)
        client.engine = transport.engine
        yield client


@asynccontextmanager
async def at_server(sdk: Any, tree: Any, *, token: str | None = "the-token-0123", key: str = "", **options: Any) -> Any:
    """A client of an SDK at a reward server, whose token is its key; `client.engine` is the server's engine."""
    served = {name: options.pop(name) for name in ("max_samples", "max_body_bytes") if name in options}
    async with RewardEngine(tree) as engine, RewardServer(engine, port=0, token=token, **served) as server:
        client = sdk(url=server.url, api_key=key or token or "any", **options)
        client.engine, client.server = engine, server
        async with client.client:
            yield client


WAYS = [over_transport, at_server]
"""The ways from a client to an engine."""


async def whole(client: Any, stream: bool) -> str:
    """The text that a client gets in one of the two ways."""
    return "".join([piece async for piece in client.stream()]) if stream else await client.ask()


server_of = functools.partial(JudgeServer, lambda call: TEXT, api_key=KEY)
