"""The judge server's protocols, used with the official packages, and end to end with our own dialects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from pydantic import TypeAdapter

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.judges.fence import fence
from qreward_plugins.testing import Faults, JudgeCall, JudgeServer

KEY = "sk-test-0123456789abcdefghij"
NONCE = "0123456789ab"
PROMPT = "Judge the response.\n" + fence("response", "42", NONCE)
NUMBER = {"type": "number", "minimum": 0, "maximum": 10}
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "score": NUMBER},
    "required": ["id", "score"],
    "additionalProperties": False,
}


def half(call: JudgeCall) -> float:
    low, high = call.score_range
    return (low + high) / 2


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer(half, api_key=KEY) as running:
        yield running


def is_half(text: str | None) -> bool:
    verdict = json.loads(text or "")
    return verdict["id"] == NONCE and verdict["score"] == 5.0


def openai_client(server: JudgeServer) -> Any:
    return pytest.importorskip("openai").OpenAI(api_key=KEY, base_url=server.base_url, max_retries=0)


def anthropic_client(server: JudgeServer) -> Any:
    return pytest.importorskip("anthropic").Anthropic(api_key=KEY, base_url=server.root_url, max_retries=0)


def google_client(server: JudgeServer) -> Any:
    return pytest.importorskip("google.genai").Client(api_key=KEY, http_options={"base_url": server.root_url})


def test_openai_s_package_gets_completions_and_responses(server: JudgeServer) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
    text: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA, "strict": True}}
    with openai_client(server) as client:
        messages: Any = [{"role": "user", "content": PROMPT}]
        completion = client.chat.completions.create(model="judge", messages=messages, response_format=form)
        assert [model.id for model in client.models.list()] == ["judge"]
        asked: Any = {"model": "judge", "input": PROMPT}
        reply = client.responses.create(
            **asked, instructions="You are a judge.", text=text, max_output_tokens=500, store=False
        )
        cut = client.responses.create(**asked, max_output_tokens=1)
    assert is_half(completion.choices[0].message.content)
    assert is_half(reply.output_text)
    assert (reply.status, reply.usage.input_tokens > 0) == ("completed", True)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    for each in (completion, reply):
        type(each).model_validate_json(each.model_dump_json())


def test_anthropic_s_package_gets_a_message(server: JudgeServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    bounded = {"type": "number", "description": "{minimum: 0, maximum: 10}"}
    schema = {**SCHEMA, "properties": {"id": {"type": "string"}, "score": bounded}}
    asked: dict[str, Any] = {
        "model": "judge",
        "max_tokens": 500,
        "system": [{"type": "text", "text": "You are a judge.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": PROMPT}],
    }
    tool = {"name": "verdict", "description": "States it.", "input_schema": schema}
    with anthropic_client(server) as client:
        form = {"format": {"type": "json_schema", "schema": schema}}
        reply = client.messages.create(**asked, output_config=form)
        used = client.messages.create(**asked, tools=[tool], tool_choice={"type": "tool", "name": "verdict"})
        cut = client.messages.create(**{**asked, "max_tokens": 1})
        for changes, problem in (
            ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "minimum"),
            ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=problem):
                client.messages.create(**{**asked, **changes})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**asked, "model": "nobody"})
    assert is_half(reply.content[0].text)
    assert used.content[0].input["score"] == 5.0
    assert (reply.stop_reason, used.stop_reason, cut.stop_reason) == ("end_turn", "tool_use", "max_tokens")
    type(reply).model_validate_json(reply.model_dump_json())


def test_google_s_package_gets_content(server: JudgeServer) -> None:
    genai, types = pytest.importorskip("google.genai"), pytest.importorskip("google.genai.types")
    schema = {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}
    config = types.GenerateContentConfig(
        system_instruction="You are a judge.",
        response_mime_type="application/json",
        response_schema=schema,
        max_output_tokens=500,
        temperature=0,
        seed=3,
    )
    short = types.GenerateContentConfig(max_output_tokens=1)
    with google_client(server) as client:
        reply = client.models.generate_content(model="judge", contents=PROMPT, config=config)
        cut = client.models.generate_content(model="judge", contents=PROMPT, config=short)
        with pytest.raises(genai.errors.ClientError) as caught:
            client.models.generate_content(model="nobody", contents=PROMPT)
    assert is_half(reply.text)
    assert reply.usage_metadata.prompt_token_count > 0
    assert cut.candidates[0].finish_reason == "MAX_TOKENS"
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")


def test_the_errors_and_pauses_of_each_protocol_are_read_by_its_package() -> None:
    anthropic, openai = pytest.importorskip("anthropic"), pytest.importorskip("openai")
    faults = Faults(script=["error_529", "error_429_seconds", "error_429_seconds"])
    with JudgeServer(half, faults=faults) as server:
        asked: dict[str, Any] = {"model": "judge", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        with anthropic_client(server) as client:
            with pytest.raises(anthropic._exceptions.OverloadedError) as overloaded:
                client.messages.create(**asked)
            with pytest.raises(anthropic.RateLimitError) as throttled:
                client.messages.create(**asked)
        with openai_client(server) as client, pytest.raises(openai.RateLimitError):
            client.responses.create(model="judge", input="x")
    assert overloaded.value.body["error"]["type"] == "overloaded_error"
    assert throttled.value.response.headers["retry-after"] == "1"


TEXT = json.dumps({"rationale": "fine " * 20, "score": 5})
ASKED: Any = [{"role": "user", "content": "Judge this."}]
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"messages": ASKED, "stream": True}),
    "responses": ("/v1/responses", {"input": ASKED, "stream": True}),
    "anthropic": ("/v1/messages", {"messages": ASKED, "stream": True, "max_tokens": 500}),
    "gemini": ("/v1beta/models/judge:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": "Judge."}]}]}),
}


def kind_of_event(protocol: str) -> Any:
    if protocol == "openai":
        from openai.types.chat import ChatCompletionChunk

        return ChatCompletionChunk
    if protocol == "responses":
        from openai.types.responses import ResponseStreamEvent

        return ResponseStreamEvent
    if protocol == "anthropic":
        from anthropic.types import RawMessageStreamEvent

        return RawMessageStreamEvent
    return pytest.importorskip("google.genai.types").GenerateContentResponse


def streamed(protocol: str, server: JudgeServer) -> tuple[str, Any]:
    """Stream with the official client; return the text that it assembles, and the completion tokens."""
    if protocol == "openai":
        with openai_client(server) as client, client.chat.completions.stream(model="judge", messages=ASKED) as stream:
            return stream.get_final_completion().choices[0].message.content or "", None
    if protocol == "responses":
        with openai_client(server) as client, client.responses.stream(model="judge", input="Judge this.") as stream:
            response = stream.get_final_response()
            return response.output_text, response.usage.output_tokens
    if protocol == "anthropic":
        asked: Any = {"model": "judge", "messages": ASKED, "max_tokens": 500}
        with anthropic_client(server) as client, client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
            return "".join(block.text for block in message.content), message.usage.output_tokens
    with google_client(server) as client:
        chunks = list(client.models.generate_content_stream(model="judge", contents="Judge this."))
        return "".join(chunk.text or "" for chunk in chunks), chunks[-1].usage_metadata.candidates_token_count


@pytest.mark.parametrize("protocol", PATHS)
def test_a_stream_has_the_events_of_the_official_package_which_reads_it(protocol: str) -> None:
    adapter, (path, body) = TypeAdapter(kind_of_event(protocol)), PATHS[protocol]
    body = body if protocol == "gemini" else {"model": "judge", **body}
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    with JudgeServer(lambda call: TEXT) as server:
        with urlopen(Request(f"{server.root_url}{path}", json.dumps(body).encode(), headers), timeout=10) as reply:
            assert reply.headers["Content-Type"] == "text/event-stream"
            lines = reply.read().decode().splitlines()
        tokens = server.report().completion_tokens
        text, stated = streamed(protocol, server)
    assert (text, stated or tokens) == (TEXT, tokens)
    events = 0
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("data: {"):
            event, events = json.loads(line.removeprefix("data: ")), events + 1
            if before.startswith("event: "):
                assert before == f"event: {event['type']}"
            if event.get("type") != "ping":
                adapter.validate_python(event)
    assert events > 20


DIALECTS = ("openai", "openai_reasoning", "responses", "anthropic", "gemini")
SAMPLES = [Sample([{"role": "user", "content": "6 * 7?"}], "42", ground_truth="42") for _ in range(6)]


def config(server: JudgeServer, dialect: str, **settings: Any) -> dict[str, Any]:
    source = {"kind": "openai", "base_url": server.base_url, "model": "judge", "dialect": dialect, "api_key": KEY}
    judge = {"kind": "llm", "score_range": [0, 10], "criteria": {"style": "Good style."}}
    return {"sources": {"a": {**source, **settings}}, "judges": {"main": judge}}


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_scores(server: JudgeServer, dialect: str) -> None:
    async with RewardEngine(config(server, dialect)) as engine:
        outcomes = await engine.score_all(SAMPLES)
    verdicts = [outcome.verdict for outcome in outcomes if isinstance(outcome, Scored)]
    assert [(verdict.score, verdict.components) for verdict in verdicts] == [(0.5, {"style": 0.5})] * len(SAMPLES)
    report = server.report()
    assert (report.refused, report.violations_total) == (0, 0)
    assert report.prompt_tokens == sum(verdict.spent.usage.prompt_tokens for verdict in verdicts)


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ["openai", "anthropic", "gemini"])
async def test_a_wrong_key_is_told_in_every_dialect(server: JudgeServer, dialect: str) -> None:
    async with RewardEngine(config(server, dialect, api_key="sk-wrong-9876543210")) as engine:
        outcome = await engine.score(SAMPLES[0], deadline_s=5)
    assert not isinstance(outcome, Scored)
    assert "api_key" in outcome.detail
    assert "sk-wrong" not in outcome.detail


def test_a_server_may_serve_some_protocols_only() -> None:
    with JudgeServer(half, protocols=["anthropic"]) as server:
        openai = pytest.importorskip("openai")
        with openai_client(server) as client, pytest.raises(openai.NotFoundError):
            client.responses.create(model="judge", input="x")
    for wrong in ((), ("openai", "claude")):
        with pytest.raises(ValueError, match="protocols among openai, responses, anthropic, gemini"):
            JudgeServer(half, protocols=wrong)
