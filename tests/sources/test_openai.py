from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from qreward_plugins.errors import (
    ConfigurationError,
    InvalidReply,
    PermanentError,
    SampleRefused,
    SourceError,
    SourceUnusable,
    Throttled,
    TransientError,
)
from qreward_plugins.sources import OpenAISource, http, http_reading
from qreward_plugins.sources.aiohttp_client import PreparedPost

pytestmark = pytest.mark.anyio
PATIENCE_S = 10.0


def unheard() -> None:
    pass


async def failure(source: OpenAISource, request: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        await asyncio.wait_for(source.send(request, on_sent=unheard), PATIENCE_S)
    return caught.value


async def test_what_is_sent_and_what_comes_back(
    serve: Any, open_source: Any, request_of: Any, completed: Any, key: str
) -> None:
    async def script(exchange: Any) -> None:
        exchange.reply(completed(usage={"prompt_tokens": 5, "completion_tokens": 2}))

    async with serve(script) as server:
        source = open_source(
            server.base_url, parameters={"max_tokens": 9, "top_k": 1}, headers={"X-Team": "reward-team-7"}
        )
        reply = await source.send(request_of("Judge.", max_tokens=5, temperature=0.0), on_sent=unheard)
        await source.aclose()
    assert (reply.text, reply.model, reply.finish_reason) == ("fine", "judge-1", "stop")
    assert reply.usage.total_tokens == 7
    [exchange] = server.exchanges
    assert exchange.head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert exchange.headers["authorization"] == f"Bearer {key}"
    assert exchange.headers["x-team"] == "reward-team-7"
    assert exchange.headers["content-type"] == "application/json"
    assert json.loads(exchange.body) == {
        "model": "judge",
        "messages": [{"role": "user", "content": "Judge."}],
        "max_tokens": 9,
        "temperature": 0.0,
        "top_k": 1,
    }


async def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_joined(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    async def script(exchange: Any) -> None:
        exchange.reply(completed())

    async with serve(script) as server:
        source = open_source(server.base_url)
        await source.send(request_of("a\ud800b \ud83d\ude00"), on_sent=unheard)
        await source.aclose()
    assert json.loads(server.exchanges[0].body)["messages"][0]["content"] == "a\ufffdb \U0001f600"


async def test_reasoning_models_get_no_temperature_and_the_bound_that_they_read(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    async def script(exchange: Any) -> None:
        exchange.reply(completed())

    parameters = {"reasoning_effort": "low", "seed": None, "absent": None}
    async with serve(script) as server:
        source = open_source(server.base_url, dialect="openai_reasoning", parameters=parameters)
        await source.send(request_of("Judge.", max_tokens=5, temperature=0.0, seed=3), on_sent=unheard)
        await source.aclose()
    assert json.loads(server.exchanges[0].body) == {
        "model": "judge",
        "messages": [{"role": "user", "content": "Judge."}],
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
    }


async def test_parameters_that_are_no_json_refuse_the_sample(open_source: Any, request_of: Any) -> None:
    source = open_source("http://127.0.0.1:9/v1")
    error = await failure(source, request_of(thing=object()))
    assert type(error) is SampleRefused
    assert "cannot be written" in str(error)
    await source.aclose()


async def test_a_large_prompt_is_sent_without_a_warning(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    async def script(exchange: Any) -> None:
        exchange.reply(completed())

    sent: list[int] = []
    async with serve(script) as server:
        source = open_source(server.base_url)
        await source.send(request_of("x" * 3_000_000), on_sent=lambda: sent.append(1))
        await source.aclose()
    assert len(server.exchanges[0].body) > 3_000_000
    assert sent == [1]


async def test_on_sent_is_called_once_when_the_request_is_on_its_way(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    got, go = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        got.set()
        await go.wait()
        exchange.reply(completed())

    sent: list[int] = []
    async with serve(script) as server:
        source = open_source(server.base_url)
        task = asyncio.create_task(source.send(request_of(), on_sent=lambda: sent.append(1)))
        await got.wait()
        assert sent == [1]
        go.set()
        await task
        await source.aclose()
    assert sent == [1]


async def test_on_sent_is_not_called_when_nothing_was_sent(open_source: Any, request_of: Any, serve: Any) -> None:
    async def script(exchange: Any) -> None:
        raise AssertionError

    async with serve(script) as server:
        pass
    source = open_source(server.base_url)
    sent: list[int] = []
    with pytest.raises(TransientError, match="could not connect"):
        await source.send(request_of(), on_sent=lambda: sent.append(1))
    assert sent == []
    await source.aclose()


async def test_a_kept_connection_that_the_server_drops_is_one_attempt(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    async def script(exchange: Any) -> None:
        if len(server.exchanges) == 1:
            exchange.reply(completed())
        else:
            exchange.reset()

    sent: list[int] = []
    async with serve(script) as server:
        source = open_source(server.base_url)
        await source.send(request_of(), on_sent=lambda: sent.append(1))
        with pytest.raises(TransientError):
            await source.send(request_of(), on_sent=lambda: sent.append(2))
        await source.aclose()
    # A client that repeated the request by itself would show up as a third exchange that nobody counted.
    assert len(server.exchanges) == 2
    assert server.connections == 1
    assert sent == [1, 2]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
FAULTS: dict[str, Callable[[Any], None]] = {
    "closed without an answer": lambda e: e.writer.close(),
    "reset": lambda e: e.reset(),
    "no HTTP": lambda e: e.write(b"SSH-2.0-OpenSSH\r\n\r\n"),
    "a bad status": lambda e: e.write(b"HTTP/1.1 abc OK\r\n\r\n"),
    "a huge header": lambda e: e.write(HEAD + b"X: " + b"y" * 1_000_000 + b"\r\n\r\n"),
    "many headers": lambda e: e.write(HEAD + b"X: y\r\n" * 100_000 + b"\r\n"),
    "a bad header": lambda e: e.write(HEAD + b"no colon\r\n\r\n"),
    "a bad length": lambda e: e.write(HEAD + b"Content-Length: -5\r\n\r\n{}"),
    "two lengths": lambda e: e.write(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    "a bad chunk": lambda e: e.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"),
    "a body cut short": lambda e: (e.write(HEAD + b"Content-Length: 500\r\n\r\n{"), e.writer.close())[0],
    "a body reset": lambda e: (e.write(HEAD + b"Content-Length: 500\r\n\r\n{"), e.reset())[0],
    "chunks cut short": lambda e: (
        e.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"),
        e.writer.close(),
    )[0],
    "bad gzip": lambda e: e.reply(b"not gzip at all", headers={"Content-Encoding": "gzip"}),
    "truncated gzip": lambda e: e.reply(gzipped(b"{" * 5000)[:-20], headers={"Content-Encoding": "gzip"}),
    "an unknown encoding": lambda e: e.reply(b"\x00\x01", headers={"Content-Encoding": "zstd"}),
    "nothing": lambda e: e.reply(b""),
    "204": lambda e: e.write(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "HTML": lambda e: e.reply(b"<html>Sign in</html>", headers={"Content-Type": "text/html"}),
    "invalid UTF-8": lambda e: e.reply(b'{"choices": "\xff\xfe"}'),
    "truncated JSON": lambda e: e.reply(b'{"choices": [{"mess'),
    "an unasked upgrade": lambda e: e.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
    ),
}


def gzipped(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=31)
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize("fault", FAULTS)
async def test_every_broken_reply_is_a_transient_error_and_the_next_request_works(
    fault: str, serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    async def script(exchange: Any) -> None:
        if len(server.exchanges) == 1:
            FAULTS[fault](exchange)
            if "upgrade" in fault:
                exchange.writer.close()
        else:
            exchange.reply(completed())

    async with serve(script) as server:
        source = open_source(server.base_url)
        error = await failure(source, request_of())
        assert type(error) in ((TransientError, PermanentError) if "upgrade" in fault else (TransientError,)), error
        assert "'fast'" in str(error)
        assert server.base_url in str(error)
        assert error.__context__ is None
        reply = await source.send(request_of(), on_sent=unheard)
        assert reply.text == "fine"
        await source.aclose()


async def test_a_gzipped_reply_is_read_and_a_bomb_is_stopped_early(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    bomb = gzipped(b" " * 100_000_000)

    async def script(exchange: Any) -> None:
        good = gzipped(json.dumps(completed()).encode())
        exchange.reply(good if len(server.exchanges) == 1 else bomb, headers={"Content-Encoding": "gzip"})

    async with serve(script) as server:
        source = open_source(server.base_url, max_reply_bytes=100_000)
        assert (await source.send(request_of(), on_sent=unheard)).text == "fine"
        error = await failure(source, request_of())
        assert type(error) is TransientError
        assert "larger than 100,000 bytes" in str(error)
        await source.aclose()


async def test_an_endless_body_is_cut_off_and_its_connection_closed(
    serve: Any, open_source: Any, request_of: Any
) -> None:
    closed = asyncio.Event()

    async def script(exchange: Any) -> None:
        exchange.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                exchange.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
                await exchange.writer.drain()
        finally:
            closed.set()

    async with serve(script) as server:
        source = open_source(server.base_url, max_reply_bytes=50_000)
        error = await failure(source, request_of())
        assert "larger than 50,000 bytes" in str(error)
        await asyncio.wait_for(closed.wait(), PATIENCE_S)
        await source.aclose()


@pytest.mark.parametrize("body", ["endless", "reset", "silent"])
async def test_the_status_counts_even_if_the_body_of_the_error_never_ends(
    body: str, serve: Any, open_source: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_reading, "_ERROR_BODY_S", 0.05)

    async def script(exchange: Any) -> None:
        exchange.write(b"HTTP/1.1 429 Slow Down\r\nRetry-After: 4\r\nContent-Length: 900000000\r\n\r\nslow down")
        await exchange.writer.drain()
        if body == "reset":
            exchange.reset()
        while body == "endless":
            exchange.write(b"x" * 10_000)
            await exchange.writer.drain()
        await exchange.hung_up()

    async with serve(script) as server:
        source = open_source(server.base_url)
        error = await failure(source, request_of())
        assert isinstance(error, Throttled)
        assert error.retry_after_s == 4.0
        await source.aclose()


async def test_a_redirect_is_not_followed(serve: Any, open_source: Any, request_of: Any, completed: Any) -> None:
    async def elsewhere(exchange: Any) -> None:
        exchange.reply(completed())

    async def script(exchange: Any) -> None:
        exchange.reply(b"", "307 Temporary Redirect", {"Location": f"{other.base_url}/chat/completions"})

    async with serve(elsewhere) as other, serve(script) as server:
        source = open_source(server.base_url)
        error = await failure(source, request_of())
        assert isinstance(error, PermanentError)
        assert "307" in str(error)
        assert other.connections == 0
        await source.aclose()


async def test_cookies_are_not_kept(serve: Any, open_source: Any, request_of: Any, completed: Any) -> None:
    async def script(exchange: Any) -> None:
        exchange.reply(completed(), headers={"Set-Cookie": "session=abc"})

    async with serve(script) as server:
        source = open_source(server.base_url)
        for _ in range(2):
            await source.send(request_of(), on_sent=unheard)
        await source.aclose()
    assert "cookie" not in server.exchanges[1].headers
    assert server.connections == 1


async def test_a_connection_that_is_never_accepted_times_out(
    open_source: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*args: Any, **kwargs: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    source = open_source("http://slow.example/v1", timeouts={"connect_s": 0.05})
    error = await failure(source, request_of())
    assert type(error) is TransientError
    assert "could not connect within 0.05 s" in str(error)
    await source.aclose()


async def test_a_name_that_does_not_resolve(open_source: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    source = open_source("http://nowhere.example/v1")
    error = await failure(source, request_of())
    assert type(error) is TransientError
    assert "'nowhere.example' could not be resolved" in str(error)
    await source.aclose()


async def test_a_foreign_exception_of_any_kind_is_mapped(
    open_source: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    source = open_source("http://127.0.0.1:9/v1")
    for raised in (ValueError(key), RuntimeError(key), zlib.error(key), UnicodeError(key), asyncio.TimeoutError()):

        def fail(*args: Any, error: Exception = raised, **kwargs: Any) -> Any:
            raise error

        monkeypatch.setattr(PreparedPost, "send", fail)
        monkeypatch.setattr(httpx.AsyncClient, "build_request", fail)
        error = await failure(source, request_of())
        assert type(error) is TransientError
        assert key not in str(error)
    await source.aclose()


async def test_a_certificate_that_does_not_verify_makes_the_source_unusable(
    serve: Any, open_source: Any, request_of: Any, completed: Any, self_signed: ssl.SSLContext
) -> None:
    async def script(exchange: Any) -> None:
        exchange.reply(completed())

    async with serve(script, self_signed) as server:
        source = open_source(server.base_url)
        error = await failure(source, request_of())
        assert isinstance(error, SourceUnusable)
        assert "self" in str(error)
        assert "verify_tls" in str(error)
        await source.aclose()
        assert server.exchanges == []
        trusting = open_source(server.base_url, verify_tls=False)
        assert (await trusting.send(request_of(), on_sent=unheard)).text == "fine"
        await trusting.aclose()


async def test_a_handshake_that_fails_or_never_ends(open_source: Any, request_of: Any) -> None:
    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()
        writer.close()

    for answer, says in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "; the server probably speaks http, not https"),
        (b"", "within 0.05 s"),
    ):
        server = await asyncio.start_server(garble, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        source = open_source(f"https://127.0.0.1:{port}/v1", timeouts={"connect_s": 5 if answer else 0.05})
        error = await failure(source, request_of())
        assert type(error) is TransientError
        assert says in str(error)
        await source.aclose()
        server.close()
        await asyncio.sleep(0.01)


async def test_cancelling_closes_the_connection(serve: Any, open_source: Any, request_of: Any) -> None:
    got, gone = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        exchange.write(HEAD + b"Content-Length: 500\r\n\r\n{")
        got.set()
        await exchange.hung_up()
        gone.set()

    async with serve(script) as server:
        source = open_source(server.base_url)
        task = asyncio.create_task(source.send(request_of(), on_sent=unheard))
        await got.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
        await source.aclose()


async def test_hundreds_of_requests_of_which_a_third_are_cancelled_leak_nothing(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    chance = random.Random(7)
    hanging: dict[str, asyncio.Event] = {}

    async def script(exchange: Any) -> None:
        text = json.loads(exchange.body)["messages"][0]["content"]
        if text not in hanging:
            return exchange.reply(completed())
        hanging[text].set()
        return await exchange.hung_up()

    before = asyncio.all_tasks()
    async with serve(script) as server:
        source = open_source(server.base_url)
        at_once = asyncio.Semaphore(64)

        async def one(number: int) -> str:
            async with at_once:
                text = str(number)
                doomed = chance.random() < 0.3
                if doomed:
                    hanging[text] = asyncio.Event()
                task = asyncio.create_task(source.send(request_of(text), on_sent=unheard))
                if doomed and number % 2:
                    await hanging[text].wait()
                elif doomed:
                    # Anywhere between the first step and the wait for an answer.
                    for _ in range(chance.randrange(30)):
                        await asyncio.sleep(0)
                if doomed:
                    task.cancel()
                try:
                    return (await task).text
                except asyncio.CancelledError:
                    return "cancelled"

        results = await asyncio.gather(*(one(number) for number in range(400)))
        assert results.count("cancelled") == len(hanging) > 90
        assert results.count("fine") == 400 - len(hanging)
        [(session, _)] = source._http._sessions.values()
        if isinstance(session, dict):
            [session] = session.values()
            pool = session._transport._pool
            assert pool._requests == []
            # httpcore removes the closed connection of a cancelled request at the next request, and keeps one that was
            # cancelled before it connected: that one has no socket, and the pool has no bound.
            assert all(each.is_idle() or each.is_closed() or each._connection is None for each in pool.connections)
        else:
            assert session.connector._acquired == set()
        assert all(replica.in_flight == 0 for replica in source._replicas._replicas)
        assert (await source.send(request_of(), on_sent=unheard)).text == "fine"
        await source.aclose()
        assert session.is_closed if isinstance(session, httpx.AsyncClient) else session.closed
    assert asyncio.all_tasks() == before


async def test_a_replica_that_is_down_or_broken_is_avoided(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    async def good(exchange: Any) -> None:
        exchange.reply(completed())

    async def bad(exchange: Any) -> None:
        exchange.reply(b"{}", "500 Oops")

    async with serve(bad) as down:
        pass
    async with serve(good) as up, serve(bad) as broken:
        source = open_source(down.base_url, broken.base_url, up.base_url)
        outcomes = []
        for _ in range(8):
            try:
                outcomes.append((await source.send(request_of(), on_sent=unheard)).text)
            except TransientError:
                outcomes.append("failed")
        assert outcomes == ["failed", "failed", *["fine"] * 6]
        assert len(broken.exchanges) == 1
        await source.aclose()


async def test_a_replica_that_shuts_down_is_avoided_at_once(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    async def good(exchange: Any) -> None:
        exchange.reply(completed())

    async def draining(exchange: Any) -> None:
        said = "cannot schedule new futures after shutdown"
        exchange.reply({"error": {"message": said, "code": 500}}, "500 Internal Server Error")

    async with serve(draining) as first, serve(good) as second:
        source = open_source(first.base_url, second.base_url)
        with pytest.raises(TransientError):
            await source.send(request_of(), on_sent=unheard)
        for _ in range(4):
            assert (await source.send(request_of(), on_sent=unheard)).text == "fine"
        shown = source.replica_statistics(asyncio.get_running_loop().time())
        assert [replica.health for replica in shown] == ["draining", "up"]
        assert [(replica.requests, replica.failures) for replica in shown] == [(1, 1), (4, 0)]
        assert len(first.exchanges) == 1
        await source.aclose()


async def test_replicas_share_the_load(serve: Any, open_source: Any, request_of: Any, completed: Any) -> None:
    all_there, go = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        if len(first.exchanges) + len(second.exchanges) == 6:
            all_there.set()
        await go.wait()
        exchange.reply(completed())

    async with serve(script) as first, serve(script) as second:
        source = open_source(first.base_url, second.base_url)
        tasks = [asyncio.create_task(source.send(request_of(), on_sent=unheard)) for _ in range(6)]
        await all_there.wait()
        assert len(first.exchanges) == len(second.exchanges) == 3
        go.set()
        await asyncio.gather(*tasks)
        await source.aclose()


async def test_a_refusal_passes_through(serve: Any, open_source: Any, request_of: Any) -> None:
    async def script(exchange: Any) -> None:
        exchange.reply({"error": {"code": "content_filter", "message": "flagged"}}, "400 Bad Request")

    async with serve(script) as server:
        source = open_source(server.base_url)
        with pytest.raises(InvalidReply, match="flagged"):
            await source.send(request_of(), on_sent=unheard)
        await source.aclose()


async def test_a_closed_source_answers_no_more_and_closes_twice(open_source: Any, request_of: Any) -> None:
    source = open_source("http://127.0.0.1:9/v1")
    await source.aclose()
    await source.aclose()
    assert isinstance(await failure(source, request_of()), SourceUnusable)


async def test_closing_fails_the_requests_in_flight(serve: Any, open_source: Any, request_of: Any) -> None:
    got = asyncio.Event()

    async def script(exchange: Any) -> None:
        got.set()
        await exchange.hung_up()

    async with serve(script) as server:
        source = open_source(server.base_url)
        task = asyncio.create_task(source.send(request_of(), on_sent=unheard))
        await got.wait()
        await source.aclose()
        with pytest.raises(TransientError):
            await asyncio.wait_for(task, PATIENCE_S)


async def test_no_secret_gets_into_any_text_of_an_error(
    serve: Any, open_source: Any, request_of: Any, key: str
) -> None:
    secret = "hdr-9876543210-zyxw"
    echo = json.dumps({"error": {"message": f"Bad key {key[:11]}...{key[-8:]} and {secret}"}})
    scripts: list[Callable[[Any], None]] = [
        lambda e: e.reply(echo, "401 Unauthorized"),
        lambda e: e.reply(echo),
        lambda e: e.write(HEAD + f"{key}: x\r\nno colon {key} {secret}\r\n\r\n".encode()),
        lambda e: e.write(f"HTTP/1.1 {key}\r\n\r\n".encode()),
        lambda e: e.write(HEAD + f"Content-Length: {secret}\r\n\r\n".encode()),
        lambda e: e.reply(b"", "302 Found", {"Location": f"http://{key}.example/{secret}"}),
        lambda e: e.reset(),
    ]

    async def script(exchange: Any) -> None:
        scripts[len(server.exchanges) - 1](exchange)

    async with serve(script) as server:
        source = open_source(server.base_url, headers={"X-Secret": secret})
        for _ in scripts:
            error = await failure(source, request_of())
            report = traceback.TracebackException.from_exception(error, capture_locals=True)
            shown = "".join([str(error), repr(error), repr(error.__dict__), repr(source), *report.format()])
            for hidden in (key, secret):
                assert hidden[:8] not in shown
                assert hidden[-8:] not in shown
        await source.aclose()


def test_two_event_loops_one_after_the_other(serve: Any, open_source: Any, request_of: Any, completed: Any) -> None:
    source: OpenAISource | None = None

    async def script(exchange: Any) -> None:
        exchange.reply(completed())

    async def use(close: bool) -> str:
        nonlocal source
        async with serve(script) as server:
            source = source or open_source(server.base_url)
            source._urls = {url: type(target)(f"{server.base_url}/x") for url, target in source._urls.items()}
            text = (await source.send(request_of(), on_sent=unheard)).text
            if close:
                await source.aclose()
            return text

    # Warnings are errors here, those of sessions and sockets that nobody closed included.
    assert asyncio.run(use(close=False)) == "fine"
    assert asyncio.run(use(close=False)) == "fine"
    assert asyncio.run(use(close=True)) == "fine"


def test_a_loop_that_was_closed_and_never_shut_down_is_let_go(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    source: OpenAISource | None = None

    async def script(exchange: Any) -> None:
        # The connection is not kept, so that the source leaves a session behind but no socket.
        exchange.reply(completed(), headers={"Connection": "close"})

    async def use(close: bool) -> str:
        nonlocal source
        async with serve(script) as server:
            source = source or open_source(server.base_url)
            source._urls = {url: type(target)(f"{server.base_url}/x") for url, target in source._urls.items()}
            text = (await source.send(request_of(), on_sent=unheard)).text
            for _ in range(3):
                await asyncio.sleep(0)
            if close:
                await source.aclose()
            return text

    for close in (False, True):
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(use(close)) == "fine"
        loop.close()


def test_a_source_that_nobody_closed_is_closed_with_its_loop(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    async def script(exchange: Any) -> None:
        exchange.reply(completed())

    async def use() -> None:
        async with serve(script) as server:
            await open_source(server.base_url).send(request_of(), on_sent=unheard)

    asyncio.run(use())


CONFIG: dict[str, Any] = {"kind": "openai", "base_url": "https://h/v1", "model": "m"}


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"api_key_env": "QREWARD_TEST_UNSET"}, "sources.s.api_key_env"),
        ({"api_key": "a\nb"}, "sources.s.api_key"),
        ({"api_key": "schlüssel"}, "sources.s.api_key"),
        ({"api_key": "k", "headers": {"authorization": "x"}}, "sources.s.api_key"),
        ({"headers": {"Content-Length": "3"}}, "sources.s.headers.Content-Length"),
        ({"headers": {"a b": "3"}}, 'sources.s.headers["a b"]'),
        ({"headers": {"X-A": "3\r\nX-B: 4"}}, "sources.s.headers.X-A"),
        ({"parameters": {"stream": True}}, "sources.s.parameters.stream"),
        ({"base_url": "http://h/v1/chat/completions"}, "sources.s.base_url"),
        ({"base_url": ["http://g/v1", "http://h/v1/chat/completions/"]}, "sources.s.base_url"),
    ],
)
def test_mistakes_that_only_the_environment_shows(
    settings: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QREWARD_TEST_UNSET", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        OpenAISource("s", OpenAISource.Config(**{**CONFIG, **settings}))
    assert [mistake.path for mistake in caught.value.mistakes] == [path]
    assert "X-B" not in str(caught.value)


def test_a_key_from_the_environment_loses_its_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QREWARD_TEST_KEY", "sk-from-a-file\n")
    source = OpenAISource("s", OpenAISource.Config(**CONFIG, api_key_env="QREWARD_TEST_KEY"))
    assert source._http._headers["Authorization"] == "Bearer sk-from-a-file"
    assert repr(source) == "OpenAISource('s', https://h/v1)"


async def test_the_proxy_of_the_environment_is_used_and_netrc_is_not(
    serve: Any,
    open_source: Any,
    request_of: Any,
    completed: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    key: str,
) -> None:
    async def script(exchange: Any) -> None:
        if len(server.exchanges) == 1:
            exchange.reply(completed())
        else:
            exchange.reply(b"proxy-password-1 was wrong", "407 Proxy Authentication Required")

    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password netrc-password\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("no_proxy", "direct.example")
    async with serve(script) as server:
        monkeypatch.setenv("http_proxy", f"http://me:proxy-password-1@127.0.0.1:{server.port}")
        assert http.proxy_for(http.URL("http://direct.example/v1")) is None
        source = open_source("http://judge.example/v1")
        assert (await source.send(request_of(), on_sent=unheard)).text == "fine"
        error = await failure(source, request_of())
        await source.aclose()
    assert isinstance(error, SourceUnusable)
    assert "proxy-password-1" not in str(error)
    first = server.exchanges[0]
    assert first.head.startswith("POST http://judge.example/v1/chat/completions HTTP/1.1")
    assert first.headers["proxy-authorization"].startswith("Basic ")
    assert first.headers["authorization"] == f"Bearer {key}"


def test_a_reasoning_model_is_not_sent_what_it_refuses(open_source: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"parameters\.max_tokens.*Write max_completion_tokens"):
        open_source("http://localhost:1/v1", dialect="openai_reasoning", parameters={"max_tokens": 900})
    open_source("http://localhost:1/v1", dialect="openai_reasoning", parameters={"max_tokens": None})


@pytest.mark.parametrize("late", [False, True])
async def test_a_second_reply_to_one_request_is_not_the_reply_to_the_next(
    serve: Any, open_source: Any, request_of: Any, completed: Any, late: bool
) -> None:
    read, written = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        exchange.reply(completed("own"))
        if late:
            await read.wait()
            read.clear()
        exchange.reply(completed("another's"))
        written.set()

    async with serve(script) as server:
        source = open_source(server.base_url)
        for number in range(1, 4):
            reply = await source.send(request_of(), on_sent=unheard)
            assert (reply.text, server.connections) == ("own", number)
            read.set()
            await written.wait()
            written.clear()
            # Both ends are in this loop, which hands over what was written in its next turns.
            for _ in range(3):
                await asyncio.sleep(0)
        await source.aclose()
