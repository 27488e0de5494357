"""What each dialect sends, against the official packages' own types, and what it reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import pytest
from multidict import CIMultiDict
from pydantic import TypeAdapter
from yarl import URL

from qreward_plugins.errors import ConfigurationError, InvalidReply, SourceUnusable, Throttled, TransientError
from qreward_plugins.judges.llm import LLMJudge
from qreward_plugins.judges.verdicts import why_no_verdict
from qreward_plugins.samples import Sample
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources import OpenAISource, Reply, Request
from qreward_plugins.sources.http_reading import HTTPReply

SAMPLE = Sample([{"role": "user", "content": "6 * 7?"}], "42", ground_truth="42")
DIALECTS = ("openai", "openai_reasoning", "responses", "anthropic", "gemini")
KEY = "sk-test-0123456789abcdefghij"
PNG = "data:image/png;base64,aGVsbG8="


def source(dialect: str, **settings: Any) -> OpenAISource:
    node = {"kind": "openai", "base_url": "http://judge.invalid/v1", "model": "m", "dialect": dialect, **settings}
    return OpenAISource("a", OpenAISource.Config.model_validate(node))


def judge(**settings: Any) -> LLMJudge:
    criteria = {} if "labels" in settings else {"criteria": {"style": "Good style."}}
    config = LLMJudge.Config.model_validate({"kind": "llm", **criteria, **settings})
    return LLMJudge("main", config, sources=["a"], key=b"0" * 32)


def sent(dialect: str, *, settings: Mapping[str, Any] | None = None, **asked: Any) -> dict[str, Any]:
    request = judge(**asked).request(SAMPLE, attempt=0)
    body: dict[str, Any] = json.loads(source(dialect, **(settings or {}))._bodies.encode(request))
    return body


def consumed(value: Any) -> Any:
    """Run the checks of lazy iterators."""
    if isinstance(value, Mapping):
        return {key: consumed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, Iterator)) or type(value).__name__ == "ValidatorIterator":
        return [consumed(item) for item in value]
    return value


def check(params: Any, body: Mapping[str, Any]) -> None:
    """Check a body against a TypedDict of an official package."""
    assert set(body) <= set(get_type_hints(params))
    # The iterators need the adapter until they are consumed.
    adapter = TypeAdapter(params)
    consumed(adapter.validate_python(body))


FORMATS = ("json_schema", "json_object", "none")


@pytest.mark.parametrize("response_format", FORMATS)
@pytest.mark.parametrize("dialect", ["openai", "openai_reasoning"])
def test_chat_completions_are_what_openai_s_package_would_send(dialect: str, response_format: str) -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

    check(CompletionCreateParamsNonStreaming, sent(dialect, response_format=response_format))


@pytest.mark.parametrize("response_format", FORMATS)
def test_responses_are_what_openai_s_package_would_send(response_format: str) -> None:
    from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

    parameters = {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
    body = sent("responses", settings={"parameters": parameters}, response_format=response_format)
    check(ResponseCreateParamsNonStreaming, body)
    assert body["text"]["verbosity"] == "low"
    assert ("format" in body["text"]) is (response_format != "none")
    assert (body["store"], body["max_output_tokens"]) == (False, 8192)
    assert body["instructions"].startswith("You are")
    assert "temperature" not in body


@pytest.mark.parametrize("structured_output", ["native", "tool"])
@pytest.mark.parametrize("response_format", ["json_schema", "none"])
def test_messages_are_what_anthropic_s_package_would_send(structured_output: str, response_format: str) -> None:
    from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

    settings = {"parameters": {"output_config": {"effort": "low"}}, "structured_output": structured_output}
    body = sent("anthropic", settings=settings, response_format=response_format)
    check(MessageCreateParamsNonStreaming, body)
    assert "temperature" not in body
    assert body["output_config"]["effort"] == "low"
    native = response_format == "json_schema" and structured_output == "native"
    assert ("format" in body["output_config"]) is native
    assert ("tools" in body) is (response_format == "json_schema" and structured_output == "tool")
    assert body["max_tokens"] == 8192


def test_the_schema_for_anthropic_is_what_its_package_makes_of_ours() -> None:
    from anthropic.lib._parse._transform import transform_schema

    ours = sent("openai")["response_format"]["json_schema"]["schema"]
    assert sent("anthropic")["output_config"]["format"]["schema"] == transform_schema(ours)


def test_the_shared_prefix_is_cached_and_holds_nothing_of_the_sample() -> None:
    body = sent("anthropic")
    first, second = body["messages"][0]["content"]
    assert first["cache_control"] == {"type": "ephemeral"}
    assert "cache_control" not in second
    assert "6 * 7" not in first["text"]
    [whole] = [message["content"] for message in sent("openai")["messages"] if message["role"] == "user"]
    assert first["text"] + second["text"] == whole
    assert "cache_control" not in body["system"][0]


@pytest.mark.parametrize("response_format", FORMATS)
def test_gemini_gets_what_google_s_package_would_send(response_format: str) -> None:
    types = pytest.importorskip("google.genai.types")

    settings = {"parameters": {"generationConfig": {"thinkingConfig": {"thinkingLevel": "LOW"}}}}
    body = sent("gemini", settings=settings, response_format=response_format, seed=3)
    assert set(body) == {"contents", "generationConfig", "systemInstruction"}
    for content in (*body["contents"], body["systemInstruction"]):
        types.Content.model_validate(content)
    config = types.GenerationConfig.model_validate(body["generationConfig"])
    assert (config.max_output_tokens, config.seed, config.temperature) == (8192, 3, 0.0)
    assert config.thinking_config.thinking_level == "LOW"
    assert config.response_mime_type == (None if response_format == "none" else "application/json")
    if response_format == "json_schema":
        assert config.response_schema.property_ordering == ["id", "rationale", "components", "score"]
        assert config.response_schema.properties["score"].maximum == 10


@pytest.mark.parametrize("dialect", DIALECTS)
def test_images_become_the_parts_of_the_dialect(dialect: str) -> None:
    content = [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": PNG}}]
    messages: Any = ({"role": "user", "content": content},)
    request = Request.__new__(Request)
    for name, value in {
        "sample": SAMPLE,
        "messages": messages,
        "parameters": {"max_tokens": 9},
        "nonce": "",
        "shared_nonce": "",
        "max_completion_tokens": 9,
        "judge": "",
        "cut": False,
        "passed": None,
        "thinking_tokens": 0,
    }.items():
        object.__setattr__(request, name, value)
    body = json.loads(source(dialect)._bodies.encode(request))
    parts = {
        "responses": lambda: body["input"][0]["content"],
        "anthropic": lambda: body["messages"][0]["content"],
        "gemini": lambda: body["contents"][0]["parts"],
    }.get(dialect, lambda: body["messages"][0]["content"])()
    assert parts[0]["text"] == "See:"
    assert "aGVsbG8=" in json.dumps(parts[1])
    demand = source(dialect).demand(request)
    assert demand is not None
    assert demand.overhead >= 4096


@pytest.mark.parametrize(
    ("dialect", "header"),
    [
        ("openai", ("Authorization", f"Bearer {KEY}")),
        ("responses", ("Authorization", f"Bearer {KEY}")),
        ("anthropic", ("x-api-key", KEY)),
        ("gemini", ("x-goog-api-key", KEY)),
    ],
)
def test_the_key_goes_into_the_header_of_the_dialect_and_never_into_the_url(
    dialect: str, header: tuple[str, str]
) -> None:
    opened = source(dialect, api_key=KEY)
    assert opened._http._headers[header[0]] == header[1]
    assert KEY not in "".join(map(str, opened._urls.values()))
    assert ("anthropic-version" in opened._http._headers) is (dialect == "anthropic")


@pytest.mark.parametrize(
    ("dialect", "path"),
    [
        ("openai", "/v1/chat/completions"),
        ("openai_reasoning", "/v1/chat/completions"),
        ("responses", "/v1/responses"),
        ("anthropic", "/v1/messages"),
        ("gemini", "/v1/models/m:generateContent"),
    ],
)
def test_paths(dialect: str, path: str) -> None:
    assert [url.path for url in source(dialect)._urls.values()] == [path]


def test_a_model_of_gemini_may_be_named_with_its_collection() -> None:
    [url] = source("gemini", model="tunedModels/mine")._urls.values()
    assert url.path == "/v1/tunedModels/mine:generateContent"


def read(dialect: str, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    stated = CIMultiDict({"Content-Type": "application/json", **(headers or {})})
    http = HTTPReply(status, stated, json.dumps(body).encode())
    return source(dialect).answer(URL("http://judge.invalid/v1"), http).reply()


def message(*content: Any, stop: str = "end_turn", **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 5, "output_tokens": 7}
    usage["output_tokens_details"] = {"thinking_tokens": 4}
    return {"type": "message", "model": "claude", "content": [*content], "stop_reason": stop, "usage": usage, **more}


def response(*output: Any, status: str = "completed", **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 90}}
    usage["output_tokens_details"] = {"reasoning_tokens": 4}
    return {"object": "response", "model": "gpt", "status": status, "output": [*output], "usage": usage, **more}


def generated(*parts: Any, finish: str | None = "STOP", **more: Any) -> dict[str, Any]:
    usage = {"promptTokenCount": 100, "cachedContentTokenCount": 90, "candidatesTokenCount": 3, "thoughtsTokenCount": 4}
    candidate = {"content": {"role": "model", "parts": [*parts]}, "finishReason": finish}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini", **more}


def output_text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


THOUGHTS = {
    "responses": response(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, output_text("fine")
    ),
    "anthropic": message({"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "fine"}),
    "gemini": generated({"text": "hm", "thought": True}, {"text": "fine"}),
}


@pytest.mark.parametrize("dialect", THOUGHTS)
def test_thoughts_are_kept_apart_and_usage_has_its_parts(dialect: str) -> None:
    reply = read(dialect, THOUGHTS[dialect])
    assert (reply.text, reply.thinking, reply.finish_reason) == ("fine", "hm", "stop")
    assert reply.usage == Usage(100, 7, cached_tokens=90, thinking_tokens=4)
    assert reply.model


def test_the_usage_of_chat_completions_has_its_parts() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 90}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 4}
    choice = {"message": {"content": "fine"}, "finish_reason": "stop"}
    assert read("openai", {"choices": [choice], "usage": usage}).usage == Usage(100, 7, 90, 4)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("responses", response(status="incomplete", incomplete_details={"reason": "max_output_tokens"})),
        ("anthropic", message({"type": "thinking", "thinking": "hm"}, stop="max_tokens")),
        ("anthropic", message(stop="model_context_window_exceeded")),
        ("gemini", {**generated(finish="MAX_TOKENS"), "candidates": [{"finishReason": "MAX_TOKENS"}]}),
    ],
)
def test_a_reply_that_ended_in_its_thoughts_costs_no_source_its_health(dialect: str, body: Any) -> None:
    reply = read(dialect, body)
    assert (reply.text, reply.finish_reason) == ("", "length")
    main = judge()
    with pytest.raises(InvalidReply, match=r"ended inside its thoughts .* raise judges\.main\.max_tokens"):
        main.verdict(main.request(SAMPLE, attempt=0), reply)


@pytest.mark.parametrize(
    ("dialect", "body", "says"),
    [
        ("responses", response({"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}), "No."),
        ("responses", response(status="failed", error={"code": "invalid_prompt", "message": "bad"}), "bad"),
        ("anthropic", message(stop="refusal", stop_details={"type": "refusal", "explanation": "No."}), "No."),
        ("gemini", {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}}, "PROHIBITED_CONTENT"),
    ],
)
def test_refusals(dialect: str, body: Any, says: str) -> None:
    with pytest.raises(InvalidReply, match=says):
        read(dialect, body)


@pytest.mark.parametrize("finish", ["SAFETY", "RECITATION", "BLOCKLIST", "SPII"])
def test_an_answer_that_gemini_withheld_is_no_verdict(finish: str) -> None:
    reply = read("gemini", generated({"text": "half"}, finish=finish))
    assert reply.finish_reason == "content_filter"


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("responses", response(output_text("fine"), status="in_progress")),
        ("responses", response({"type": "reasoning", "summary": []})),
        ("responses", {"output": "fine", "status": "completed"}),
        ("responses", response(status="failed", error={"code": "server_error", "message": "oops"})),
        ("anthropic", message()),
        ("anthropic", message({"type": "text", "text": "half"}, stop="pause_turn")),
        ("anthropic", message({"type": "thinking", "thinking": "hm"})),
        ("anthropic", {"content": "fine"}),
        ("anthropic", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
        ("gemini", {"candidates": []}),
        ("gemini", generated({"text": "hm", "thought": True})),
        ("gemini", generated({"text": "half"}, finish="OTHER")),
        ("gemini", generated({"text": "half"}, finish="A_NEW_REASON")),
        ("gemini", generated("half")),
    ],
)
def test_a_reply_without_an_answer_is_tried_again(dialect: str, body: Any) -> None:
    with pytest.raises(TransientError):
        read(dialect, body)


def test_the_input_of_the_tool_is_the_verdict() -> None:
    tool = {"type": "tool_use", "id": "t", "name": "verdict", "input": {"id": "x", "score": 7}}
    reply = read("anthropic", message({"type": "text", "text": "Here:"}, tool, stop="tool_use"))
    assert json.loads(reply.text.removeprefix("Here:")) == {"id": "x", "score": 7}
    assert reply.finish_reason == "stop"


@pytest.mark.parametrize("other", ["tool", "text"])
def test_a_second_verdict_beside_a_tool_makes_the_reply_invalid(other: str) -> None:
    asked = judge(criteria={})
    request = asked.request(SAMPLE, attempt=0)
    first, second = ({"id": request.nonce, "rationale": "ok", "score": score} for score in (1, 9))
    blocks = [{"type": "tool_use", "id": "t", "name": "verdict", "input": verdict} for verdict in (first, second)]
    if other == "text":
        blocks[0] = {"type": "text", "text": json.dumps(first)}
    assert asked.verdict(request, read("anthropic", message(blocks[1], stop="tool_use"))).score == 0.9
    with pytest.raises(InvalidReply, match="2 verdicts"):
        asked.verdict(request, read("anthropic", message(*blocks, stop="tool_use")))


def test_a_duplicate_key_in_the_input_of_a_tool_makes_the_reply_invalid() -> None:
    tool = {"type": "tool_use", "id": "t", "name": "verdict", "input": {"id": "x", "score": 7}}
    body = json.dumps(message(tool, stop="tool_use")).replace('"score": 7', '"score": 7, "score": 9').encode()
    http = HTTPReply(200, CIMultiDict({"Content-Type": "application/json"}), body)
    with pytest.raises(InvalidReply, match="duplicate key"):
        source("anthropic").answer(URL("http://judge.invalid/v1"), http).reply()


@pytest.mark.parametrize("reason", ["max_tool_calls", "", None, "a reason of next year"])
def test_a_response_that_is_incomplete_for_any_reason_is_not_whole(reason: str | None) -> None:
    body = response(output_text("fine"), status="incomplete", incomplete_details={"reason": reason})
    assert why_no_verdict(read("responses", body).finish_reason) == "cut off"


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("openai", {"choices": [{"message": {"content": None}, "finish_reason": KEY}]}),
        ("responses", {"status": KEY, "output": []}),
        ("gemini", {"candidates": [{"content": {"parts": [{"text": "x"}]}, "finishReason": KEY}]}),
    ],
)
def test_a_key_that_a_server_echoes_as_the_end_of_a_reply_is_not_shown(dialect: str, body: Any) -> None:
    http = HTTPReply(200, CIMultiDict({"Content-Type": "application/json"}), json.dumps(body).encode())
    with pytest.raises(TransientError) as caught:
        source(dialect, api_key=KEY).answer(URL("http://judge.invalid/v1"), http).reply()
    assert KEY not in str(caught.value)
    assert "***" in str(caught.value)


def test_a_commentary_is_no_part_of_the_answer() -> None:
    body = response(output_text("I will grade it.", phase="commentary"), output_text("fine", phase="final_answer"))
    assert read("responses", body).text == "fine"


def test_gemini_states_its_pause_in_the_body() -> None:
    retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}
    error = {"code": 429, "message": "Quota", "status": "RESOURCE_EXHAUSTED", "details": [retry]}
    for body in ({"error": error}, [{"error": error}]):
        with pytest.raises(Throttled) as caught:
            read("gemini", body, 429)
        assert caught.value.retry_after_s == 34.5
    for delay in ("1e9s", "-3s", "s", 5, "9" * 80 + "s", "3٣s"):
        retry["retryDelay"] = delay  # type: ignore[assignment]
        with pytest.raises(Throttled) as caught:
            read("gemini", {"error": error}, 429)
        assert caught.value.retry_after_s is None
    retry["retryDelay"] = "999999s"
    with pytest.raises(Throttled) as caught:
        read("gemini", {"error": error}, 429)
    assert caught.value.retry_after_s == 300.0


def test_a_bad_key_of_gemini_is_a_400() -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}]
    error = {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT", "details": details}
    with pytest.raises(SourceUnusable, match="api_key"):
        read("gemini", {"error": error}, 400)


def test_anthropic_s_errors() -> None:
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    with pytest.raises(TransientError):
        read("anthropic", overloaded, 529)
    with pytest.raises(Throttled) as caught:
        read("anthropic", overloaded, 529, {"Retry-After": "7"})
    assert caught.value.retry_after_s == 7
    with pytest.raises(SourceUnusable, match="credit"):
        read("anthropic", {"type": "error", "error": {"type": "billing_error", "message": "x"}}, 400)


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("openai_reasoning", {"parameters": {"max_tokens": 9}}, "parameters.max_tokens"),
    ("responses", {"parameters": {"max_tokens": 9}}, "parameters.max_tokens"),
    ("responses", {"parameters": {"max_completion_tokens": 9}}, "parameters.max_completion_tokens"),
    ("responses", {"parameters": {"input": "x"}}, "parameters.input"),
    ("responses", {"parameters": {"background": True}}, "parameters.background"),
    ("responses", {"parameters": {"reasoning_effort": "low"}}, "parameters.reasoning_effort"),
    ("responses", {"structured_output": "tool"}, "structured_output"),
    ("anthropic", {"parameters": {"system": "x"}}, "parameters.system"),
    ("anthropic", {"parameters": {"max_tokens": None}}, "parameters.max_tokens"),
    ("anthropic", {"parameters": {"max_completion_tokens": 9}}, "parameters.max_completion_tokens"),
    ("anthropic", {"parameters": {"top_logprobs": 3}}, "parameters.top_logprobs"),
    ("anthropic", {"parameters": {"thinking": True}}, "parameters.thinking"),
    ("anthropic", {"parameters": {"thinking": {"type": "enabled"}}}, "parameters.thinking.budget_tokens"),
    (
        "anthropic",
        {"parameters": {"thinking": {"type": "enabled", "budget_tokens": 512}}},
        "parameters.thinking.budget_tokens",
    ),
    (
        "anthropic",
        {"parameters": {"thinking": {"type": "enabled", "budget_tokens": 4096}, "max_tokens": 4096}},
        "parameters.thinking.budget_tokens",
    ),
    ("anthropic", {"parameters": {"thinking": {"type": "adaptive"}, "temperature": 0}}, "parameters.temperature"),
    ("anthropic", {"parameters": {"thinking": {"type": "adaptive"}, "top_k": 5}}, "parameters.top_k"),
    ("anthropic", {"parameters": {"thinking": {"type": "adaptive"}}, "structured_output": "tool"}, "structured_output"),
    (
        "anthropic",
        {"parameters": {"temperature": 0}, "headers": {"Anthropic-Version": "2026-10-21"}},
        "parameters.temperature",
    ),
    ("gemini", {"parameters": {"max_tokens": 9}}, "parameters.max_tokens"),
    ("gemini", {"parameters": {"maxOutputTokens": 9}}, "parameters.maxOutputTokens"),
    ("gemini", {"parameters": {"temperature": 0}}, "parameters.temperature"),
    ("gemini", {"parameters": {"contents": []}}, "parameters.contents"),
    ("gemini", {"parameters": {"model": "other"}}, "parameters.model"),
    ("gemini", {"parameters": {"generation_config": {}}}, "parameters.generation_config"),
    ("gemini", {"parameters": {"generationConfig": 5}}, "parameters.generationConfig"),
    (
        "gemini",
        {"parameters": {"generationConfig": {"max_output_tokens": 5}}},
        "parameters.generationConfig.max_output_tokens",
    ),
    (
        "gemini",
        {"parameters": {"generationConfig": {"thinkingConfig": {"thinkingBudget": 9000}, "maxOutputTokens": 9000}}},
        "parameters.generationConfig.thinkingConfig.thinkingBudget",
    ),
    ("openai", {"parameters": {"messages": None}}, "parameters.messages"),
    ("openai_reasoning", {"parameters": {"messages": []}}, "parameters.messages"),
    ("anthropic", {"parameters": {"output_config": "low"}}, "parameters.output_config"),
    ("responses", {"parameters": {"text": "x"}}, "parameters.text"),
    ("responses", {"parameters": {"reasoning": "low"}}, "parameters.reasoning"),
    ("gemini", {"base_url": "http://h/v1beta/models/m:generateContent"}, "base_url"),
    ("anthropic", {"base_url": "http://h/v1/messages"}, "base_url"),
    ("openai", {"base_url": "http://h/v1/responses"}, "base_url"),
    ("openai", {"structured_output": "tool"}, "structured_output"),
]


@pytest.mark.parametrize(("dialect", "settings", "path"), MISTAKES)
def test_a_wrong_combination_is_refused_with_its_path(dialect: str, settings: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        source(dialect, **settings)
    assert [mistake.path for mistake in caught.value.mistakes] == [f"sources.a.{path}"]


UNMET: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("openai", {"seed": 3, "temperature": 0.7, "response_format": "json_object"}, {}, None),
    ("gemini", {"seed": 3, "temperature": 0.7, "response_format": "json_object"}, {}, None),
    ("openai_reasoning", {"seed": 3, "response_format": "json_object"}, {}, None),
    ("openai_reasoning", {"temperature": 0.7}, {}, "temperature"),
    ("openai_reasoning", {"temperature": 0.7}, {"temperature": None}, None),
    ("responses", {"seed": 3}, {}, "seed"),
    ("responses", {"seed": 3}, {"seed": None}, None),
    ("anthropic", {"seed": 3}, {}, "seed"),
    ("anthropic", {"response_format": "json_object"}, {}, "response_format"),
    ("anthropic", {"temperature": 0.7}, {}, "temperature"),
    ("anthropic", {"temperature": 0.7}, {"temperature": 0.5}, None),
    ("anthropic", {"max_tokens": 1024}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "max_tokens"),
    ("anthropic", {}, {"thinking": {"type": "enabled", "budget_tokens": 4096}}, None),
    ("anthropic", {}, {"thinking": {"type": "enabled", "budget_tokens": 8192}}, "max_tokens"),
    ("gemini", {"max_tokens": 512}, {"generationConfig": {"thinkingConfig": {"thinkingBudget": 512}}}, "max_tokens"),
    (
        "gemini",
        {"max_tokens": 512},
        {"generationConfig": {"thinkingConfig": {"thinkingBudget": 512}, "maxOutputTokens": 2000}},
        None,
    ),
]


@pytest.mark.parametrize(("dialect", "asked", "parameters", "key"), UNMET)
def test_a_judge_that_needs_what_the_dialect_lacks_is_refused_at_the_start(
    dialect: str, asked: dict[str, Any], parameters: dict[str, Any], key: str | None
) -> None:
    from qreward_plugins import RewardEngine

    node = {"kind": "openai", "base_url": "http://h/v1", "model": "m", "dialect": dialect, "parameters": parameters}
    config = {"sources": {"a": node}, "judges": {"main": {"kind": "llm", **asked}}}
    if key is None:
        RewardEngine(config)
        return
    with pytest.raises(ConfigurationError) as caught:
        RewardEngine(config)
    assert [mistake.path for mistake in caught.value.mistakes] == [f"judges.main.{key}"]
    assert "'a'" in str(caught.value)


BOUNDS: list[tuple[str, dict[str, Any], int]] = [
    ("responses", {}, 8192),
    ("responses", {"reasoning": {"effort": "none"}}, 512),
    ("responses", {"max_output_tokens": 100}, 100),
    ("anthropic", {}, 8192),
    ("anthropic", {"thinking": {"type": "disabled"}}, 512),
    ("anthropic", {"max_tokens": 100}, 100),
    ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 4096}}, 8192),
    ("gemini", {}, 8192),
    ("gemini", {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}, 512),
    ("gemini", {"generationConfig": {"thinkingConfig": {"thinkingBudget": 4096}}}, 8192),
    ("gemini", {"generationConfig": {"maxOutputTokens": 100}}, 100),
    ("gemini", {"generationConfig": {"maxOutputTokens": 100, "candidateCount": 3}}, 300),
    ("gemini", {"generationConfig": {"topK": 3}}, 8192),
    ("openai", {}, 512),
    ("openai", {"reasoning_effort": "low"}, 8192),
    ("openai", {"reasoning_effort": "none"}, 512),
    ("openai", {"chat_template_kwargs": {"enable_thinking": True}}, 8192),
    ("openai", {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}, 512),
    ("openai_reasoning", {}, 8192),
    ("openai_reasoning", {"max_completion_tokens": 100}, 100),
]


@pytest.mark.parametrize(("dialect", "parameters", "most"), BOUNDS)
def test_the_tokens_that_are_reserved_are_those_of_the_body(
    dialect: str, parameters: dict[str, Any], most: int
) -> None:
    request = judge().request(SAMPLE, attempt=0)
    opened = source(dialect, parameters=parameters, limits={"tokens_per_minute": 100_000})
    demand = opened.demand(request)
    assert demand is not None
    assert demand.completion == most
    assert demand.prompt >= sum(len(str(part["content"])) for part in request.messages)
    body = json.loads(opened._bodies.encode(request))
    for key in opened.bound_key:
        body = body[key]
    assert body * parameters.get("generationConfig", {}).get("candidateCount", 1) == most


@pytest.mark.parametrize(
    ("dialect", "parameters", "key"),
    [
        ("responses", {"max_output_tokens": None}, "max_output_tokens"),
        ("gemini", {"generationConfig": {"maxOutputTokens": None}}, "generationConfig.maxOutputTokens"),
        ("gemini", {"generationConfig": None}, "generationConfig.maxOutputTokens"),
    ],
)
def test_a_bound_that_is_removed_cannot_be_combined_with_a_limit_on_tokens(
    dialect: str, parameters: dict[str, Any], key: str
) -> None:
    body = json.loads(source(dialect, parameters=parameters)._bodies.encode(judge().request(SAMPLE, attempt=0)))
    assert "max" not in json.dumps(body.get("generationConfig", {})).lower().replace("maximum", "")
    with pytest.raises(ConfigurationError) as caught:
        source(dialect, parameters=parameters, limits={"tokens_per_minute": 1000})
    assert [mistake.path for mistake in caught.value.mistakes] == [f"sources.a.parameters.{key}"]


def test_the_journal_key_holds_the_dialect_the_version_header_and_the_model() -> None:
    request = judge(response_format="none", max_tokens=9).request(SAMPLE, attempt=0)
    questions = [source(dialect, version="1").question(request) for dialect in DIALECTS]
    questions.append(source("anthropic", version="1", headers={"anthropic-version": "2026-10-21"}).question(request))
    questions.append(source("gemini", version="1", model="n").question(request))
    assert len(set(map(repr, questions))) == len(questions)


TOKENS = [("yes", [("yes", -0.1), ("no", -2.5)]), (".", [(".", -0.0)])]
CHOSEN = [{"token": token, "logprob": likely[0][1]} for token, likely in TOKENS]
CHAT = {
    "content": [
        {**chosen, "top_logprobs": [{"token": token, "logprob": value, "bytes": None} for token, value in likely]}
        for chosen, (_, likely) in zip(CHOSEN, TOKENS, strict=True)
    ]
}
GEMINI = {
    "chosenCandidates": [{"token": token, "logProbability": 0.0} for token, _ in TOKENS],
    "topCandidates": [
        {"candidates": [{"token": token, "logProbability": value} for token, value in likely]} for _, likely in TOKENS
    ],
}


def with_logprobs(dialect: str, stated: Any) -> Reply:
    if dialect == "gemini":
        body = generated({"text": "yes."})
        body["candidates"][0]["logprobsResult"] = stated
        return read(dialect, body)
    choice = {"message": {"content": "yes."}, "logprobs": stated, "finish_reason": "stop"}
    return read(dialect, {"choices": [choice]})


def test_log_probabilities_are_asked_for_and_read() -> None:
    types = pytest.importorskip("google.genai.types")

    asked: dict[str, Any] = {"read": "logprobs", "labels": {"yes": 1, "no": 0}}
    assert sent("openai", **asked).items() >= {"logprobs": True, "top_logprobs": 20, "max_tokens": 4}.items()
    config = types.GenerationConfig.model_validate(sent("gemini", **asked)["generationConfig"])
    assert (config.response_logprobs, config.logprobs) == (True, 20)
    read_out = tuple((token, tuple(likely)) for token, likely in TOKENS)
    assert with_logprobs("openai", CHAT).logprobs == read_out
    types.LogprobsResult.model_validate(GEMINI)
    assert with_logprobs("gemini", GEMINI).logprobs == read_out


@pytest.mark.parametrize("dialect", ["openai", "gemini"])
def test_log_probabilities_of_another_form_are_none(dialect: str) -> None:
    whole = CHAT if dialect == "openai" else GEMINI
    (key, *_) = whole
    first: dict[str, Any] = dict(whole[key][0])
    broken: list[Any] = [None, [], "x", {key: "x"}, {key: [1]}, {key: [{**first, "top_logprobs": 1}]}]
    broken += [{**whole, key: [None, None]}, {**whole, "topCandidates": 1} if dialect == "gemini" else {key: [{}]}]
    odd = {"token": "yes", "logprob": "high", "logProbability": True}
    broken.append({key: [{"token": "yes", "top_logprobs": [odd]}], "topCandidates": [{"candidates": [odd]}]})
    for stated in broken:
        assert with_logprobs(dialect, stated).logprobs == (), stated
