"""Streamed replies over real connections, with both clients: every fault, silence, and what cannot be streamed."""

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
async def test_every_fault_of_a_stream_has_its_class(
    dialect: str, open_source: Any, request_of: Any, next_fault: Any
) -> None:
    with JudgeServer(lambda call: TEXT, faults=next_fault.faults) as server:
        settings = {"max_reply_bytes": 50_000, "timeouts": {"idle_s": 0.2}}
        source = open_source(server.base_url, stream=True, dialect=dialect, **settings)
        for kind in next_fault.each(kind for kind in FaultKind if kind.stage == "stream"):
            outcome = await outcome_of(source, request_of(**PARAMETERS))
            if kind.value in GOOD:
                assert isinstance(outcome, Reply), (kind, outcome)
                assert "fine fine" in outcome.text
                assert json.loads(outcome.text)["score"] == 5
            else:
                assert type(outcome) is TransientError, (kind, outcome)
            if kind.value in SILENT:
                assert "no event within 0.2 s" in str(outcome)
            # The next one is read well, over whatever connection.
            after = await outcome_of(source, request_of(**PARAMETERS))
            assert isinstance(after, Reply), (kind, after)
        await source.aclose()


async def test_other_faults_have_the_same_class_as_without_a_stream(open_source: Any, request_of: Any) -> None:
    kinds = {"error_500": TransientError, "error_401": SourceUnusable, "refusal": InvalidReply, "reset": TransientError}
    with JudgeServer(faults=Faults(script=list(kinds))) as server:
        source = open_source(server.base_url, stream=True)
        for expected in kinds.values():
            assert type(await outcome_of(source, request_of())) is expected
        await source.aclose()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_a_stream_says_is_what_a_reply_says(
    dialect: str, open_source: Any, request_of: Any, next_fault: Any
) -> None:
    kinds = [kind for kind in FaultKind if kind.stage == "verdict" and kind.value not in UNTOLD]
    with JudgeServer(lambda call: TEXT, faults=next_fault.faults) as server:
        sources = [(stream, open_source(server.base_url, stream=stream, dialect=dialect)) for stream in (True, False)]
        outcomes: dict[bool, list[Any]] = {True: [], False: []}
        for stream, source in sources:
            outcomes[stream].append(await outcome_of(source, request_of(**PARAMETERS)))
            for _ in next_fault.each(kinds):
                outcomes[stream].append(await outcome_of(source, request_of(**PARAMETERS)))
                after = await outcome_of(source, request_of(max_tokens=10))
                assert isinstance(after, Reply), after
                assert (after.finish_reason, after.first_token_s is not None) == ("length", stream)
            await source.aclose()
    assert isinstance(outcomes[True][0], Reply)
    for kind, streamed, plain in zip([None, *kinds], outcomes[True], outcomes[False], strict=True):
        assert type(streamed) is type(plain), kind
        for name in ("text", "thinking", "usage", "model", "finish_reason"):
            assert getattr(streamed, name, None) == getattr(plain, name, None), kind


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
        await streamed.aclose()
        await plain.aclose()


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
    ],
)
def test_what_cannot_be_streamed_is_refused(settings: Any, path: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OpenAISource("a", OpenAISource.Config(kind="openai", base_url=["http://a/v1"], model="m", **settings))
    [mistake] = caught.value.mistakes
    assert mistake.path == f"sources.a.{path}"
    assert said in mistake.problem


async def test_a_tool_that_is_streamed_is_the_verdict(open_source: Any, request_of: Any) -> None:
    schema = {"type": "object", "properties": {"score": {"type": "number"}}, "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    with JudgeServer(lambda call: '{"score": 5}') as server:
        source = open_source(server.base_url, stream=True, dialect="anthropic", structured_output="tool")
        reply = await outcome_of(source, request_of(response_format=asked, **PARAMETERS))
        assert isinstance(reply, Reply), reply
        assert json.loads(reply.text) == {"score": 5}
        await source.aclose()
