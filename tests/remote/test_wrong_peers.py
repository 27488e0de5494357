"""Servers and engines at the other end of the connection that say what they should not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.client import RewardClient, link
from qreward_plugins.client.facts import FACTS_PATH, ServerFacts, ask_facts
from qreward_plugins.client.link import PATH
from qreward_plugins.errors import ConfigurationError, RewardServerError
from qreward_plugins.server.forms import result_of

pytestmark = pytest.mark.anyio

FACTS = ServerFacts("f", (), False, 20.0, 8, 2**20).as_row()


def sample(word: object, **fields: Any) -> Sample:
    return Sample([{"role": "user", "content": "How much?"}], f"So much: {word}", **fields)


@contextlib.asynccontextmanager
async def answering(first: str, *later: str):
    """A server that sends `first` in place of its facts, and `later` after the first samples. Yields its URL."""

    async def connected(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(first)
        async for _ in socket:
            for text in later:
                await socket.send_str(text)
        return socket

    async def facts(_: web.Request) -> web.Response:
        return web.json_response(FACTS)

    app = web.Application()
    app.router.add_get(PATH, connected)
    app.router.add_get(FACTS_PATH, facts)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


FIRST = json.dumps({"facts": FACTS})


def row(**changed: Any) -> str:
    from qreward_plugins import Scored, Verdict

    return json.dumps({"outcomes": [{**result_of(sample(1), Scored(Verdict(0.5))), "id": 0, **changed}]})


@pytest.mark.parametrize(
    "frames",
    [
        ["no JSON"],
        ["[]"],
        ["null"],
        ['{"facts": null}'],
        ['{"facts": []}'],
        [json.dumps({"facts": {**FACTS, "protocol": 3}})],
        [FIRST, "no JSON"],
        [FIRST, '{"outcomes": null}'],
        [FIRST, '{"outcomes": [1]}'],
        [FIRST, '{"outcomes": [{"id": 0}]}'],
        [FIRST, '{"outcomes": [{"id": [0]}]}'],
        [FIRST, '{"put_off": null}'],
        [FIRST, '{"put_off": {"ids": [0], "status": "x", "detail": null, "after_s": "soon"}}'],
        [FIRST, '{"facts": {}}'],
        [FIRST, row(reward=True)],
        [FIRST, row(reward="1")],
        [FIRST, row(reward=1e39)],
        [FIRST, row(reward=None)],
        [FIRST, row(components={"a": None})],
        [FIRST, row(components=[1])],
        [FIRST, row(prompt_tokens="many")],
        [FIRST, row(attempts=None)],
        [FIRST, row(steps=[1])],
        [FIRST, row(steps=[{"offset": "x", "score": None}])],
        [FIRST, row(rationale=["x"])],
        [FIRST, row(correct="yes")],
        [FIRST, row(returned=[1])],
        [FIRST, row(judge={})],
        [FIRST, row(outcome="failed", cause="infra", reason=[1], detail=3)],
    ],
)
async def test_a_server_that_answers_nonsense(frames):
    """It costs the samples their rewards at once, with a reason, and nothing else."""
    async with answering(*frames) as url:
        # The constructor asks for the facts, and the server is in this event loop.
        engine = await asyncio.to_thread(RewardEngine, {"engine": {"server": url, "deadline_s": 3}})
        async with engine:
            outcome = await engine.score(sample(1))
    assert outcome.label == "infra/server_refused"


@contextlib.asynccontextmanager
async def redirecting(path: str, there: str, cookies: list[str]):
    """A server that redirects one path, and sets a cookie at the others. Yields its URL."""

    @web.middleware
    async def answer(request: web.Request, handler: Any) -> web.Response:
        cookies.extend(request.headers.getall("Cookie", ()))
        if request.path == path:
            raise web.HTTPTemporaryRedirect(f"{there}{path}?session=s3cret")
        return web.json_response(FACTS, headers={"Set-Cookie": "session=1; Path=/"})

    runner = web.AppRunner(web.Application(middlewares=[answer]), shutdown_timeout=0)
    await runner.setup()
    # Cookies are kept for names, not for addresses.
    await web.TCPSite(runner, "localhost", 0).start()
    try:
        yield f"http://localhost:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", [FACTS_PATH, "/score", PATH])
async def test_a_redirect_is_not_followed(serving, path):
    """The other server would get the samples, and its rewards would count."""
    cookies: list[str] = []
    with serving() as other:
        async with redirecting(path, other.url, cookies) as url:
            engine = None
            try:
                if path == "/score":
                    async with RewardClient(url) as client:
                        await client.score(sample(1))
                    said = ""
                else:
                    engine = await asyncio.to_thread(RewardEngine, {"engine": {"server": url, "deadline_s": 5}})
                    said = (await engine.score(sample(1))).detail
            except (ConfigurationError, RewardServerError) as error:
                said = str(error)
            if engine is not None:
                await engine.aclose()
    assert other.source.samples == []
    assert f"the reward server at {url}" in said
    assert f"redirects to {other.url}{path}; redirects are not followed" in said
    assert "s3cret" not in said
    assert cookies == []


async def test_a_server_that_accepts_and_does_not_answer_is_asked_again(serving, remote, monkeypatch):
    """As one that hangs: the system accepts in its place."""
    monkeypatch.setattr(link, "FACTS_WITHIN_S", 0.2)
    hung = 0

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hung
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(f"GET {PATH} ".encode()) and not hung:
            hung += 1
            await reader.read()
            writer.close()
            return
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", there.port)
        inner_writer.write(head)
        await asyncio.gather(copied(reader, inner_writer), copied(inner_reader, writer))

    async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
        writer.close()

    with serving() as there:
        proxy = await asyncio.start_server(passed_on, "127.0.0.1", 0)
        tree = remote(there, connect_s=0.3)
        tree["engine"]["server"]["url"] = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        engine = await asyncio.to_thread(RewardEngine, tree)
        async with engine:
            assert (await engine.score(sample(0.5), deadline_s=8)).reward == 0.5
        proxy.close()
    assert hung == 1


async def test_a_proxy_that_breaks_the_first_connections():
    """A tunnel accepts before the server behind it does. The engine asks again."""
    broken = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal broken
        await reader.readuntil(b"\r\n\r\n")
        if broken:
            body = json.dumps(FACTS).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
        broken += 1
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        facts = await asyncio.to_thread(ask_facts, f"http://127.0.0.1:{port}", None, within_s=5.0)
    assert facts.as_row() == FACTS


@contextlib.asynccontextmanager
async def connected_to(there):
    async with aiohttp.ClientSession() as session, session.ws_connect(there.url + PATH) as socket:
        assert "facts" in await socket.receive_json(timeout=5)

        async def ask(ids, samples, **terms):
            frame = {"ids": ids, "samples": samples, "deadline_s": 10, "priority": None, "together": False, **terms}
            await socket.send_str(orjson.dumps(frame).decode())

        yield socket, ask


def asked(word: object, **columns: Any) -> dict[str, Any]:
    return {"messages": "How much?", "response": f"{word}", **columns}


async def outcomes_of(socket, count):
    rows: dict[int, Any] = {}
    while len(rows) < count:
        frame = await socket.receive_json(timeout=5)
        rows.update((row["id"], row) for row in frame["outcomes"])
    return rows


async def test_a_row_that_cannot_be_read_fails_alone(serving):
    with serving() as there:
        async with connected_to(there) as (socket, ask):
            await ask([0, 1, 2, 3], [asked(0.5), {"messages": []}, 7, asked(1)])
            rows = await outcomes_of(socket, 4)
    assert [rows[number]["reward"] for number in range(4)] == [0.5, None, None, 1.0]
    assert {rows[number]["reason"] for number in (1, 2)} == {"input"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": [[0]]},
        {"ids": ["a"]},
        {"ids": [0, 1]},
        {"deadline_s": "x"},
        {"priority": {}},
    ],
)
async def test_a_frame_that_cannot_be_read_leaves_nothing_under_way(serving, wrong):
    with serving() as there:
        async with connected_to(there) as (socket, ask):
            await ask(wrong.pop("ids", [0]), [asked(1)], **wrong)
            message = await socket.receive(timeout=5)
            assert message.type is not aiohttp.WSMsgType.TEXT or "put_off" in message.json()
        assert await asyncio.to_thread(there.drain, 2.0) == 0
    assert there.source.samples == []


async def test_a_sample_that_is_cancelled_at_once_is_not_asked(serving):
    with serving() as there:
        async with connected_to(there) as (socket, ask):

            async def at_once(**terms) -> None:
                # Both frames are one TCP segment, so the server reads the second before it submits the first.
                with there.paused():
                    await ask([0], [asked("hold")], **terms)
                    await socket.send_str('{"cancel": [0]}')

            await at_once()
            await at_once(together=True)
            await ask([1], [asked(0.5)])
            assert (await outcomes_of(socket, 1))[1]["reward"] == 0.5
            assert await asyncio.to_thread(there.drain, 2.0) == 0
    assert [each.response for each in there.source.samples] == ["0.5"]


async def test_what_does_not_fit_waits_and_the_rest_is_scored(serving):
    with serving(max_samples=3) as there:
        async with connected_to(there) as (socket, ask):
            await ask([0], [asked("hold")])
            assert await asyncio.to_thread(there.source.holding.wait, 5)
            await ask([1, 2, 3, 4], [asked(number / 8) for number in range(1, 5)])
            frame = await socket.receive_json(timeout=5)
            assert frame["put_off"]["ids"] == [3, 4]
            assert sorted(await outcomes_of(socket, 2)) == [1, 2]
            there.source.release.set()
            assert (await outcomes_of(socket, 1))[0]["reward"] == 1.0
