"""Both HTTP clients over real connections: what is sent, broken replies, closing, and no secret in any text."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from yarl import URL as Url

from qreward_plugins import RewardEngine
from qreward_plugins.errors import SourceHeld, SourceUnusable, Throttled, TransientError
from qreward_plugins.sources import aiohttp_client, http
from qreward_plugins.sources.aiohttp_client import AiohttpClient, PooledReply, PreparedPost
from qreward_plugins.sources.base import ServedWeights
from qreward_plugins.sources.http import ACCEPTED, Connecting

from ..kit import comes, connections_left, each_of, mistakes_of
from .wire import HEAD, KEY, PATIENCE_S, asked, completion, nothing, outcome_of, request_of, serving, text_of

pytestmark = pytest.mark.anyio


async def test_what_is_sent_and_what_comes_back(open_source, monkeypatch):
    said = completion(usage={"prompt_tokens": 5, "completion_tokens": 2})
    monkeypatch.setenv("QREWARD_TEST_KEY", f"{KEY}\n")  # of a file, which ends its lines
    async with serving(lambda exchange: exchange.reply(said, headers={"Set-Cookie": "session=abc"})) as server:
        settings = {"api_key": None, "api_key_env": "QREWARD_TEST_KEY", "headers": {"X-Team": "reward-team-7"}}
        source = open_source(server.base_url, parameters={"max_tokens": 9, "top_k": 1}, **settings)
        # Half a surrogate pair is replaced, and a whole one joined.
        request = request_of("a\ud800b \ud83d\ude00", max_tokens=5, temperature=0.0)
        reply, _ = await asked(source, request, request)
    assert (reply.text, reply.model, reply.finish_reason) == ("fine", "judge-1", "stop")
    assert reply.usage.total_tokens == 7
    exchange, again = server.exchanges
    assert ("cookie" in again.headers, server.connections) == (False, 1)
    assert exchange.head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    headers = {"authorization": f"Bearer {KEY}", "x-team": "reward-team-7", "accept-encoding": "identity"}
    assert exchange.headers.items() >= {**headers, "content-type": "application/json"}.items()
    body = {"model": "judge", "max_tokens": 9, "temperature": 0.0, "top_k": 1}
    assert exchange.json == {**body, "messages": [{"role": "user", "content": "a\ufffdb \U0001f600"}]}


FAULTS: dict[str, Callable[[Any], Any]] = {
    "no HTTP": lambda e: e.write(b"SSH-2.0-OpenSSH\r\n\r\n"),
    "many headers": lambda e: e.write(HEAD + b"X: y\r\n" * 100_000 + b"\r\n"),
    "a bad header": lambda e: e.write(HEAD + b"no colon\r\n\r\n"),
    "a bad length": lambda e: e.write(HEAD + b"Content-Length: -5\r\n\r\n{}"),
    "two lengths": lambda e: e.write(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    "chunks cut short": lambda e: (e.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"), e.writer.close()),
}
"""Replies that a judge server does not play (`test_faults`)."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_every_broken_reply_is_a_transient_error_and_the_next_request_works(fault, open_source):
    async with serving([lambda exchange: FAULTS[fault](exchange) and None, completion()]) as server:
        error, after = await asked(open_source(server.base_url), request_of(), request_of())
    assert type(error) is TransientError, error
    assert "'fast'" in str(error)
    assert server.base_url in str(error)
    assert error.__context__ is None
    assert after.text == "fine"


@pytest.mark.parametrize("body", ["endless", "reset", "silent"])
async def test_the_status_counts_even_if_the_body_of_the_error_never_ends(body, open_source, monkeypatch):
    monkeypatch.setattr(http, "_ERROR_BODY_S", 0.05)

    async def script(exchange):
        exchange.write(b"HTTP/1.1 429 Slow Down\r\nRetry-After: 4\r\nContent-Length: 900000000\r\n\r\nslow down")
        await exchange.writer.drain()
        if body == "reset":
            exchange.reset()
        while body == "endless":
            exchange.write(b"x" * 10_000)
            await exchange.writer.drain()
        await exchange.hung_up()

    async with serving(script) as server:
        [error] = await asked(open_source(server.base_url))
    assert isinstance(error, Throttled)
    assert error.retry_after_s == 4.0


async def test_a_name_that_does_not_resolve_or_takes_too_long(open_source, monkeypatch):
    async def never(*args, **kwargs):
        await asyncio.Event().wait()

    async def unknown(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    for resolve, says in ((never, "could not connect within 0.05 s"), (unknown, "could not connect (Name")):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        source, sent = open_source("http://h.example/v1", timeouts={"connect_s": 0.05}), []
        error = await outcome_of(source, request_of(), lambda sent=sent: sent.append(1))
        await source.aclose()
        assert (type(error), sent) == (TransientError, [])
        assert says in str(error)
        assert str(error).endswith("; start the server there, or correct its URL")


async def test_a_handshake_that_fails_or_never_ends(open_source):
    async def garble(reader, writer):
        writer.write(answer)
        await reader.read()
        writer.close()

    for answer, says in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "; the server probably speaks http, not https"),
        (b"", "within 0.05 s"),
    ):
        server = await asyncio.start_server(garble, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        timeouts = {"connect_s": 5 if answer else 0.05}
        [error] = await asked(open_source(f"https://127.0.0.1:{port}/v1", timeouts=timeouts))
        assert type(error) is TransientError
        assert says in str(error)
        server.close()
        await asyncio.sleep(0.01)


async def test_a_certificate_that_does_not_verify_makes_the_source_unusable(open_source, self_signed):
    async with serving(completion(), self_signed) as server:
        [error] = await asked(open_source(server.base_url))
        assert isinstance(error, SourceUnusable)
        assert "self" in str(error)
        assert "verify_tls" in str(error)
        assert server.exchanges == []
        [reply] = await asked(open_source(server.base_url, verify_tls=False))
        assert reply.text == "fine"


async def test_every_third_request_is_cancelled_and_nothing_leaks(open_source):
    hanging = 0

    async def script(exchange):
        nonlocal hanging
        if exchange.json["messages"][0]["content"] != "hang":
            return exchange.reply(completion())
        hanging += 1
        if hanging % 2:
            exchange.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")
        await exchange.hung_up()
        hanging -= 1

    before = asyncio.all_tasks()
    async with serving(script) as server:
        source, at_once = open_source(server.base_url), asyncio.Semaphore(32)

        async def one(number):
            async with at_once:
                if number % 3:
                    return await text_of(source)
                task = asyncio.create_task(outcome_of(source, request_of("hang")))
                # Anywhere between the first step and the middle of an answer.
                for _ in range(number):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                return "cancelled"

        assert Counter(await asyncio.gather(*map(one, range(150)))) == {"cancelled": 50, "fine": 100}
        assert all(replica.in_flight == 0 for replica in source.replicas_asked.all)
        assert await text_of(source) == "fine"
        await comes(lambda: hanging == 0, 20.0)  # each connection is closed with its request
        await source.aclose()
        assert await asyncio.to_thread(connections_left, server.base_url, listening=False) == []
    assert asyncio.all_tasks() == before


async def test_a_closed_source_answers_no_more_and_fails_what_is_in_flight(open_source):
    got = asyncio.Event()

    async def script(exchange):
        got.set()
        await exchange.hung_up()

    before = asyncio.all_tasks()
    async with serving(script) as server:
        source = open_source(server.base_url)
        task = asyncio.create_task(outcome_of(source, request_of()))
        await got.wait()
        await source.aclose()
        await source.aclose()
        assert isinstance(await task, TransientError)
        assert isinstance(await outcome_of(source, request_of()), SourceUnusable)
        assert await asyncio.to_thread(connections_left, server.base_url, listening=False) == []
    assert asyncio.all_tasks() == before


async def test_a_reply_of_a_server_that_got_other_weights_meanwhile_is_no_answer(open_source):
    def script(exchange):
        source.replicas_asked.all[0].weights = ServedWeights("step-1", "1f")
        exchange.reply(completion())

    async with serving(script) as server:
        source = open_source(server.base_url)
        [outcome] = await asked(source)
    assert isinstance(outcome, SourceHeld)


async def test_no_secret_gets_into_any_text_of_an_error(open_source, open_service):
    secret = "hdr-9876543210-zyxw"
    echo = json.dumps({"error": {"message": f"Bad key {KEY[:11]}...{KEY[-8:]} and {secret}"}})
    scripts: list[Callable[[Any], None]] = [
        lambda e: e.reply(echo, "401 Unauthorized"),
        lambda e: e.reply(echo),
        lambda e: e.reply(f"{KEY} is not JSON, {secret} neither"),
        lambda e: e.reply(f'{{"{secret}": NaN}}'),
        lambda e: e.write(HEAD + f"{KEY}: x\r\nno colon {KEY} {secret}\r\n\r\n".encode()),
        lambda e: e.write(f"HTTP/1.1 {KEY}\r\n\r\n".encode()),
        lambda e: e.write(HEAD + f"Content-Length: {secret}\r\n\r\n".encode()),
        lambda e: e.reply(b"", "302 Found", {"Location": f"http://{KEY}.example/{secret}"}),
        lambda e: e.reset(),
    ]
    for opened in (open_source, open_service):
        async with serving(scripts) as server:
            source = opened(server.score_url, headers={"X-Secret": secret})
            for error in await asked(source, *[request_of() for _ in scripts]):
                report = traceback.TracebackException.from_exception(error, capture_locals=True)
                shown = "".join([str(error), repr(error), repr(error.__dict__), repr(source), *report.format()])
                for hidden in (KEY, secret):
                    assert hidden[:8] not in shown
                    assert hidden[-8:] not in shown


def test_event_loops_one_after_the_other(open_source):
    """Warnings are errors here, those of sessions and sockets that nobody closed included."""
    source = open_source("http://127.0.0.1:1/v1")

    async def use(close):
        async with serving(completion()) as server:
            source.move([server.base_url])
            text = await text_of(source)
            if close:
                await source.aclose()
            return text

    assert [asyncio.run(use(close)) for close in (False, False, True)] == ["fine"] * 3


SERVICE = {"kind": "http", "url": "https://h:8000/score", "base_url": None, "model": None}


@each_of(
    ("settings", "path"),
    [
        ({"api_key": "a\nb"}, "api_key"),
        ({"api_key": "schlüssel"}, "api_key"),
        ({"api_key": "k", "headers": {"authorization": "x"}}, "api_key"),
        ({"headers": {"Content-Length": "3"}}, "headers.Content-Length"),
        ({"headers": {"X-A": "3\r\nX-B: 4"}}, "headers.X-A"),
        ({"base_url": ["http://g/v1", "http://h/v1/chat/completions/"]}, "base_url"),
        ({**SERVICE, "parameters": {"response": None}}, "parameters.response"),
        ({**SERVICE, "results_key": "results"}, "results_key"),
    ],
)
def test_mistakes_are_named(settings, path):
    node = {"kind": "openai", "base_url": "https://h/v1", "model": "m", **settings}
    judge = "llm" if node["kind"] == "openai" else "function"
    source = {key: value for key, value in node.items() if value is not None}
    found = mistakes_of(RewardEngine, {"sources": {"s": source}, "judges": {"j": {"kind": judge}}})
    assert ([*found], "X-B" in str(found)) == ([f"sources.s.{path}"], False)


async def test_the_proxy_of_the_environment_is_used_and_netrc_is_not(open_source, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password netrc-password\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("no_proxy", "direct.example")
    refuses = b"proxy-password-1 was wrong", "407 Proxy Authentication Required"
    async with serving([completion(), lambda exchange: exchange.reply(*refuses)]) as server:
        monkeypatch.setenv("http_proxy", f"http://me:proxy-password-1@127.0.0.1:{server.port}")
        assert http.proxy_for(Url("http://direct.example/v1")) is None
        reply, error = await asked(open_source("http://judge.example/v1"), request_of(), request_of())
    assert reply.text == "fine"
    assert isinstance(error, SourceUnusable)
    assert "proxy-password-1" not in str(error)
    first = server.exchanges[0]
    assert first.head.startswith("POST http://judge.example/v1/chat/completions HTTP/1.1")
    assert first.headers["proxy-authorization"].startswith("Basic ")
    assert first.headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("late", [False, True])
async def test_a_second_reply_to_one_request_is_not_the_reply_to_the_next(open_source, late):
    read, written = asyncio.Event(), asyncio.Event()

    async def script(exchange):
        exchange.reply(completion("own"))
        if late:
            await read.wait()
            read.clear()
        exchange.reply(completion("another's"))
        written.set()

    async with serving(script) as server:
        source = open_source(server.base_url)
        for number in range(1, 4):
            assert (await text_of(source), server.connections) == ("own", number)
            read.set()
            await written.wait()
            written.clear()
            # Both ends are in this loop, which hands over what was written in its next turns.
            for _ in range(3):
                await asyncio.sleep(0)
        await source.aclose()


BODY = b'{"question": "\xc3\xa9"}'
BEYOND_ALL_BUFFERS = b"x" * 2**24
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nSet-Cookie: session=1\r\n\r\n{}"
WAYS = pytest.mark.parametrize("options", [{}, {"headers": {"X-Further": "1"}}], ids=["prepared", "by the session"])


def client_with(headers=None, *, verify_tls=True):
    return AiohttpClient(Connecting("judge", headers or {}, {}, (), verify_tls, 5.0, {}))


async def post(client, url, on_sent=nothing, **options):
    return await asyncio.wait_for(client.post(url, BODY, on_sent=on_sent, max_reply_bytes=1000, **options), PATIENCE_S)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
FURTHER = {
    "half of a 429": OK + b"HTTP/1.1 429 Slow Down\r\nRetry-After: 300\r\nX-Begun: ",
    "half of a 100": OK + b"HTTP/1.1 100 Continue\r\n",
    "a trailer": CHUNKED + b"Retry-After: 300\r\n\r\n",
}
"""What a server writes for a first request, with something beside its reply."""


@pytest.mark.parametrize("first", FURTHER)
async def test_what_came_beside_a_reply_is_no_part_of_the_next_one(first):
    replies = iter([FURTHER[first], OK])
    async with serving(lambda exchange: exchange.write(next(replies))) as server:
        client, url = client_with(), Url(server.base_url)
        both = [await post(client, url), await post(client, url)]
        await client.aclose()
    assert [(reply.status, reply.body) for reply in both] == [(200, b"{}")] * 2
    assert "Retry-After" not in both[1].headers


# Posts of aiohttp that are prepared: they send what aiohttp sends, and no connection stays behind


async def test_a_request_has_the_same_bytes_as_one_of_aiohttp():
    headers = {"Authorization": "Bearer key", "X-Name": "J\xfcrgen"}
    async with serving(lambda exchange: exchange.write(OK)) as server:
        client, url = client_with(headers), Url(f"{server.base_url}?version=1")
        await post(client, url)
        await post(client, url, headers={"X-Further": "1"})
        await client.aclose()
        async with aiohttp.ClientSession(headers={"Accept-Encoding": ACCEPTED, **headers}) as session:
            await session.post(url, data=aiohttp.BytesPayload(BODY, content_type="application/json"))
    prepared, further, usual = (sorted(each.head.split("\r\n")) for each in server.exchanges)
    assert prepared == usual
    assert set(further) - set(usual) == {"X-Further: 1"}
    assert {exchange.body for exchange in server.exchanges} == {BODY}


async def test_another_version_of_aiohttp_sends_by_its_session(monkeypatch):
    assert aiohttp_client.TESTED_VERSION
    monkeypatch.setattr(aiohttp_client, "TESTED_VERSION", False)
    monkeypatch.setattr(PreparedPost, "send", None)
    async with serving(lambda exchange: exchange.write(OK)) as server:
        client = client_with()
        assert (await post(client, Url(server.base_url))).body == b"{}"
        await client.aclose()


async def test_nothing_is_written_if_the_call_must_not_be_sent_any_more():
    def withheld():
        raise asyncio.CancelledError

    async with serving(lambda exchange: exchange.write(OK)) as server:
        client, url = client_with(), Url(server.base_url)
        await post(client, url)
        with pytest.raises(asyncio.CancelledError):
            await client.post(url, BODY, on_sent=withheld, max_reply_bytes=1000)
        assert [session for session, _ in client._sessions.values() if session.connector._acquired] == []
        await client.aclose()
    assert len(server.exchanges) == 1


async def test_a_reply_that_was_not_read_to_its_end_leaves_nothing_to_the_garbage_collector(monkeypatch):
    kept: list[PooledReply] = []
    monkeypatch.setattr(PooledReply, "body", lambda reply, limit: kept.append(reply) or asyncio.Event().wait())
    async with serving(lambda exchange: exchange.write(HEAD + b"Content-Length: 9\r\n\r\n{")) as server:
        client = client_with()
        task = asyncio.create_task(post(client, Url(server.base_url)))
        await comes(lambda: kept)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gone = weakref.ref(kept.pop())
        gc.disable()
        try:
            del task
            await asyncio.sleep(0)
            assert gone() is None
        finally:
            gc.enable()
        await client.aclose()


@WAYS
@pytest.mark.parametrize("ending", ["cancelled", "closed"])
async def test_the_rest_of_a_request_that_has_ended_is_never_written(ending, options):
    async def arrived():
        """The bytes that arrive on the first connection from now on, until its client closes it."""
        loop, total = asyncio.get_running_loop(), 0
        connection, _ = await loop.sock_accept(listening)
        with connection, contextlib.suppress(ConnectionError):
            while chunk := await loop.sock_recv(connection, 2**20):
                total += len(chunk)
        return total

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        client, sent = client_with(), asyncio.Event()
        url = Url(f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
        posting = client.post(url, BEYOND_ALL_BUFFERS, on_sent=sent.set, max_reply_bytes=1000, **options)
        task = asyncio.create_task(posting)
        await asyncio.wait_for(sent.wait(), PATIENCE_S)
        for _ in range(5):
            await asyncio.sleep(0)
        if ending == "cancelled":
            task.cancel()
        else:
            await asyncio.wait_for(client.aclose(), PATIENCE_S)
        with pytest.raises(asyncio.CancelledError if ending == "cancelled" else TransientError):
            await asyncio.wait_for(task, PATIENCE_S)
        assert await asyncio.wait_for(arrived(), PATIENCE_S) < len(BEYOND_ALL_BUFFERS)
        await client.aclose()


@WAYS
@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
async def test_the_connection_of_a_request_that_was_answered_before_it_was_written_is_not_used_again(
    tls, options, self_signed
):
    connections = 0

    async def refuse_unread(reader, writer):
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\n{}" if connections == 1 else OK)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(ConnectionError):
            await over.wait()
        writer.transport.abort()

    over = asyncio.Event()
    async with await asyncio.start_server(refuse_unread, "127.0.0.1", 0, ssl=self_signed if tls else None) as server:
        client = client_with(verify_tls=False)
        url = Url(f"http{'s' * tls}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        refused = await client.post(url, BEYOND_ALL_BUFFERS, on_sent=nothing, max_reply_bytes=1000, **options)
        assert (refused.status, refused.body) == (413, b"{}")
        assert (await post(client, url)).status == 200
        await client.aclose()
        over.set()
    assert connections == 2
