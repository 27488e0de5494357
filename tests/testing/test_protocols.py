"""The judge server's protocols, used with the official packages, and end to end with our own dialects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

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
    with anthropic_client(server) as client:
        form = {"format": {"type": "json_schema", "schema": schema}}
        reply = client.messages.create(**asked, output_config=form)
        cut = client.messages.create(**{**asked, "max_tokens": 1})
        with pytest.raises(anthropic.BadRequestError, match="another form"):
            client.messages.create(**{**asked, "messages": [{"role": "user"}]})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**asked, "model": "nobody"})
    assert is_half(reply.content[0].text)
    assert (reply.stop_reason, cut.stop_reason) == ("end_turn", "max_tokens")
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


def test_a_server_may_serve_some_protocols_only() -> None:
    with JudgeServer(half, protocols=["anthropic"]) as server:
        openai = pytest.importorskip("openai")
        with openai_client(server) as client, pytest.raises(openai.NotFoundError):
            client.responses.create(model="judge", input="x")
    for wrong in ((), ("openai", "claude")):
        with pytest.raises(ValueError, match="protocols among openai, responses, anthropic, gemini"):
            JudgeServer(half, protocols=wrong)
