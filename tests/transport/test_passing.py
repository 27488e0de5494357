"""What goes to a source and what comes back, byte by byte, over a transport without an SDK."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager

import aiohttp.web
import httpx
import pytest

from qreward_plugins import ConfigurationError, EngineError, RewardEngine, Sample, load_config
from qreward_plugins.server.model_calls.formats import format_of
from qreward_plugins.server.transport import QRewardTransport

from .conftest import CALLERS_KEY, KEY, TEXT, server_of, tree_of

pytestmark = pytest.mark.anyio

URL = "http://anywhere/v1/chat/completions"
WHOLE = {"id": "x", "choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}], "usage": None}


class Echo:
    """A server that keeps the requests and answers with what `reply` returns, or writes itself."""

    def __init__(self, reply=None) -> None:
        self.heads, self.bodies, self.paths = [], [], []
        self.reply = reply or (lambda number: WHOLE)

    async def handle(self, request):
        number = len(self.bodies)
        self.bodies.append(await request.read())
        self.heads.append({name.lower(): value for name, value in request.headers.items()})
        self.paths.append(request.path_qs)
        found = self.reply(number)
        if callable(found):
            return await found(request)
        status, headers = 200, {}
        if isinstance(found, tuple):
            status, found, headers = found
        text = found if isinstance(found, bytes) else json.dumps(found).encode()
        return aiohttp.web.Response(body=text, status=status, content_type="application/json", headers=headers)


@asynccontextmanager
async def echo(reply=None):
    server = Echo(reply)
    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(server.handle), shutdown_timeout=0.1)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    server.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(tree, **options):
    transport = QRewardTransport(tree, **options)
    async with httpx.AsyncClient(transport=transport, timeout=5) as client:
        client.engine = transport.engine
        yield client


def sse(*events):
    """A reply of server-sent events; each is bytes, or a number of seconds to wait."""

    async def write(request):
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            if isinstance(event, bytes):
                await response.write(event)
            else:
                await asyncio.sleep(event)
        await response.write_eof()
        return response

    return lambda number: write


def chunk(text="", **more):
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}, **more}]}).encode() + b"\n\n"


async def test_only_model_key_and_address_change():
    body = (
        '{"model": "gpt-5", "seed": 123456789012345678901234567890, "temperature": 0.1, "top_p": 1.0, "x": 1e-7, '
        '"messages": [{"role": "user", "content": "caf\\u00e9 \\ud800 \\u4e2d"}], "tools": [], "extra": null}'
    )
    headers = {"Authorization": f"Bearer {CALLERS_KEY}", "X-Tenant": "t", "Cookie": "a=b", "OpenAI-Beta": "x=v1"}
    async with echo() as server:
        tree = tree_of(server, parameters={"temperature": 0.7}, headers={"X-Own": "own"})
        async with client_of(tree) as client:
            reply = await client.post(f"{URL}?api-key={CALLERS_KEY}", content=body, headers=headers)
    assert reply.status_code == 200
    assert json.loads(server.bodies[0]) == {**json.loads(body), "model": "judge"}
    assert list(json.loads(server.bodies[0])) == list(json.loads(body))
    assert b"1.0" in server.bodies[0]
    [head] = server.heads
    assert (head["authorization"], head["x-own"], head["openai-beta"]) == (f"Bearer {KEY}", "own", "x=v1")
    assert not {"x-tenant", "cookie"} & set(head)
    assert CALLERS_KEY not in str((head, server.bodies, server.paths))


async def test_the_reply_comes_back_as_it_was_sent():
    raw = b'{ "choices": [ {"message": {"content": null, "tool_calls": [1]}} ],\n "model": "other", "x": 1.50 }'
    ours = {"set-cookie": "a=b", "openai-organization": "ours", "x-ratelimit-limit-requests": "9"}
    headers = {"x-request-id": "r1", **ours}
    async with echo(lambda number: (200, raw, headers)) as server, client_of(tree_of(server)) as client:
        reply = await client.post(URL, json={"model": "gpt-5", "messages": []})
    assert reply.content == raw
    assert reply.headers["x-request-id"] == "r1"
    assert (reply.headers["x-qreward-source"], reply.headers["x-qreward-attempts"]) == ("s0", "1")
    assert not set(ours) & set(reply.headers)


async def test_no_secret_of_a_source_comes_back():
    echoed = {"choices": [{"message": {"content": f"I am {KEY}"}}]}
    async with (
        echo(lambda number: (200, echoed, {"x-request-id": KEY})) as server,
        client_of(tree_of(server)) as client,
    ):
        reply = await client.post(URL, json={"model": "gpt-5"})
        assert reply.status_code == 200
        assert KEY not in reply.text + str(reply.headers)
        server.reply = lambda number: (422, {"error": {"message": f"wrong: {KEY}"}}, {})
        reply = await client.post(URL, json={"model": "gpt-5"})
        assert (reply.status_code, KEY in reply.text, "wrong: ***" in reply.text) == (422, False, True)
        server.reply = lambda number: (401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}, {})
        reply = await client.post(URL, json={"model": "gpt-5"})
        assert (reply.status_code, KEY in reply.text, KEY[:8] in reply.text) == (503, False, False)
        server.reply = sse(chunk(KEY[:10]), chunk(f"x {KEY}"), chunk(finish_reason="stop"), b"data: [DONE]\n\n")
        async with client.stream("POST", URL, json={"model": "gpt-5", "stream": True}) as stream:
            text = (await stream.aread()).decode()
        assert "x ***" in text
        assert KEY not in text


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"model": NaN}', "not JSON"),
        (b'{"model": "gpt-5", "x": 1e999}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"model": 7}', "needs the name of a `model`"),
        (b'{"messages": []}', "needs the name of a `model`"),
        (b'{"model": "\xff"}', "not JSON"),
    ],
)
async def test_a_body_that_cannot_be_sent_on(body, problem):
    async with client_of(tree_of("http://127.0.0.1:9/v1")) as client:
        reply = await client.post(URL, content=body)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]
    assert (reply.json()["error"]["cause"], reply.json()["error"]["code"]) == ("policy", "input")


async def test_bodies_are_capped_in_both_directions():
    async with echo(lambda number: b"[" + b" " * 3_000_000) as server:
        tree = tree_of(server, engine={"max_attempts": 1})
        async with client_of(tree, max_body_bytes=1000) as client:
            assert (await client.post(URL, content=b"x" * 1001)).status_code == 413
            assert server.bodies == []
            reply = await client.post(URL, json={"model": "gpt-5"})
            assert (reply.status_code, "larger than 1,048,576 bytes" in reply.text) == (503, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-QReward-Deadline-S": "soon"}, 400),
        ({"X-QReward-Deadline-S": "nan"}, 400),
        ({"X-QReward-Deadline-S": "0"}, 400),
        ({"X-QReward-Priority": "1.5"}, 400),
        ({"X-QReward-Priority": "9" * 40}, 400),
        ({"X-QReward-Priority": "High", "X-QReward-Deadline-S": "3"}, 200),
    ],
)
async def test_deadline_and_priority_by_header(headers, status):
    async with echo() as server, client_of(tree_of(server)) as client:
        assert (await client.post(URL, json={"model": "gpt-5"}, headers=headers)).status_code == status
        assert all("x-qreward" not in name for head in server.heads for name in head)


async def test_a_stream_comes_as_it_was_sent_once_a_part_of_the_answer_has_come():
    sent = [b": hello\n\n", chunk(), chunk("a"), b'data: {"x":\ndata: 1}\r\n\r\n', chunk("b", finish_reason="stop")]
    sent += [b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "choices": []}\n\n', b"data: [DONE]\n\n"]
    async with echo(sse(*sent)) as server, client_of(tree_of(server)) as client:
        async with client.stream("POST", URL, json={"model": "gpt-5", "stream": True}) as reply:
            assert reply.headers["content-type"] == "text/event-stream"
            assert await reply.aread() == b"".join(sent)
        assert client.engine.statistics().sources["s0"].completion_tokens == 2


async def test_an_error_before_the_answer_is_tried_again_and_after_it_not():
    failing = [b": hello\n\n", chunk(), b'data: {"error": {"message": "overloaded"}}\n\n']
    whole = [chunk("a", finish_reason="stop"), b"data: [DONE]\n\n"]
    replies = [sse(*failing), sse(*whole), sse(chunk("a"), *failing), sse(*whole)]
    async with echo(lambda number: replies[number](number)) as server, client_of(tree_of(server)) as client:
        async with client.stream("POST", URL, json={"model": "gpt-5", "stream": True}) as reply:
            assert await reply.aread() == b"".join(whole)
        assert len(server.bodies) == 2

        async def read():
            async with client.stream("POST", URL, json={"model": "gpt-5", "stream": True}) as reply:
                async for piece in reply.aiter_bytes():
                    got.append(piece)

        got = []
        with pytest.raises(httpx.RemoteProtocolError, match=r"broken: .*an error in the middle of the answer"):
            await read()
        assert b"".join(got) == b"".join([chunk("a"), *failing])
        assert len(server.bodies) == 3


async def test_a_slow_reader_stops_the_source():
    sent = 0
    piece = chunk("x" * 8000)

    async def write(request):
        nonlocal sent
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(2500):
            await response.write(piece)
            sent += len(piece)
        await response.write(b"data: [DONE]\n\n")
        return response

    async with echo(lambda number: write) as server, client_of(tree_of(server, engine={"deadline_s": 60})) as client:
        async with client.stream("POST", URL, json={"model": "gpt-5", "stream": True}) as reply:
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


@pytest.mark.parametrize(
    ("body", "path", "dialect"),
    [
        ({"store": True}, "/chat/completions", "openai"),
        ({"store": True}, "/responses", "responses"),
        ({"tools": [{"type": "mcp"}]}, "/responses", "responses"),
        ({"previous_response_id": "r1"}, "/responses", "responses"),
        ({"mcp_servers": [{"url": "x"}]}, "/messages", "anthropic"),
    ],
)
async def test_what_may_change_something_is_sent_once(body, path, dialect):
    async with echo(lambda number: (500, {}, {})) as server, client_of(tree_of(server, dialect=dialect)) as client:
        reply = await client.post(f"http://any/v1{path}", json={"model": "gpt-5", **body})
        assert (reply.status_code, len(server.bodies)) == (503, 1)
        assert "broken" in reply.text
        # A server that throttles has done nothing.
        answer = {"choices": [{}], "output": [], "content": []}
        server.reply = lambda number: (429, {}, {"retry-after-ms": "1"}) if number == 1 else (200, answer, {})
        reply = await client.post(f"http://any/v1{path}", json={"model": "gpt-5", **body})
        assert (reply.status_code, len(server.bodies)) == (200, 3)


async def test_what_one_provider_keeps_is_not_moved():
    async with echo() as a, echo() as b, client_of(tree_of(a, b, dialect="responses")) as client:
        for body, problem in {
            "previous_response_id": "refers to what one provider keeps",
            "conversation": "refers to what one provider keeps",
            "background": "cannot be fetched",
        }.items():
            reply = await client.post("http://any/v1/responses", json={"model": "gpt-5", body: "x"})
            assert (reply.status_code, problem in reply.json()["error"]["message"]) == (400, True)
        assert a.bodies + b.bodies == []


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/responses", {"input": [{"type": "item_reference", "id": "i1"}]}, "item_reference"),
        ("/responses", {"input": [{"content": [{"type": "input_file", "file_id": "f1"}]}]}, "file_id"),
        ("/responses", {"tools": [{"type": "file_search", "vector_store_ids": ["v1"]}]}, "vector_store_ids"),
        ("/chat/completions", {"messages": [{"content": [{"type": "file", "file": {"file_id": "f1"}}]}]}, "file_id"),
        ("/messages", {"messages": [{"content": [{"source": {"type": "file", "file_id": "f1"}}]}]}, "file_id"),
        (
            "/models/m:generateContent",
            {"contents": [{"parts": [{"fileData": {"fileUri": "https://h/v1beta/files/f1"}}]}]},
            "fileUri",
        ),
        ("/models/m:generateContent", {"contents": [{"parts": [{"fileData": {"fileUri": "https://h/a.png"}}]}]}, ""),
        ("/messages", {"messages": [{"content": [{"type": "tool_use", "input": {"file_id": "f1"}}]}]}, ""),
        ("/messages", {"tools": [{"input_schema": {"properties": {"file_id": {"type": "string"}}}}]}, ""),
        ("/models/m:generateContent", {"contents": [{"parts": [{"functionCall": {"args": {"file_id": "f1"}}}]}]}, ""),
        ("/chat/completions", {"metadata": {"file_id": "f1"}}, ""),
        ("/responses", {"input": "file_id", "tools": [{"vector_store_ids": []}]}, ""),
    ],
)
def test_a_file_or_an_item_that_one_provider_keeps_is_seen(path, body, key):
    form = format_of(path)
    assert form is not None
    assert (form.reference(body), form.state(body)) == (key, "")


async def test_a_file_of_one_provider_is_not_sent_to_another_one():
    body = {"model": "gpt-5", "messages": [{"content": [{"type": "file", "file": {"file_id": "f1"}}]}]}
    async with echo() as a, echo() as b, client_of(tree_of(a, b)) as client:
        reply = await client.post("http://any/v1/chat/completions", json=body)
        assert (reply.status_code, "'file_id' refers to" in reply.json()["error"]["message"]) == (400, True)
        assert a.bodies + b.bodies == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/files", 404),
        ("POST", "/v1/files", 404),
        ("POST", "/v1/batches", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/messages/count_tokens", 404),
        ("GET", "/v1/responses/resp_1", 404),
        ("DELETE", "/v1/chat/completions", 405),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 404),
    ],
)
async def test_other_paths_are_refused(method, path, status):
    async with client_of(tree_of("http://127.0.0.1:9/v1")) as client:
        reply = await client.request(method, f"http://any{path}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, "path")


def shares_of(strategy, weights=None):
    return {"*": {"sources": ["s0", "s1"], "strategy": strategy, **({"weights": weights} if weights else {})}}


@pytest.mark.parametrize(
    ("group", "shares"),
    [
        (shares_of("round_robin"), (12, 12)),
        (shares_of("weighted", {"s0": 3}), (18, 6)),
        (shares_of("weighted"), (16, 8)),
    ],
)
async def test_each_group_has_its_own_strategy_and_weights(group, shares):
    async with echo() as a, echo() as b:
        tree = tree_of(a, b, models=group)
        tree["sources"]["s0"]["weight"] = 2
        async with client_of(tree) as client:
            for _ in range(24):
                assert (await client.post(URL, json={"model": "m"})).status_code == 200
        assert (len(a.bodies), len(b.bodies)) == shares


async def test_models_are_routed_by_the_first_pattern():
    async with echo() as a, echo() as b:
        models = {"gpt-4*": {"sources": ["s0"]}, "gpt-*": {"sources": "s1"}, "Qwen/*": {"sources": ["model:jud*"]}}
        async with client_of(tree_of(a, b, models=models)) as client:
            for model in ("gpt-4o", "gpt-5", "gpt-5"):
                assert (await client.post(URL, json={"model": model})).headers["x-qreward-source"] in ("s0", "s1")
            assert (len(a.bodies), len(b.bodies)) == (1, 2)
            assert (await client.post(URL, json={"model": "Qwen/Qwen3-8B"})).status_code == 200
            assert (await client.post(URL, json={"model": "judge"})).status_code == 404


async def test_without_models_the_name_of_a_model_selects_its_sources():
    async with echo() as a, client_of(tree_of(a, models={})) as client:
        assert (await client.post(URL, json={"model": "judge"})).status_code == 200
        reply = await client.post(URL, json={"model": "gpt-5"})
        assert (reply.status_code, reply.json()["error"]["message"]) == (404, "no model 'gpt-5'; models: judge")


async def test_a_slow_answer_is_hedged():
    turns = {"*": {"sources": ["s0", "s1"], "strategy": "round_robin"}}
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    with server_of() as slow, server_of() as good:
        async with client_of(tree_of(slow, good, models=turns, engine={"scheduling": {"hedge": True}})) as client:
            for _ in range(30):
                assert (await client.post(URL, json=body)).is_success
            slow.hold()
            for _ in range(2):
                assert (await client.post(URL, json=body)).json()["choices"][0]["message"]["content"] == TEXT
            # The server sees a moment later that its client has gone.
            await asyncio.to_thread(slow.wait_for, lambda report: report.abandoned >= 1)


async def test_an_engine_of_the_caller_stays_open():
    async with echo() as server, RewardEngine(tree_of(server)) as engine:
        for _ in range(2):
            async with httpx.AsyncClient(transport=QRewardTransport(engine)) as client:
                assert (await client.post(URL, json={"model": "gpt-5"})).status_code == 200
        await engine.aclose()
        async with httpx.AsyncClient(transport=QRewardTransport(engine)) as client:
            reply = await client.post(URL, json={"model": "gpt-5"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "closed")
        with pytest.raises(EngineError):
            engine.dispatcher()


async def test_nothing_is_recorded(tmp_path):
    journal = {"journal": {"path": str(tmp_path / "j.db")}}
    async with echo() as server, client_of(tree_of(server, engine=journal)) as client:
        for _ in range(2):
            assert (await client.post(URL, json={"model": "gpt-5"})).status_code == 200
        assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("models", "mistake"),
    [
        ({"*": {"sources": ["s7"]}}, 'models["*"].sources[0]: there is no such source'),
        ({"*": {"sources": ["x*"]}}, "the pattern matches no source"),
        ({"*": {"sources": ["reward"]}}, "`reward` is a source of kind http, which cannot answer clients of models"),
        ({"*": {"sources": []}}, 'models["*"].sources: must be'),
        ({"*": {}}, 'models["*"].sources: the key is missing'),
        ({"*": {"sources": ["s0"], "weights": {"s1": 2}}}, "`s1` is not among the sources of this group"),
        ({"*": {"sources": ["s0"], "weights": {"s0": 0}}}, 'models["*"].weights.s0: must be above 0'),
        ({"*": {"sources": ["s0"], "strategy": "best"}}, 'models["*"].strategy: must be '),
        ({"*": "s0"}, 'models["*"]: must be a mapping'),
    ],
)
def test_mistakes_in_models(models, mistake):
    tree = tree_of("http://a.invalid/v1", "http://b.invalid/v1", models=models)
    tree["sources"]["reward"] = {"kind": "http", "url": "http://c.invalid/score"}
    with pytest.raises(ConfigurationError, match=re.escape(mistake)):
        load_config(tree)


def test_a_printed_configuration_is_read_back():
    tree = tree_of("http://a.invalid/v1", models={"gpt-*": {"sources": ["s0"], "weights": {"s0": 2}}})
    config = load_config(tree)
    assert load_config(config).models == config.models


async def test_judges_may_be_left_out():
    async with echo() as server:
        tree = tree_of(server)
        del tree["judges"]
        async with client_of(tree) as client:
            assert (await client.post(URL, json={"model": "gpt-5"})).status_code == 200
            outcome = await client.engine.score(Sample([{"role": "user", "content": "a"}], "b"))
            assert (outcome.reward, outcome.reason) == (None, "no_route")
            assert load_config(client.engine.config).models
        del tree["models"]
        with pytest.raises(ConfigurationError, match="judges: the key is missing"):
            load_config(tree)


async def test_at_the_deadline_every_attempt_ends_even_with_a_journal(tmp_path):
    tree = {"deadline_s": 0.5, "journal": {"path": str(tmp_path / "j.db")}}
    with server_of(stream_interval_s=0.1) as server:
        async with client_of(tree_of(server, engine=tree)) as client:

            async def read():
                asked = {"model": "gpt-5", "messages": body, "stream": True}
                async with client.stream("POST", URL, json=asked) as reply:
                    async for _ in reply.aiter_bytes():
                        pass

            body = [{"role": "user", "content": "a"}]
            with pytest.raises(httpx.RemoteProtocolError, match="deadline"):
                await read()
            server.hold()
            reply = await client.post(URL, json={"model": "gpt-5", "messages": body})
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline")
            await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 0)


async def test_a_source_over_httpx():
    whole = [chunk("a"), chunk("b", finish_reason="stop"), b"data: [DONE]\n\n"]
    async with echo() as server, client_of(tree_of(server, client="httpx")) as client:
        reply = await client.post(URL, json={"model": "gpt-5"}, headers={"OpenAI-Beta": "x"})
        assert (reply.json(), server.heads[0]["openai-beta"]) == (WHOLE, "x")
        server.reply = sse(*whole)
        async with client.stream("POST", URL, json={"model": "gpt-5", "stream": True}) as stream:
            assert await stream.aread() == b"".join(whole)


async def test_messages_about_absurd_names_are_short():
    async with client_of(tree_of("http://127.0.0.1:9/v1", models={"Qwen/Q3": {"sources": "s0"}})) as client:
        reply = await client.post(URL, json={"model": "x\n" * 100_000})
        assert (reply.status_code, len(reply.content) < 600) == (404, True)
        assert len((await client.get("http://any/" + "y" * 5000)).content) < 600
        assert (await client.get("http://any/v1/models/Qwen%2FQ3")).json()["id"] == "Qwen/Q3"
        assert (await client.get("http://any/v1/models/Qwen/Q3")).json()["id"] == "Qwen/Q3"


async def test_references_to_what_a_provider_does_not_know_are_the_mistake_of_the_client():
    missing = (404, {"error": {"message": "no such response"}}, {})
    async with echo(lambda number: missing) as server, client_of(tree_of(server, dialect="responses")) as client:
        url = "http://any/v1/responses"
        for number in range(40):
            body = {"model": "gpt-5", "previous_response_id": f"r{number}"}
            reply = await client.post(url, json=body)
            assert (reply.status_code, reply.json()["error"]["message"]) == (404, "no such response")
        server.reply = lambda number: (200, {"output": []}, {})
        assert (await client.post(url, json={"model": "gpt-5"})).status_code == 200
        assert client.engine.statistics().sources["s0"].state == "up"


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\x00b", "a\tb", b"\xff"])
async def test_a_header_that_cannot_be_sent_on_is_the_mistake_of_the_client(value):
    async with echo() as server, client_of(tree_of(server, dialect="anthropic")) as client:
        body = {"model": "gpt-5", "messages": []}
        reply = await client.post("http://any/v1/messages", json=body, headers={"anthropic-beta": value})
        assert (reply.status_code, server.bodies) == (400, [])
        assert "anthropic-beta must be printable ASCII" in reply.json()["error"]["message"]
        assert client.engine.statistics().sources["s0"].state == "up"


@pytest.mark.parametrize("status", [200, 400])
async def test_headers_that_are_not_ascii_do_not_come_back(status):
    found = {"error": {"message": "wrong"}} if status == 400 else WHOLE
    headers = {"x-request-id": "\u00e9\u4e2d", "openai-version": "v1"}
    async with echo(lambda number: (status, found, headers)) as server, client_of(tree_of(server)) as client:
        reply = await client.post(URL, json={"model": "gpt-5", "messages": []})
    assert (reply.status_code, reply.headers["openai-version"]) == (status, "v1")
    assert "x-request-id" not in reply.headers


@pytest.mark.parametrize("flag", [1, 0, "true", []])
async def test_a_stream_flag_that_servers_read_differently_is_refused(flag):
    async with echo() as server, client_of(tree_of(server)) as client:
        reply = await client.post(URL, json={"model": "gpt-5", "messages": [], "stream": flag})
        assert (reply.status_code, server.bodies) == (400, [])
        assert "`stream` must be true or false" in reply.text


async def test_a_refusal_is_not_asked_again_by_the_sdk():
    refused = {"error": {"message": "no", "type": "content_filter"}}
    async with echo(lambda number: (409, refused, {})) as server, client_of(tree_of(server)) as client:
        reply = await client.post(URL, json={"model": "gpt-5", "messages": []})
    assert (reply.status_code, reply.headers["x-should-retry"]) == (409, "false")


async def test_a_large_body_is_refused_in_the_form_of_the_client():
    async with client_of(tree_of("http://127.0.0.1:9/v1", dialect="anthropic"), max_body_bytes=9) as client:
        reply = await client.post("http://any/v1/messages", json={"model": "gpt-5", "messages": []})
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "request_too_large")
