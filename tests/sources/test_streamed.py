"""Streamed replies over real connections, with both clients: every fault, silence, early ends, and `auto`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from qreward_plugins.errors import ConfigurationError, InvalidReply, QRewardError, SourceUnusable, TransientError
from qreward_plugins.sources import OpenAISource, Reply
from qreward_plugins.testing import FaultKind, Faults, JudgeServer

pytestmark = pytest.mark.anyio
PATIENCE_S = 20.0
DIALECTS = ("openai", "openai_reasoning", "responses", "anthropic", "gemini")
# A stream cannot tell null from an empty text.
UNTOLD = ("null_content",)
GOOD = {"stream_no_done", "stream_odd", "stream_drip"}
SILENT = {"stream_silent", "stream_comments"}
PARAMETERS = {"max_tokens": 400}
TEXT = json.dumps({"rationale": "fine " * 40, "score": 5})


def ignore() -> None:
    pass


async def outcome_of(source: Any, request: Any) -> Reply | QRewardError:
    try:
        return await asyncio.wait_for(source.send(request, on_sent=ignore), PATIENCE_S)
    except QRewardError as error:
        return error


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind.stage == "stream"], ids=str)
async def test_every_fault_of_a_stream_has_its_class(
    kind: FaultKind, dialect: str, open_source: Any, request_of: Any
) -> None:
    faults = Faults(script=[kind.value], huge_bytes=4_000_000, drip_interval_s=0.0)
    with JudgeServer(lambda call: TEXT, faults=faults) as server:
        settings = {"max_reply_bytes": 50_000, "timeouts": {"idle_s": 0.2}}
        source = open_source(server.base_url, stream=True, dialect=dialect, **settings)
        outcome = await outcome_of(source, request_of(**PARAMETERS))
        if kind.value in GOOD:
            assert isinstance(outcome, Reply), outcome
            assert "fine fine" in outcome.text
            assert json.loads(outcome.text)["score"] == 5
        else:
            assert type(outcome) is TransientError, outcome
        if kind.value in SILENT:
            assert "no event within 0.2 s" in str(outcome)
        # The next one is read well, over whatever connection.
        after = await outcome_of(source, request_of(**PARAMETERS))
        assert isinstance(after, Reply), after
        await source.aclose()
        assert server.report().faults == {kind.value: 1}


async def test_other_faults_have_the_same_class_as_without_a_stream(open_source: Any, request_of: Any) -> None:
    kinds = {"error_500": TransientError, "error_401": SourceUnusable, "refusal": InvalidReply, "reset": TransientError}
    with JudgeServer(faults=Faults(script=list(kinds))) as server:
        source = open_source(server.base_url, stream=True)
        for expected in kinds.values():
            assert type(await outcome_of(source, request_of())) is expected
        await source.aclose()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "kind", [None, *(kind.value for kind in FaultKind if kind.stage == "verdict" and kind.value not in UNTOLD)]
)
async def test_what_a_stream_says_is_what_a_reply_says(
    dialect: str, kind: str | None, open_source: Any, request_of: Any
) -> None:
    outcomes = []
    for stream in (True, False):
        with JudgeServer(lambda call: TEXT, faults=Faults(script=[kind])) as server:
            source = open_source(server.base_url, stream=stream, dialect=dialect)
            outcomes.append(await outcome_of(source, request_of(**PARAMETERS)))
            after = await outcome_of(source, request_of(max_tokens=10))
            assert isinstance(after, Reply), after
            assert (after.finish_reason, after.first_token_s is not None) == ("length", stream)
            await source.aclose()
    assert type(outcomes[0]) is type(outcomes[1]), outcomes
    for name in ("text", "thinking", "usage", "model", "finish_reason"):
        assert getattr(outcomes[0], name, None) == getattr(outcomes[1], name, None)
    assert kind or isinstance(outcomes[0], Reply)


async def test_only_a_stream_has_a_first_token(open_source: Any, request_of: Any) -> None:
    with JudgeServer(lambda call: TEXT) as server:
        streamed = open_source(server.base_url, stream=True)
        plain = open_source(server.base_url)
        for _ in range(3):
            reply = await outcome_of(streamed, request_of(**PARAMETERS))
            other = await outcome_of(plain, request_of(**PARAMETERS))
            for name in ("text", "usage", "model", "finish_reason"):
                assert getattr(reply, name) == getattr(other, name)
        assert reply.first_token_s is not None
        assert other.first_token_s is None
        assert not reply.ended_early
        await streamed.aclose()
        await plain.aclose()


def enough(text: str) -> int:
    return text.find("}") + 1


@pytest.mark.parametrize(
    ("dialect", "continuous"),
    [("openai", False), ("openai", True), ("responses", False), ("anthropic", False), ("gemini", True)],
)
async def test_a_stream_ends_as_soon_as_the_answer_is_complete(
    open_source: Any, request_of: Any, dialect: str, continuous: bool
) -> None:
    text = '{"score": 5}' + " and on" * 200
    options = {"stream_options": {"continuous_usage_stats": True}} if continuous and dialect == "openai" else {}
    with JudgeServer(lambda call: text, stream_interval_s=0.01) as server:
        source = open_source(server.base_url, stream=True, dialect=dialect, parameters=options)
        request = request_of(max_tokens=2000)
        object.__setattr__(request, "complete", enough)
        reply = await outcome_of(source, request)
        assert isinstance(reply, Reply), reply
        assert reply.text == '{"score": 5}'
        assert reply.ended_early
        assert reply.usage_estimated is not continuous
        assert reply.usage is not None
        assert 3 <= reply.usage.completion_tokens < 40
        assert reply.usage.prompt_tokens > 0
        # The server sees the end of the connection, and stops.
        await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 0, timeout_s=1.5)
        await source.aclose()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_auto_streams_where_the_server_does_and_asks_only_once(
    dialect: str, open_source: Any, request_of: Any
) -> None:
    for streams in (True, False):
        with JudgeServer(lambda call: TEXT, streams=streams) as server:
            source = open_source(server.base_url, stream="auto", dialect=dialect)
            outcomes = await asyncio.gather(*(outcome_of(source, request_of(**PARAMETERS)) for _ in range(8)))
            refused = [outcome for outcome in outcomes if not isinstance(outcome, Reply)]
            assert [type(outcome) for outcome in refused] == ([] if streams else [TransientError])
            after = await outcome_of(source, request_of(**PARAMETERS))
            assert isinstance(after, Reply), after
            assert (after.first_token_s is not None) is streams
            await source.aclose()


async def test_a_server_that_ignores_the_wish_is_read_as_it_answers(
    serve: Any, open_source: Any, request_of: Any, completed: Any
) -> None:
    async def script(exchange: Any) -> None:
        assert json.loads(exchange.body)["stream"] is True
        exchange.reply(completed())

    async with serve(script) as server:
        source = open_source(server.base_url, stream=True)
        reply = await outcome_of(source, request_of())
        assert isinstance(reply, Reply)
        assert (reply.text, reply.first_token_s) == ("fine", None)
        await source.aclose()


async def test_a_stream_that_was_read_to_its_end_keeps_its_connection(
    serve: Any, open_source: Any, request_of: Any
) -> None:
    async def script(exchange: Any) -> None:
        chunk = {"choices": [{"index": 0, "delta": {"content": "fine"}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        exchange.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
        await asyncio.sleep(0.01)
        exchange.write(b"0\r\n\r\n")

    async with serve(script) as server:
        source = open_source(server.base_url, stream=True)
        for _ in range(4):
            assert (await outcome_of(source, request_of())).text == "fine"
        await source.aclose()
    assert server.connections == 1


async def test_cancelling_a_stream_closes_its_connection(open_source: Any, request_of: Any) -> None:
    with JudgeServer(lambda call: TEXT, stream_interval_s=0.5) as server:
        source = open_source(server.base_url, stream=True)
        task = asyncio.create_task(source.send(request_of(**PARAMETERS), on_sent=ignore))
        await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 1)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 0)
        await source.aclose()


@pytest.mark.parametrize(
    ("settings", "path", "said"),
    [
        ({"timeouts": {"idle_s": 5}}, "timeouts.idle_s", "replies are not streamed"),
        ({"stream": True, "timeouts": {"idle_s": 120}}, "timeouts.idle_s", "cannot pass within the 120 s"),
        (
            {"stream": True, "dialect": "gemini", "parameters": {"generationConfig": {"candidateCount": 2}}},
            "parameters.generationConfig.candidateCount",
            "one completion",
        ),
        (
            {"stream": True, "dialect": "anthropic", "parameters": {"stream_options": {}}},
            "parameters.stream_options",
            "",
        ),
        ({"stream": True, "parameters": {"n": 2}}, "parameters.n", "one completion"),
        ({"stream": True, "parameters": {"stream": False}}, "parameters.stream", "a key of its own"),
        ({"parameters": {"stream": True}}, "parameters.stream", "a key of its own"),
        ({"parameters": {"stream_options": {"include_usage": True}}}, "parameters.stream_options", "not streamed"),
        ({"stream": "auto", "parameters": {"stream_options": {}}}, "parameters.stream_options", "would refuse it"),
    ],
)
def test_what_cannot_be_streamed_is_refused(settings: Any, path: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OpenAISource("a", OpenAISource.Config(kind="openai", base_url=["http://a/v1"], model="m", **settings))
    [mistake] = caught.value.mistakes
    assert mistake.path == f"sources.a.{path}"
    assert said in mistake.problem


async def test_auto_finds_out_that_gemini_s_path_of_streams_is_unknown(
    serve: Any, open_source: Any, request_of: Any
) -> None:
    async def script(exchange: Any) -> None:
        if ":streamGenerateContent?alt=sse" in exchange.head:
            exchange.reply({"error": {"message": "no such path"}}, "404 Not Found")
        else:
            parts = [{"text": "fine"}]
            exchange.reply({"candidates": [{"content": {"parts": parts}, "finishReason": "STOP"}]})

    async with serve(script) as server:
        source = open_source(server.base_url, stream="auto", dialect="gemini")
        assert type(await outcome_of(source, request_of())) is TransientError
        assert (await outcome_of(source, request_of())).text == "fine"
        await source.aclose()


async def test_a_tool_that_is_streamed_is_the_verdict(open_source: Any, request_of: Any) -> None:
    schema = {"type": "object", "properties": {"score": {"type": "number"}}, "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    with JudgeServer(lambda call: '{"score": 5}') as server:
        source = open_source(server.base_url, stream=True, dialect="anthropic", structured_output="tool")
        reply = await outcome_of(source, request_of(response_format=asked, **PARAMETERS))
        assert isinstance(reply, Reply), reply
        assert json.loads(reply.text) == {"score": 5}
        await source.aclose()
