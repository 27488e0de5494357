"""The SDKs of OpenAI, Anthropic and Google over a transport and at a reward server, against judge servers."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import httpx2
import openai
import pytest

from qreward_plugins.server.transport import QRewardTransport
from qreward_plugins.testing import Faults, ServerLimits

from ..kit import comes, each_of
from ..sources import wire
from .sdks import (
    ASKED,
    SDKS,
    TEXT,
    WAYS,
    Chat,
    Messages,
    Responses,
    at_server,
    over_transport,
    server_of,
    tree_of,
    turns,
    whole,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=SDKS, ids=lambda sdk: sdk.dialect)
def sdk(request):
    return request.param


PAIRS = pytest.mark.parametrize(
    ("sdk", "reach"),
    [(Chat, over_transport), (Chat, at_server), (Responses, at_server), (Messages, over_transport)],
    ids=lambda one: getattr(one, "dialect", "") or one.__name__,
)
"""Each SDK in one way, and one of them in both: the ways differ below the formats."""


async def in_flight(server, count):
    await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == count)


@PAIRS
async def test_answers_and_streams(sdk, reach):
    with server_of() as server:
        async with reach(sdk, tree_of(server, dialect=sdk.dialect)) as client:
            assert await client.ask() == TEXT
            pieces = [piece async for piece in client.stream()]
            assert ("".join(pieces), len(pieces) > 5) == (TEXT, True)
            assert await asyncio.gather(*(client.ask() for _ in range(9))) == [TEXT] * 9
            assert client.engine.statistics().waiting == 0
        assert server.report().answered == 11


async def test_google():
    from google import genai
    from google.genai import types

    body = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}
    with server_of(models=("judge",)) as server:
        tree = tree_of(f"{server.root_url}/v1beta", dialect="gemini", models=turns("s0"))
        async with httpx.AsyncClient(transport=QRewardTransport(tree)) as http:
            client = genai.Client(api_key="callers", http_options=types.HttpOptions(httpx_async_client=http))
            reply = await client.aio.models.generate_content(model="gpt-g", contents="Hi")
            assert reply.text == TEXT
            stream = await client.aio.models.generate_content_stream(model="gpt-g", contents="Hi")
            assert "".join([chunk.text or "" async for chunk in stream]) == TEXT
        async with (
            at_server(Chat, tree, token="right") as served,
            httpx2.AsyncClient(base_url=served.server.url, headers={"x-goog-api-key": "right"}) as http,
        ):
            reply = await http.post("/v1beta/models/org%2Fname:generateContent", json=body)
            assert reply.json()["candidates"][0]["content"]["parts"][0]["text"] == TEXT
            reply = await http.post("/v1beta/models/m:streamGenerateContent?alt=sse", json=body)
            assert reply.headers["content-type"] == "text/event-stream"
            reply = await http.get("/v1beta/models")
            assert reply.json()["models"][0]["name"].startswith("models/")
            reply = await http.get("/v1beta/models", headers={"x-goog-api-key": "wrong"})
            assert (reply.status_code, reply.json()["error"]["status"]) == (401, "UNAUTHENTICATED")


# Retries and limits

FAULTS = [(Chat, fault) for fault in ("error_401", "error_429", "reset", "html", "error_in_200")]


@each_of(("sdk", "fault"), [*FAULTS, *((each, "error_500") for each in SDKS)])
async def test_another_source_answers_before_the_first_byte(sdk, fault):
    with server_of(faults=Faults(script=lambda n: fault)) as bad, server_of() as good:
        for stream in (False, True):
            tree = tree_of(bad, good, models=turns(strategy="least_requests"), dialect=sdk.dialect)
            async with over_transport(sdk, tree) as client:
                assert await whole(client, stream) == TEXT
        # The bad one may be asked again where this process is so slow that its backoff is over.
        assert (bad.report().requests >= 2, good.report().requests) == (True, 2)


async def test_limits_are_kept():
    limits = ServerLimits(requests_per_minute=240, concurrency=4, window_s=1.0)
    with server_of(limits=limits) as server:
        declared = {"requests_per_minute": 240, "concurrency": 4, "window_s": 1.0}
        async with over_transport(Chat, tree_of(server, limits=declared)) as client:
            started = asyncio.get_running_loop().time()
            assert await asyncio.gather(*(client.ask() for _ in range(7))) == [TEXT] * 7
            took_s = asyncio.get_running_loop().time() - started
        report = server.report()
    assert took_s >= 1.0
    assert (report.violations_total, report.throttled, report.requests) == (0, 0, 7)


async def test_hedges_of_calls_have_one_budget():
    """Each call on its own could have four."""
    with server_of() as fast, server_of() as slow, server_of() as third:
        tree = tree_of(fast, slow, third, models=turns("s0", "s1", "s2"), engine={"scheduling": {"hedge": True}})
        async with over_transport(Chat, tree) as client:
            await asyncio.gather(*(client.ask() for _ in range(30)))
            for server in (fast, slow, third):
                server.hold()
            asked = [asyncio.ensure_future(client.ask()) for _ in range(20)]

            def hedges():
                return sum(source.hedges for source in client.engine.statistics().sources.values())

            await comes(hedges)
            # Time enough for two hedges of each call.
            await asyncio.sleep(1)
            found = hedges()
            for server in (fast, slow, third):
                server.release()
            await asyncio.gather(*asked)
    assert found <= 16, "0.25 of 64 calls"


async def test_refusals_pass_through_without_blame(sdk):
    status = {Messages: 413, Chat: 400, Responses: 422}[sdk]
    fault = f"error_{status}"
    with server_of(faults=Faults(script=[fault] * 20)) as server, server_of() as other:
        async with over_transport(sdk, tree_of(server, other, models=turns(), dialect=sdk.dialect)) as client:
            asked = await asyncio.gather(*(client.ask() for _ in range(40)), return_exceptions=True)
            refused = [error for error in asked if isinstance(error, sdk.errors.APIStatusError)]
            assert len(refused) + asked.count(TEXT) == 40
            assert {error.status_code for error in refused} == {status}
            assert all(f"injected fault {fault}" in str(error.body) for error in refused)
            states = [source.state for source in client.engine.statistics().sources.values()]
        assert (server.report().requests, other.report().requests) == (20, 20)
    assert states == ["up", "up"]


@PAIRS
async def test_what_the_engine_gave_up_is_an_error_in_the_form_of_the_sdk_and_is_not_retried(sdk, reach):
    with server_of(faults=Faults(script=lambda n: "error_500")) as server:
        async with reach(sdk, tree_of(server, dialect=sdk.dialect, engine={"max_attempts": 1})) as client:
            for asked in (client.ask(), anext(client.stream())):
                with pytest.raises(sdk.errors.InternalServerError, match="infra/exhausted: source 's0'") as caught:
                    await asked
                assert caught.value.status_code == 503
                assert caught.value.response.headers["x-should-retry"] == "false"
        assert server.report().requests == 2


# Ends


@PAIRS
async def test_time_is_up(sdk, reach):
    with server_of() as server:
        server.hold()
        hurry = {"deadline_s": 0.05}
        async with reach(sdk, tree_of(server, dialect=sdk.dialect, engine=hurry), max_retries=0) as client:
            with pytest.raises(sdk.errors.InternalServerError, match="infra/deadline") as caught:
                await client.ask()
            assert caught.value.status_code == 504
        async with reach(sdk, tree_of(server, dialect=sdk.dialect), max_retries=0) as client:
            # The client's own time limit is that of httpx.
            with pytest.raises(sdk.errors.APITimeoutError):
                await client.ask(timeout=0.05)
            with pytest.raises(sdk.errors.APITimeoutError):
                await anext(client.stream(timeout=0.05))
            await in_flight(server, 0)
            assert client.engine.statistics().waiting == 0


@PAIRS
async def test_who_hangs_up_ends_the_attempt(sdk, reach):
    with server_of(stream_interval_s=0.02) as server:
        async with reach(sdk, tree_of(server, dialect=sdk.dialect)) as client:
            stream = client.stream()
            assert await anext(stream)
            await stream.aclose()
            # The generator of OpenAI's SDK closes its response by itself, after it was collected.
            await asyncio.sleep(0)
            await in_flight(server, 0)
            server.hold()
            asking = asyncio.ensure_future(client.ask())
            await in_flight(server, 1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await in_flight(server, 0)
            assert all(upstream.quota.in_flight == 0 for upstream in client.engine.upstreams.values())


# Models


@pytest.mark.parametrize("reach", WAYS)
async def test_models_are_listed(reach):
    models = {"gpt-5": {"sources": ["s0"]}, "jud*": {"sources": ["s0"]}}
    with server_of() as server:
        for sdk in (Chat, Messages):
            async with reach(sdk, tree_of(server, models=models)) as client:
                assert [each.id async for each in client.client.models.list()] == ["gpt-5", "jud*", "judge"]


@PAIRS
async def test_unknown_models_paths_and_formats(sdk, reach):
    other = {"openai": "anthropic"}.get(sdk.dialect, "openai")
    with server_of() as server:
        async with reach(sdk, tree_of(server, dialect=other)) as client:
            with pytest.raises(sdk.errors.NotFoundError, match="no source of the model 'gpt-5' speaks this format"):
                await client.ask()
            client.model = "else"
            with pytest.raises(sdk.errors.NotFoundError, match=r"no model 'else'; models: gpt-\*"):
                await client.ask()
            with pytest.raises(sdk.errors.NotFoundError, match="not passed on"):
                await (client.client.messages.batches if sdk is Messages else client.client.batches).list()
        assert server.report().requests == 0


# At the server only


async def test_the_bound_and_the_end_of_the_server():
    with server_of() as server:
        async with at_server(Chat, tree_of(server), max_retries=0, max_samples=1) as client:
            server.hold()
            asking = asyncio.ensure_future(client.ask())
            await in_flight(server, 1)
            with pytest.raises(openai.RateLimitError, match="1 samples are under way") as busy:
                await client.ask()
            draining = asyncio.ensure_future(client.server.drain(5))
            await asyncio.sleep(0)
            with pytest.raises(openai.InternalServerError, match="about to stop") as ending:
                await client.ask()
            for caught in (busy, ending):
                headers = caught.value.response.headers
                assert (headers["retry-after"], "x-should-retry" in headers) == ("1", False)
            server.release()
            assert (await asking, await draining) == (TEXT, 0)


async def endless(exchange):
    """A stream that does not end."""
    exchange.begin_events()
    event = json.dumps({"choices": [{"delta": {"content": "x" * 10_000}}]})
    while True:
        exchange.event(f"data: {event}\n\n".encode())
        await exchange.writer.drain()


async def test_who_does_not_read_a_stream_loses_its_place(monkeypatch):
    monkeypatch.setattr("qreward_plugins.server.proxy.READ_WITHIN_S", 0.2)
    body = json.dumps({"model": "gpt-5", "messages": ASKED, "stream": True})
    head = f"Host: h\r\nAuthorization: Bearer right\r\nContent-Length: {len(body)}\r\n\r\n"
    async with wire.serving(endless) as upstream:
        tree = tree_of(upstream, max_reply_bytes=2**25)
        async with at_server(Chat, tree, token="right", max_samples=1) as client:
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", int(client.server.url.rpartition(":")[2])))
                connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}{body}".encode())
                # Nobody closes the connection, and the only place gets free long before the deadline.
                for wanted in (1, 0):
                    await comes(lambda wanted=wanted: client.server.under_way == wanted)
            assert client.engine.statistics().sources["s0"].in_flight == 0
