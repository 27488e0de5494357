"""The judge server's protocols, used with the official packages, and end to end with our own dialects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.judges.fence import fence
from qreward_plugins.testing import FaultKind, Faults, JudgeCall, JudgeServer, ServerLimits
from qreward_plugins.testing.protocols import PROTOCOLS

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


def is_half(text: str | None, ceiling: float = 10.0) -> bool:
    verdict = json.loads(text or "")
    return verdict["id"] == NONCE and verdict["score"] == ceiling / 2


def openai_client(server: JudgeServer, **settings: Any) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(api_key=KEY, base_url=server.base_url, max_retries=0, **settings)


def test_openai_s_package_gets_a_chat_completion(server: JudgeServer) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}
    with openai_client(server) as client:
        messages: Any = [{"role": "user", "content": PROMPT}]
        reply = client.chat.completions.create(model="judge", messages=messages, response_format=form)
        assert [model.id for model in client.models.list()] == ["judge"]
    assert is_half(reply.choices[0].message.content)
    type(reply).model_validate_json(reply.model_dump_json())


def test_openai_s_package_gets_a_response(server: JudgeServer) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA, "strict": True}}
    with openai_client(server) as client:
        reply = client.responses.create(
            model="judge", instructions="You are a judge.", input=PROMPT, text=form, max_output_tokens=500, store=False
        )
        cut = client.responses.create(model="judge", input=PROMPT, max_output_tokens=1)
    assert is_half(reply.output_text)
    assert (reply.status, reply.usage.input_tokens > 0) == ("completed", True)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    type(reply).model_validate_json(reply.model_dump_json())


def test_anthropic_s_package_gets_a_message(server: JudgeServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    root = server.base_url.removesuffix("/v1")
    bounded = {**NUMBER, "description": "{minimum: 0, maximum: 10}"}
    del bounded["minimum"], bounded["maximum"]
    schema = {**SCHEMA, "properties": {"id": {"type": "string"}, "score": bounded}}
    asked: dict[str, Any] = {
        "model": "judge",
        "max_tokens": 500,
        "system": [{"type": "text", "text": "You are a judge.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": PROMPT}],
    }
    tool = {"name": "verdict", "description": "States it.", "input_schema": schema}
    with anthropic.Anthropic(api_key=KEY, base_url=root, max_retries=0) as client:
        form = {"format": {"type": "json_schema", "schema": schema}}
        reply = client.messages.create(**asked, output_config=form)
        used = client.messages.create(**asked, tools=[tool], tool_choice={"type": "tool", "name": "verdict"})
        cut = client.messages.create(**{**asked, "max_tokens": 1})
        with pytest.raises(anthropic.BadRequestError, match="minimum"):
            client.messages.create(**asked, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**asked, "model": "nobody"})
        thinking = {"type": "enabled", "budget_tokens": 1024}
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
            client.messages.create(**asked, thinking=thinking)
    assert is_half(reply.content[0].text)
    assert used.content[0].input["score"] == 5.0
    assert (reply.stop_reason, used.stop_reason, cut.stop_reason) == ("end_turn", "tool_use", "max_tokens")
    type(reply).model_validate_json(reply.model_dump_json())


def test_google_s_package_gets_content(server: JudgeServer) -> None:
    genai = pytest.importorskip("google.genai")
    types = pytest.importorskip("google.genai.types")
    root = server.base_url.removesuffix("/v1")
    schema = {**SCHEMA}
    del schema["additionalProperties"]
    config = types.GenerateContentConfig(
        system_instruction="You are a judge.",
        response_mime_type="application/json",
        response_schema=schema,
        max_output_tokens=500,
        temperature=0,
        seed=3,
    )
    short = types.GenerateContentConfig(max_output_tokens=1)
    with genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=root)) as client:
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
        root = server.base_url.removesuffix("/v1")
        asked: dict[str, Any] = {"model": "judge", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        with anthropic.Anthropic(api_key=KEY, base_url=root, max_retries=0) as client:
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
    assert all(isinstance(outcome, Scored) and outcome.verdict.score == 0.5 for outcome in outcomes)
    assert all(isinstance(outcome, Scored) and outcome.verdict.components == {"style": 0.5} for outcome in outcomes)
    report = server.report()
    assert (report.refused, report.violations_total) == (0, 0)
    assert report.prompt_tokens == sum(outcome.verdict.spent.usage.prompt_tokens for outcome in outcomes)


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_no_limit_is_broken_in_any_dialect(dialect: str) -> None:
    # The server's window is a little shorter, because a busy machine may let it read a request late.
    limits = ServerLimits(requests_per_minute=800, tokens_per_minute=800_000, window_s=0.75, concurrency=4)
    declared = {"requests_per_minute": 600, "tokens_per_minute": 600_000, "window_s": 1.0, "concurrency": 4}
    with JudgeServer(half, limits=limits, api_key=KEY) as server:
        tree = config(server, dialect, limits=declared)
        tree["judges"]["main"]["max_tokens"] = 300
        async with RewardEngine(tree) as engine:
            outcomes = await engine.score_all(SAMPLES * 2)
        assert all(isinstance(outcome, Scored) for outcome in outcomes)
        report = server.report()
        assert report.violations_total == 0, report.violations


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_faults_of_every_kind_cost_no_sample_its_reward(dialect: str) -> None:
    kinds = [kind.value for kind in FaultKind if kind.stage == "verdict"]
    faults = Faults(script=[name for kind in kinds for name in (kind, None, None)])
    with JudgeServer(half, faults=faults, api_key=KEY) as server:
        async with RewardEngine(config(server, dialect)) as engine:
            outcomes = [await engine.score(SAMPLES[0]) for _ in kinds]
    assert all(isinstance(outcome, Scored) and outcome.verdict.score == 0.5 for outcome in outcomes)


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
        with pytest.raises(ValueError, match="protocols among"):
            JudgeServer(half, protocols=wrong)
    assert set(PROTOCOLS) == {"openai", "responses", "anthropic", "gemini"}
