"""What goes to a source and what comes back, byte by byte, over a transport without an SDK."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from qreward_plugins import EngineError, RewardEngine, Sample, load_config
from qreward_plugins.server.formats import format_of
from qreward_plugins.server.transport import QRewardTransport

from ..kit import each_of
from ..sources import wire
from .sdks import CALLERS_KEY, KEY, tree_of

pytestmark = pytest.mark.anyio

URL = "http://anywhere/v1/chat/completions"
WHOLE = {"id": "x", "choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}], "usage": None}
STREAM = {"model": "gpt-5", "stream": True}


@asynccontextmanager
async def echo(reply=lambda number: WHOLE):
    """A server that answers request `number` with what `server.reply(number)` returns, or as that writes itself."""

    async def script(exchange):
        found = server.reply(exchange.number - 1)
        if callable(found):
            return await found(exchange)
        status, found, headers = found if isinstance(found, tuple) else (200, found, {})
        return exchange.reply(found, f"{status} X", headers)

    async with wire.serving(script) as server:
        server.reply = reply
        yield server


@asynccontextmanager
async def client_of(tree):
    transport = QRewardTransport(tree)
    async with httpx.AsyncClient(transport=transport, timeout=5) as client:
        client.engine = transport.engine
        yield client


@asynccontextmanager
async def passing(reply=lambda number: WHOLE, **tree):
    """A server and a client whose one source it is. `tree`: keys of `tree_of`."""
    async with echo(reply) as server, client_of(tree_of(server, **tree)) as client:
        yield server, client


async def asked(url=URL, *, reply=lambda number: WHOLE, content=None, sending=None, **tree):
    """The reply to one request, and the server that got it."""
    sent = {"json": {"model": "gpt-5"}} if content is None else {"content": content}
    async with passing(reply, **tree) as (server, client):
        return await client.post(url, headers=sending, **sent), server


def sse(*events):
    """A reply of server-sent events."""

    async def write(exchange):
        exchange.begin_events()
        for event in (*events, b""):
            exchange.event(event)

    return lambda number: write


def chunk(text="", **more):
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}, **more}]}).encode() + b"\n\n"


async def test_only_model_key_and_address_change():
    body = (
        '{"model": "gpt-5", "seed": 123456789012345678901234567890, "temperature": 0.1, "top_p": 1.0, "x": 1e-7, '
        '"messages": [{"role": "user", "content": "caf\\u00e9 \\ud800 \\u4e2d"}], "tools": [], "extra": null}'
    )
    headers = {"Authorization": f"Bearer {CALLERS_KEY}", "X-Tenant": "t", "Cookie": "a=b", "OpenAI-Beta": "x=v1"}
    own = {"parameters": {"temperature": 0.7}, "headers": {"X-Own": "own"}}
    reply, server = await asked(f"{URL}?api-key={CALLERS_KEY}", content=body, sending=headers, **own)
    assert reply.status_code == 200
    assert json.loads(server.bodies[0]) == {**json.loads(body), "model": "judge"}
    assert list(json.loads(server.bodies[0])) == list(json.loads(body))
    assert b"1.0" in server.bodies[0]
    [exchange] = server.exchanges
    head = exchange.headers
    assert (head["authorization"], head["x-own"], head["openai-beta"]) == (f"Bearer {KEY}", "own", "x=v1")
    assert not {"x-tenant", "cookie"} & set(head)
    assert CALLERS_KEY not in str((exchange.head, server.bodies))


async def test_the_reply_comes_back_as_it_was_sent():
    raw = b'{ "choices": [ {"message": {"content": null, "tool_calls": [1]}} ],\n "model": "other", "x": 1.50 }'
    ours = {"set-cookie": "a=b", "openai-organization": "ours", "x-ratelimit-limit-requests": "9"}
    headers = {"x-request-id": "r1", "openai-version": "\u00e9\u4e2d", **ours}
    reply, _ = await asked(reply=lambda number: (200, raw, headers))
    assert reply.content == raw
    assert reply.headers["x-request-id"] == "r1"
    assert not {"openai-version", *ours} & set(reply.headers)  # a header that is not ASCII does not come back


async def test_no_secret_of_a_source_comes_back():
    echoed = {"choices": [{"message": {"content": f"I am {KEY}"}}]}
    async with passing(lambda number: (200, echoed, {"x-request-id": KEY})) as (server, client):
        reply = await client.post(URL, json={"model": "gpt-5"})
        assert reply.status_code == 200
        assert KEY not in reply.text + str(reply.headers)
        server.reply = lambda number: (422, {"error": {"message": f"wrong: {KEY}"}}, {})
        reply = await client.post(URL, json={"model": "gpt-5"})
        assert (reply.status_code, KEY in reply.text, "wrong: ***" in reply.text) == (422, False, True)
        server.reply = lambda number: (401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}, {})
        reply = await client.post(URL, json={"model": "gpt-5"})
        assert (reply.status_code, KEY[:8] in reply.text) == (503, False)
        server.reply = sse(chunk(KEY[:10]), chunk(f"x {KEY}"), chunk(finish_reason="stop"), b"data: [DONE]\n\n")
        text = (await client.post(URL, json=STREAM)).text
        assert ("x ***" in text, KEY in text) == (True, False)


@each_of(
    ("content", "headers", "problem"),
    [
        *((body, {}, "not JSON") for body in (b"{", b'{"x": NaN}', b'{"x": 1e999}', b"[" * 100_000, b'{"x": "\xff"}')),
        (b"[]", {}, "must be a JSON object"),
        (b'{"model": 7}', {}, "needs the name of a `model`"),
        (b'{"model": "gpt-5", "stream": 1}', {}, "`stream` must be true or false"),
        *((None, {"OpenAI-Beta": text}, "must be printable ASCII") for text in ("a\r\nX-Evil: 1", "a\tb", b"\xff")),
    ],
)
async def test_a_request_that_cannot_be_sent_on(content, headers, problem):
    reply, server = await asked(content=content, sending=headers)
    assert (reply.status_code, server.bodies) == (400, [])
    assert problem in reply.json()["error"]["message"]
    assert reply.json()["error"]["cause"] == "policy"


# Streams


async def test_a_stream_comes_as_it_was_sent_once_a_part_of_the_answer_has_come():
    sent = [b": hello\n\n", chunk(), chunk("a"), b'data: {"x":\ndata: 1}\r\n\r\n', chunk("b", finish_reason="stop")]
    sent += [b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "choices": []}\n\n', b"data: [DONE]\n\n"]
    for library in ("aiohttp", "httpx"):
        async with passing(sse(*sent), client=library) as (_, client):
            reply = await client.post(URL, json=STREAM)
            assert reply.headers["content-type"] == "text/event-stream"
            assert reply.content == b"".join(sent)
            assert client.engine.statistics().sources["s0"].completion_tokens == 2


async def test_an_error_before_the_answer_is_tried_again_and_after_it_not():
    failing = [b": hello\n\n", chunk(), b'data: {"error": {"message": "overloaded"}}\n\n']
    whole = [chunk("a", finish_reason="stop"), b"data: [DONE]\n\n"]
    replies = [sse(*failing), sse(*whole), sse(chunk("a"), *failing), sse(*whole)]
    got = []
    async with passing(lambda number: replies[number](number)) as (server, client):
        assert (await client.post(URL, json=STREAM)).content == b"".join(whole)
        assert len(server.bodies) == 2

        async def read():
            async with client.stream("POST", URL, json=STREAM) as reply:
                async for piece in reply.aiter_bytes():
                    got.append(piece)

        with pytest.raises(httpx.RemoteProtocolError, match=r"broken: .*an error in the middle of the answer"):
            await read()
        assert b"".join(got) == b"".join([chunk("a"), *failing])
        assert len(server.bodies) == 3


async def test_a_slow_reader_stops_the_source():
    sent = 0
    piece = chunk("x" * 8000)

    async def write(exchange):
        nonlocal sent
        exchange.begin_events()
        for _ in range(2500):
            exchange.event(piece)
            await exchange.writer.drain()
            sent += len(piece)
        exchange.event(b"data: [DONE]\n\n")
        exchange.event(b"")

    async with passing(lambda number: write) as (_, client), client.stream("POST", URL, json=STREAM) as reply:
        pieces = reply.aiter_raw()
        size = len(await anext(pieces))
        for _ in range(100):
            before = sent
            await asyncio.sleep(0.01)
            if sent == before:
                break
        # Beside what is kept for the client, the buffers of two sockets.
        assert sent < 2500 * len(piece) / 2
        size += sum([len(each) async for each in pieces])
    assert size == 2500 * len(piece) + len(b"data: [DONE]\n\n")


# What a provider keeps


async def test_what_may_change_something_is_sent_once():
    url, sent = "http://any/v1/responses", {"model": "gpt-5", "store": True}
    async with passing(lambda number: (500, {}, {}), dialect="responses") as (server, client):
        reply = await client.post(url, json=sent)
        assert (reply.status_code, len(server.bodies), "broken" in reply.text) == (503, 1, True)
        # A server that throttles has done nothing.
        server.reply = lambda number: (429, {}, {"retry-after-ms": "1"}) if number == 1 else (200, {"output": []}, {})
        reply = await client.post(url, json=sent)
        assert (reply.status_code, len(server.bodies)) == (200, 3)


@each_of(
    ("path", "body"),
    [
        ("/responses", {"tools": [{"type": "mcp"}]}),
        ("/responses", {"previous_response_id": "r1"}),
        ("/messages", {"mcp_servers": [{"url": "x"}]}),
    ],
)
def test_what_else_may_change_something(path, body):
    form = format_of(path)
    assert (form.changes_something(body), form.changes_something({"tools": [{"type": "function"}]})) == (True, False)


async def test_what_one_account_keeps_is_not_moved(monkeypatch):
    keys = {"api_key": None, "api_key_env": [f"KEY_{number}" for number in range(4)]}
    for number, name in enumerate(keys["api_key_env"]):
        monkeypatch.setenv(name, f"{KEY}{number}")
    async with echo() as a, echo() as b:
        for tree in (tree_of(a, b, dialect="responses"), tree_of(a, dialect="responses", **keys)):
            async with client_of(tree) as client:
                for body, said in (
                    ({"previous_response_id": "x"}, "'previous_response_id' refers to what one account keeps"),
                    ({"background": True}, "cannot be fetched"),
                ):
                    reply = await client.post("http://any/v1/responses", json={"model": "gpt-5", **body})
                    assert (reply.status_code, said in reply.text) == (400, True)
        assert a.bodies + b.bodies == []


async def test_what_the_only_source_does_not_know_is_the_mistake_of_the_client():
    missing = (404, {"error": {"message": "no such response"}}, {})
    async with passing(lambda number: missing, dialect="responses") as (server, client):
        url = "http://any/v1/responses"
        for _ in range(39):
            reply = await client.post(url, json={"model": "gpt-5", "previous_response_id": "r"})
            assert (reply.status_code, reply.json()["error"]["message"]) == (404, "no such response")
        server.reply = lambda number: (200, {"output": []}, {})
        assert (await client.post(url, json={"model": "gpt-5"})).status_code == 200


# Which source answers


@each_of(("group", "shares"), [({"strategy": "round_robin"}, (6, 6)), ({"strategy": "weighted"}, (8, 4))])
async def test_each_group_has_its_own_strategy(group, shares):
    async with echo() as a, echo() as b:
        tree = tree_of(a, b, models={"*": {"sources": ["s0", "s1"], "strategy": "weighted", **group}})
        tree["sources"]["s0"]["weight"] = 2
        async with client_of(tree) as client:
            for _ in range(12):
                assert (await client.post(URL, json={"model": "m"})).status_code == 200
        assert (len(a.bodies), len(b.bodies)) == shares


async def test_models_are_routed_by_the_first_pattern():
    async with echo() as a, echo() as b:
        models = {"gpt-4*": {"sources": ["s0"]}, "gpt-*": {"sources": "s1"}, "Qwen/*": {"sources": ["model:jud*"]}}
        async with client_of(tree_of(a, b, models=models)) as client:
            for model in ("gpt-4o", "gpt-5", "gpt-5", "Qwen/Qwen3-8B"):
                assert (await client.post(URL, json={"model": model})).status_code == 200
                assert len(a.bodies) == 1 or model.startswith("Qwen")
            assert (await client.post(URL, json={"model": "judge"})).status_code == 404
        assert len(a.bodies) + len(b.bodies) == 4
        async with client_of(tree_of(a, models={})) as client:
            # Without `models`, the name of a model selects its sources.
            assert (await client.post(URL, json={"model": "judge"})).status_code == 200
            reply = await client.post(URL, json={"model": "gpt-5"})
            assert (reply.status_code, reply.json()["error"]["message"]) == (404, "no model 'gpt-5'; models: judge")


async def test_an_engine_of_the_caller_stays_open_and_nothing_is_recorded(tmp_path):
    journal = {"journal": {"path": str(tmp_path / "j.db")}}
    async with echo() as server, RewardEngine(tree_of(server, engine=journal)) as engine:
        for number in (1, 2):
            async with httpx.AsyncClient(transport=QRewardTransport(engine)) as client:
                assert (await client.post(URL, json={"model": "gpt-5"})).status_code == 200
            assert len(server.bodies) == number
        await engine.aclose()
        async with httpx.AsyncClient(transport=QRewardTransport(engine)) as client:
            reply = await client.post(URL, json={"model": "gpt-5"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "closed")
        with pytest.raises(EngineError):
            engine.dispatcher()


async def test_judges_may_be_left_out():
    async with echo() as server:
        tree = tree_of(server)
        del tree["judges"]
        async with client_of(tree) as client:
            assert (await client.post(URL, json={"model": "gpt-5"})).status_code == 200
            outcome = await client.engine.score(Sample([{"role": "user", "content": "a"}], "b"))
            assert (outcome.reward, outcome.reason) == (None, "no_route")
            assert load_config(client.engine.config).models == client.engine.config.models
