"""The reward server as a proxy: the SDKs of OpenAI and Anthropic with the server's token as their key."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import anthropic
import httpx2
import openai
import pytest
from aiohttp import web

from qreward_plugins import RewardEngine
from qreward_plugins.server.server import RewardServer
from qreward_plugins.testing import Faults, JudgeServer

pytestmark = pytest.mark.anyio

KEY = "sk-source-0123456789abcdef"
TOKEN = "the-token-of-the-server-0123"
TEXT = "Hello there, how are you today, my friend of many years?"
ASKED = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def served(*servers, token=TOKEN, dialect="openai", engine=None, max_reply_bytes=2**20, **options):
    node = {"kind": "openai", "model": "judge", "api_key": KEY, "dialect": dialect, "max_reply_bytes": max_reply_bytes}
    tree = {
        "sources": {f"s{number}": {**node, "base_url": server.base_url} for number, server in enumerate(servers)},
        "judges": {"quality": {"kind": "llm"}},
        "models": {"gpt-*": {"sources": [f"s{number}" for number in range(len(servers))], "strategy": "round_robin"}},
        "engine": {"seed": 1, "deadline_s": 5, **(engine or {})},
    }
    async with RewardEngine(tree) as opened, RewardServer(opened, port=0, token=token, **options) as server:
        server.engine = opened
        yield server


def judge(**options):
    return JudgeServer(lambda call: TEXT, api_key=KEY, **options)


def openai_of(server, token=TOKEN, **options):
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=token, **options)


async def ask(client, **options):
    reply = await client.chat.completions.create(model="gpt-5", messages=ASKED, **options)
    return reply.choices[0].message.content


async def stream(client, **options):
    chunks = await client.chat.completions.create(model="gpt-5", messages=ASKED, stream=True, **options)
    return [chunk.choices[0].delta.content or "" async for chunk in chunks]


async def test_openai():
    with judge() as upstream:
        async with served(upstream) as server, openai_of(server) as client:
            assert await ask(client) == TEXT
            pieces = await stream(client)
            assert ("".join(pieces), len(pieces) > 5) == (TEXT, True)
            assert [model.id async for model in client.models.list()] == ["gpt-*"]
            with pytest.raises(openai.NotFoundError, match="no model 'x'"):
                await client.chat.completions.create(model="x", messages=ASKED)
            with pytest.raises(openai.NotFoundError, match="not passed on"):
                await client.files.list()
            assert await asyncio.gather(*(ask(client) for _ in range(20))) == [TEXT] * 20


async def test_anthropic_and_responses():
    with judge() as upstream:
        async with served(upstream, dialect="anthropic") as server:
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key=TOKEN) as client:
                asked = {"model": "gpt-5", "max_tokens": 99, "messages": ASKED}
                assert (await client.messages.create(**asked)).content[0].text == TEXT
                async with client.messages.stream(**asked) as texts:
                    assert "".join([text async for text in texts.text_stream]) == TEXT
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key="wrong") as client:
                with pytest.raises(anthropic.AuthenticationError, match="send the server's token"):
                    await client.messages.create(**asked)
        async with served(upstream, dialect="responses") as server, openai_of(server) as client:
            assert (await client.responses.create(model="gpt-5", input="Hi")).output_text == TEXT


async def test_gemini():
    body = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}
    with judge(models=("judge",)) as upstream:
        upstream_url = f"{upstream.root_url}/v1beta"
        node = {"kind": "openai", "dialect": "gemini", "model": "judge", "base_url": upstream_url, "api_key": KEY}
        tree = {"sources": {"g": node}, "judges": {"quality": {"kind": "llm"}}, "models": {"*": {"sources": "g"}}}
        async with (
            RewardEngine(tree) as engine,
            RewardServer(engine, port=0, token=TOKEN) as server,
            httpx2.AsyncClient(base_url=server.url, headers={"x-goog-api-key": TOKEN}) as client,
        ):
            reply = await client.post("/v1beta/models/org%2Fname:generateContent", json=body)
            assert reply.json()["candidates"][0]["content"]["parts"][0]["text"] == TEXT
            reply = await client.post("/v1beta/models/m:streamGenerateContent?alt=sse", json=body)
            assert reply.headers["content-type"] == "text/event-stream"
            reply = await client.get("/v1beta/models", headers={"x-goog-api-key": "wrong"})
            assert (reply.status_code, reply.json()["error"]["status"]) == (401, "UNAUTHENTICATED")


async def test_token_and_caps():
    with judge() as upstream:
        async with served(upstream, max_body_bytes=1000) as server:
            for wrong in ("wrong", KEY):
                async with openai_of(server, wrong) as client:
                    with pytest.raises(openai.AuthenticationError, match="send the server's token"):
                        await ask(client)
            async with openai_of(server) as client:
                with pytest.raises(openai.APIStatusError, match="the body is too large") as caught:
                    await ask(client, user="x" * 2000)
                assert caught.value.status_code == 413
        async with served(upstream, token=None) as server, openai_of(server, "anything") as client:
            assert await ask(client) == TEXT
        assert upstream.report().requests == 1


async def test_failover_and_what_was_given_up():
    with judge(faults=Faults(script=lambda n: "error_500")) as bad, judge() as good:
        async with served(bad, good) as server, openai_of(server) as client:
            assert await asyncio.gather(*(ask(client) for _ in range(6))) == [TEXT] * 6
            assert "".join(await stream(client)) == TEXT
        before = bad.report().requests
        async with served(bad, engine={"max_attempts": 1}) as server, openai_of(server) as client:
            with pytest.raises(openai.InternalServerError, match="infra/exhausted") as caught:
                await ask(client)
            assert caught.value.response.headers["x-should-retry"] == "false"
        assert bad.report().requests == before + 1


async def test_deadline_and_priority_headers():
    with judge() as upstream:
        upstream.hold()
        async with served(upstream) as server, openai_of(server) as client:
            with pytest.raises(openai.InternalServerError, match="infra/deadline"):
                await ask(client, extra_headers={"X-QReward-Deadline-S": "0.05"})
            for wrong in ({"X-QReward-Deadline-S": "x"}, {"X-QReward-Priority": "x"}):
                with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError), match="X-QReward"):
                    await ask(client, extra_headers=wrong)


async def test_a_stream_that_breaks_off_closes_the_connection():
    with judge(faults=Faults(script=["stream_cut"])) as upstream:
        async with served(upstream) as server, openai_of(server) as client:
            with pytest.raises(openai.APIConnectionError):
                await stream(client)
            assert "".join(await stream(client)) == TEXT


async def test_who_hangs_up_ends_the_attempt():
    with judge(stream_interval_s=0.02) as upstream:
        async with served(upstream) as server, openai_of(server) as client:
            chunks = await client.chat.completions.create(model="gpt-5", messages=ASKED, stream=True)
            await anext(aiter(chunks))
            await chunks.close()
            await asyncio.to_thread(upstream.wait_for, lambda report: report.in_flight == 0)
            upstream.hold()
            asking = asyncio.ensure_future(ask(client))
            await asyncio.to_thread(upstream.wait_for, lambda report: report.in_flight == 1)
            asking.cancel()
            await asyncio.to_thread(upstream.wait_for, lambda report: report.in_flight == 0)
            assert server.engine.statistics().waiting == 0


@asynccontextmanager
async def endless():
    """A source whose streams do not end."""

    async def stream(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = json.dumps({"choices": [{"delta": {"content": "x" * 10_000}}]})
        with suppress(ConnectionError):
            while True:
                await response.write(f"data: {event}\n\n".encode())
                await asyncio.sleep(0)
        return response

    runner = web.ServerRunner(web.Server(stream), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield SimpleNamespace(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    finally:
        await runner.cleanup()


async def test_who_does_not_read_a_stream_loses_its_place(monkeypatch):
    monkeypatch.setattr("qreward_plugins.server.proxy.READ_WITHIN_S", 0.2)
    body = json.dumps({"model": "gpt-5", "messages": ASKED, "stream": True})
    head = f"Host: h\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with endless() as upstream, served(upstream, max_samples=1, max_reply_bytes=2**25) as server:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}{body}".encode())
            await asyncio.sleep(0.5)
            # Nobody closes the connection, and the only place gets free before the deadline of 5 s.
            await asyncio.wait_for(server._admission.idle(), 3)
            assert server.engine.statistics().sources["s0"].in_flight == 0


async def test_the_end_of_the_server():
    with judge() as upstream:
        async with served(upstream) as server, openai_of(server, max_retries=0) as client:
            upstream.hold()
            asking = asyncio.ensure_future(ask(client))
            await asyncio.to_thread(upstream.wait_for, lambda report: report.in_flight == 1)
            draining = asyncio.ensure_future(server.drain(5))
            await asyncio.sleep(0)
            with pytest.raises(openai.InternalServerError, match="about to stop") as caught:
                await ask(client)
            assert caught.value.response.headers["retry-after"] == "5"
            assert "x-should-retry" not in caught.value.response.headers
            upstream.release()
            assert await asking == TEXT
            assert await draining == 0


async def test_too_many_calls_under_way():
    with judge() as upstream:
        async with served(upstream, max_samples=1) as server, openai_of(server, max_retries=0) as client:
            upstream.hold()
            asking = asyncio.ensure_future(ask(client))
            await asyncio.to_thread(upstream.wait_for, lambda report: report.in_flight == 1)
            with pytest.raises(openai.RateLimitError, match="under way") as caught:
                await ask(client)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            upstream.release()
            assert await asking == TEXT
