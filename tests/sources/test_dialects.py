"""The dialects of chat servers: what each sends, against the official packages' own types, and what it reads.

Every rule about statuses and error objects is here, too: all kinds of server share it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from io import BytesIO
from itertools import pairwise
from typing import Any, get_type_hints

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from pydantic import TypeAdapter
from yarl import URL

from qreward_plugins import RewardEngine
from qreward_plugins.errors import (
    ConfigurationError,
    InvalidReply,
    PermanentError,
    QRewardError,
    SampleRefused,
    SourceError,
    SourceUnusable,
    Throttled,
    TransientError,
)
from qreward_plugins.judges.llm import LLMJudge
from qreward_plugins.judges.verdicts import why_no_verdict
from qreward_plugins.samples import Sample
from qreward_plugins.samples.images import EncodedImage, Image
from qreward_plugins.samples.json_values import encoded
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources import OpenAISource, Reply, Request
from qreward_plugins.sources.dialects import DIALECTS as KNOWN
from qreward_plugins.sources.http_reading import HTTPReply
from qreward_plugins.sources.rate_limit_headers import announced_limits, retry_after_s
from qreward_plugins.sources.streams import Event, EventParser, StreamBroken, StreamReader

from ..kit import each_of
from .wire import KEY, asked, request_of

Data = Mapping[str, Any]
SAMPLE = Sample([{"role": "user", "content": "6 * 7?"}], "42", ground_truth="42")
DIALECTS = ("openai", "openai_reasoning", "responses", "anthropic", "gemini")


def source(dialect: str, **settings: Any) -> OpenAISource:
    node = {"kind": "openai", "base_url": "http://judge.invalid/v1", "model": "m", "dialect": dialect, **settings}
    return OpenAISource("a", OpenAISource.Config.model_validate(node))


def judge(**settings: Any) -> LLMJudge:
    criteria = {} if "labels" in settings else {"criteria": {"style": "Good style."}}
    config = LLMJudge.Config.model_validate({"kind": "llm", **criteria, **settings})
    return LLMJudge("main", config, sources=["a"], key=b"0" * 32)


def sent(dialect: str, *, settings: Mapping[str, Any] | None = None, **asked: Any) -> dict[str, Any]:
    """The body that a judge's request becomes."""
    request = judge(**asked).request(SAMPLE, attempt=0)
    body: dict[str, Any] = json.loads(source(dialect, **(settings or {})).written(request))
    return body


# Bodies


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


@pytest.mark.parametrize("response_format", ["json_schema", "none"])
def test_messages_are_what_anthropic_s_package_would_send(response_format: str) -> None:
    from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

    settings = {"parameters": {"output_config": {"effort": "low"}}}
    body = sent("anthropic", settings=settings, response_format=response_format)
    check(MessageCreateParamsNonStreaming, body)
    assert "temperature" not in body
    assert body["output_config"]["effort"] == "low"
    assert ("format" in body["output_config"]) is (response_format == "json_schema")
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


@pytest.mark.anyio
async def test_parameters_that_are_no_json_refuse_the_sample() -> None:
    [error] = await asked(source("openai"), request_of(thing=object()))
    assert type(error) is SampleRefused
    assert "cannot be written" in str(error)


def test_reasoning_models_get_no_temperature_and_the_bound_that_they_read() -> None:
    opened = source("openai_reasoning", parameters={"reasoning_effort": "low", "seed": None, "absent": None})
    body = json.loads(opened.written(request_of("Judge.", max_tokens=5, temperature=0.0, seed=3)))
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Judge."}],
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(
    ("dialect", "path", "header"),
    [
        ("openai", "/v1/chat/completions", ("Authorization", f"Bearer {KEY}")),
        ("openai_reasoning", "/v1/chat/completions", ("Authorization", f"Bearer {KEY}")),
        ("responses", "/v1/responses", ("Authorization", f"Bearer {KEY}")),
        ("anthropic", "/v1/messages", ("x-api-key", KEY)),
        ("gemini", "/v1/models/m:generateContent", ("x-goog-api-key", KEY)),
    ],
)
def test_the_path_and_the_header_of_the_key(dialect: str, path: str, header: tuple[str, str]) -> None:
    opened = source(dialect, api_key=KEY)
    assert [url.path for url in opened._urls.values()] == [path]
    assert opened._http._headers[header[0]] == header[1]
    assert ("anthropic-version" in opened._http._headers) is (dialect == "anthropic")


def test_a_model_of_gemini_may_be_named_with_its_collection() -> None:
    [url] = source("gemini", model="tunedModels/mine")._urls.values()
    assert url.path == "/v1/tunedModels/mine:generateContent"


# Images: the form of the official APIs

REMOTE = "https://h/a.png"
PARTS = {
    "responses": lambda body: body["input"][-1]["content"],
    "anthropic": lambda body: body["messages"][-1]["content"],
    "gemini": lambda body: body["contents"][-1]["parts"],
}


def with_image(url: Any) -> Request:
    parts = [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": url}}]
    messages: Any = ({"role": "system", "content": "s"}, {"role": "user", "content": parts})
    return Request(Sample([], "4"), messages=messages, parameters={"max_tokens": 9}, max_completion_tokens=9)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_image_has_the_form_of_the_dialect_and_counts_as_tokens(dialect: str) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

    def written(color: str) -> bytes:
        target = BytesIO()
        pillow.new("RGB", (8, 6), color).save(target, format="PNG")
        return target.getvalue()

    red, blue = (EncodedImage(Image.of(written(each)), max_side=64, max_bytes=10_000) for each in ("red", "blue"))
    data, opened = base64.b64encode(written("red")).decode(), source(dialect)
    url = f"data:image/png;base64,{data}"
    form: dict[str, Any] = {
        "responses": {"type": "input_image", "image_url": url},
        "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        "gemini": {"inlineData": {"mimeType": "image/png", "data": data}},
    }.get(dialect, {"type": "image_url", "image_url": {"url": url}})
    # One that is encoded when the body is written, and one that somebody has encoded already.
    for image in (red, url):
        body = orjson.loads(encoded(opened.body(with_image(image))))
        text, part = PARTS.get(dialect, lambda body: body["messages"][-1]["content"])(body)
        assert text["text"] == "Look."
        assert part.items() >= form.items()
    demand = opened.demand(with_image(red))
    assert demand is not None
    assert demand.prompt >= 2048
    questions = {str(opened.question(with_image(image))) for image in (red, blue)}
    assert len(questions) == 2
    assert not any("base64," in question or data in question for question in questions)
    if dialect != "gemini":
        assert REMOTE.encode() in encoded(opened.body(with_image(REMOTE)))


# Replies


def read(
    dialect: str, body: Any, status: int = 200, headers: Mapping[str, str] | None = None, **settings: Any
) -> Reply:
    stated = CIMultiDict({"Content-Type": "application/json", **(headers or {})})
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = URL("http://judge.invalid/v1/chat/completions")
    return source(dialect, **settings).answer(url, HTTPReply(status, stated, data)).reply()


def completion(message: Any, finish_reason: Any = "stop", **choice: Any) -> dict[str, Any]:
    return {"model": "judge-1", "choices": [{"message": message, "finish_reason": finish_reason, **choice}]}


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
    "openai": {
        **completion({"content": "fine", "reasoning_content": "hm"}),
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 90},
            "completion_tokens_details": {"reasoning_tokens": 4},
        },
        "error": None,
    },
    "responses": response(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, output_text("fine")
    ),
    "anthropic": message({"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "fine"}),
    "gemini": generated({"text": "hm", "thought": True}, {"text": "fine"}),
}


@pytest.mark.parametrize("dialect", THOUGHTS)
def test_thoughts_are_kept_apart_and_usage_has_its_parts(dialect: str) -> None:
    reply = read(dialect, THOUGHTS[dialect], headers={"x-ratelimit-limit-requests": "60"})
    assert (reply.text, reply.thinking, reply.finish_reason) == ("fine", "hm", "stop")
    assert reply.usage == Usage(100, 7, cached_tokens=90, thinking_tokens=4)
    assert reply.model
    assert reply.announced == {"requests_per_window": 60.0}


@each_of(
    ("content", "text", "thinks"),
    [
        ("7", "7", False),
        ([], "", False),
        ([{"type": "text", "text": "a"}, {"type": "x"}, {"type": "text", "text": "b"}], "ab", False),
        *(
            ([{"type": kind, "text": '{"score": 9}'}, {"type": "text", "text": "7"}], "7", True)
            for kind in ("thinking", "reasoning_text", "Thought")
        ),
    ],
)
def test_contents_of_every_known_type(content: Any, text: str, thinks: bool) -> None:
    reply = read("openai", completion({"content": content}, "length"))
    assert (reply.text, reply.finish_reason, bool(reply.thinking)) == (text, "length", thinks)


@each_of(
    "usage",
    [
        None,
        [],
        {"prompt_tokens": 1},
        *({"prompt_tokens": number, "completion_tokens": 1} for number in (-1, True, 1.5, 10**12, "1")),
    ],
)
def test_usage_that_makes_no_sense_is_none(usage: Any) -> None:
    assert read("openai", {**completion({"content": "x"}), "usage": usage}).usage is None


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("openai", completion({"content": None, "reasoning_content": "hm"}, "length")),
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


@each_of(
    ("dialect", "body", "says"),
    [
        ("openai", completion({"content": None, "refusal": "No."}), "refused to judge: No."),
        ("openai", completion({"content": [{"type": "refusal", "refusal": "No."}]}), "refused to judge: No."),
        ("responses", response({"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}), "No."),
        ("responses", response(status="failed", error={"code": "invalid_prompt", "message": "bad"}), "bad"),
        ("anthropic", message(stop="refusal", stop_details={"type": "refusal", "explanation": "No."}), "No."),
        ("gemini", {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}}, "PROHIBITED_CONTENT"),
    ],
)
def test_refusals(dialect: str, body: Any, says: str) -> None:
    with pytest.raises(InvalidReply, match=says):
        read(dialect, body)


@each_of("finish", ["SAFETY", "SPII"])
def test_an_answer_that_gemini_withheld_is_no_verdict(finish: str) -> None:
    assert read("gemini", generated({"text": "half"}, finish=finish)).finish_reason == "content_filter"


@each_of(
    ("dialect", "body"),
    [
        *(("openai", completion({"content": None}, finish)) for finish in ("stop", None)),
        ("openai", completion({"content": "", "reasoning": "hm"})),
        ("openai", completion({"content": [{"type": "thinking", "text": '{"score": 9}'}]})),
        ("openai", completion({"content": '{"score": 7}'}, "error")),
        *(("openai", completion({"content": content})) for content in (3, {"a": 1}, ["a"])),
        ("openai", completion({"content": ""}, error={"code": 502, "message": "upstream"})),
        *(("openai", {"choices": choices}) for choices in (None, [], {}, [None], [{}], [{"message": "x"}])),
        *(("openai", {"error": error}) for error in ("overloaded", {"message": "x", "code": 500}, True)),
        *(("openai", data) for data in (b"  ", b"[]", b"null", b"3", b"data: {}\n\n", b"[" * 5000 + b"]" * 5000, {})),
        ("responses", response(output_text("fine"), status="in_progress")),
        ("responses", response({"type": "reasoning", "summary": []})),
        ("responses", response(status="failed", error={"code": "server_error", "message": "oops"})),
        ("anthropic", message()),
        ("anthropic", message({"type": "text", "text": "half"}, stop="pause_turn")),
        ("anthropic", message({"type": "thinking", "thinking": "hm"})),
        ("anthropic", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
        ("gemini", generated({"text": "hm", "thought": True})),
        ("gemini", generated({"text": "half"}, finish="OTHER")),
    ],
)
def test_a_reply_without_an_answer_is_tried_again(dialect: str, body: Any) -> None:
    with pytest.raises(TransientError) as caught:
        read(dialect, body)
    assert type(caught.value) is TransientError
    assert "'a'" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("reason", [None, "a reason of next year"])
def test_a_response_that_is_incomplete_for_any_reason_is_not_whole(reason: str | None) -> None:
    body = response(output_text("fine"), status="incomplete", incomplete_details={"reason": reason})
    assert why_no_verdict(read("responses", body).finish_reason) == "cut off"


def test_a_commentary_is_no_part_of_the_answer() -> None:
    body = response(output_text("I will grade it.", phase="commentary"), output_text("fine", phase="final_answer"))
    assert read("responses", body).text == "fine"


@each_of(
    ("dialect", "body"),
    [
        ("openai", completion({"content": None}, KEY)),
        ("responses", {"status": KEY, "output": []}),
        ("gemini", {"candidates": [{"content": {"parts": [{"text": "x"}]}, "finishReason": KEY}]}),
    ],
)
def test_a_key_that_a_server_echoes_as_the_end_of_a_reply_is_not_shown(dialect: str, body: Any) -> None:
    with pytest.raises(TransientError) as caught:
        read(dialect, body, api_key=KEY)
    assert KEY not in str(caught.value)
    assert "***" in str(caught.value)


# Statuses and error objects


@each_of(
    ("status", "headers", "kind"),
    [
        *((status, {}, PermanentError) for status in (400, 413, 418, 422)),
        *((status, {}, SourceUnusable) for status in (401, 402, 403, 404, 405)),
        *((status, {}, TransientError) for status in (408, 409, 425, 500, 502, 503, 504, 529, 599)),
        (429, {}, Throttled),
        (500, {"Retry-After": "3"}, TransientError),
        (503, {"Retry-After": "3"}, Throttled),
        (529, {"Retry-After": "3"}, Throttled),
        (301, {"Location": "https://user:pw@other.example/x?key=y"}, SourceUnusable),
        (302, {"Location": "http://[bad"}, SourceUnusable),
    ],
)
def test_every_status_has_its_class(status: int, headers: dict[str, str], kind: type) -> None:
    for body in (b"", b"<html>x</html>", b'{"error": {"message": "no"}}', b'{"detail": [{"loc": []}]}'):
        with pytest.raises(SourceError) as caught:
            read("openai", body, status, headers)
        assert type(caught.value) is kind
        assert caught.value.status == status
        assert str(status) in str(caught.value)
        if isinstance(caught.value, Throttled):
            assert caught.value.retry_after_s == (3.0 if headers else None)
        if "other" in headers.get("Location", ""):
            assert "https://other.example;" in str(caught.value)
            assert "pw" not in str(caught.value)


BAD_KEY = {"code": 400, "message": "API key not valid.", "details": [{"reason": "API_KEY_INVALID"}]}


@each_of(
    ("dialect", "status", "error", "kind", "says"),
    [
        ("openai", 429, {"code": "insufficient_quota", "message": "You exceeded"}, SourceUnusable, "out of credit"),
        ("openai", 400, {"code": "content_filter"}, InvalidReply, "content filter"),
        ("openai", 400, {"innererror": {"code": "ResponsibleAIPolicyViolation"}}, InvalidReply, "content filter"),
        ("openai", 403, {"type": "content_policy_violation"}, InvalidReply, "content filter"),
        ("openai", 500, {"code": "content_filter"}, TransientError, "500"),
        ("openai", 404, {"code": "model_not_found"}, SourceUnusable, "unknown model 'm'"),
        ("openai", 200, {"code": 429}, Throttled, "429"),
        ("openai", 200, {"code": "rate_limit_exceeded"}, Throttled, "429"),
        ("openai", 200, {"code": "content_filter"}, InvalidReply, "content filter"),
        ("openai", 200, {"code": [1], "type": {}}, TransientError, "an error"),
        ("openai", 401, {}, SourceUnusable, "check api_key or api_key_env"),
        ("openai", 400, {"code": "unsupported_parameter"}, PermanentError, "dialect: openai_reasoning"),
        ("gemini", 400, BAD_KEY, SourceUnusable, "api_key"),
        ("anthropic", 529, {"type": "overloaded_error", "message": "Overloaded"}, TransientError, "Overloaded"),
        ("anthropic", 400, {"type": "billing_error", "message": "x"}, SourceUnusable, "credit"),
    ],
)
def test_codes_decide_where_the_status_does_not(
    dialect: str, status: int, error: dict[str, Any], kind: type[QRewardError], says: str
) -> None:
    with pytest.raises(QRewardError, match=says) as caught:
        read(dialect, {"error": error}, status)
    assert type(caught.value) is kind


def test_an_error_that_is_the_body_itself_is_understood() -> None:
    with pytest.raises(SourceUnusable, match="unknown model"):
        read("openai", {"object": "error", "message": "The model `x` does not exist", "code": "model_not_found"}, 404)


@each_of("status", [200, 401, 500])
def test_an_echoed_key_is_struck_out(status: int) -> None:
    for body in ({"error": {"message": f"Incorrect API key: {KEY[:10]}****"}}, f"<p>{KEY}</p>".encode()):
        with pytest.raises(SourceError) as caught:
            read("openai", body, status, api_key=KEY)
        assert KEY[:8] not in str(caught.value)
        assert "***" in str(caught.value)


def test_frequent_mistakes_in_the_url_come_with_their_remedy() -> None:
    for path, hinted in (("/chat/completions", True), ("/v1/chat/completions", False)):
        answer = source("openai").answer(URL(f"http://host{path}"), HTTPReply(404, {}, b'{"detail": "Not Found"}'))
        with pytest.raises(SourceUnusable) as caught:
            answer.reply()
        assert ("ends in /v1" in str(caught.value)) is hinted
    with pytest.raises(TransientError, match=r"\(a web page; check base_url\)"):
        read("openai", b"<html>Welcome</html>", headers={"Content-Type": "Text/HTML; charset=utf-8"})


def test_gemini_states_its_pause_in_the_body() -> None:
    retry: dict[str, Any] = {"@type": "type.googleapis.com/google.rpc.RetryInfo"}
    error = {"code": 429, "message": "Quota", "status": "RESOURCE_EXHAUSTED", "details": [retry]}
    stated = {"34.5s": 34.5, "999999s": 300.0, **dict.fromkeys(("1e9s", "-3s", "s", 5, "9" * 80 + "s", "3٣s"))}
    for delay, pause_s in stated.items():
        retry["retryDelay"] = delay
        for body in ({"error": error}, [{"error": error}]):
            with pytest.raises(Throttled) as caught:
                read("gemini", body, 429)
            assert caught.value.retry_after_s == pause_s


DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("headers", "pause_s"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"Retry-After": "0"}, 0.0),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "١"}, None),
        ({"Retry-After": "9" * 60}, 300.0),
        ({"Retry-After": "9" * 5000}, None),
        ({"retry-after-ms": "250", "Retry-After": "7"}, 0.25),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:09 GMT", "Date": DATE}, 9.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:27:00 GMT", "Date": DATE}, None),
        ({"Retry-After": "Wed, 99 Oct 2015 07:28:09 GMT", "Date": DATE}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 300.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "120ms"}, 0.12),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "9s"}, None),
    ],
)
def test_a_pause_is_read_clamped_or_nothing(headers: dict[str, str], pause_s: float | None) -> None:
    assert retry_after_s(CIMultiDict(headers)) == pytest.approx(pause_s)


def test_a_date_without_a_date_header_is_relative_to_the_wall_clock() -> None:
    later = datetime.now(timezone.utc) + timedelta(seconds=100)
    pause_s = retry_after_s(CIMultiDict({"Retry-After": format_datetime(later, usegmt=True)}))
    assert pause_s is not None
    assert 50 < pause_s <= 100


def test_the_limits_of_every_spelling_are_read() -> None:
    openai = {
        "x-ratelimit-limit-requests": "5000",
        "x-ratelimit-remaining-requests": "4999",
        "x-ratelimit-reset-requests": "12ms",
        "x-ratelimit-limit-tokens": "160000",
        "x-ratelimit-remaining-tokens": "159000",
        "x-ratelimit-reset-tokens": "1m2.5s",
    }
    assert announced_limits(CIMultiDict(openai)) == pytest.approx(
        {
            "requests_per_window": 5000,
            "requests_remaining": 4999,
            "requests_reset_s": 0.012,
            "tokens_per_window": 160000,
            "tokens_remaining": 159000,
            "tokens_reset_s": 62.5,
        }
    )
    anthropic = {
        "Date": DATE,
        "anthropic-ratelimit-requests-limit": "50",
        "anthropic-ratelimit-requests-reset": "2015-10-21T07:28:30Z",
    }
    assert announced_limits(CIMultiDict(anthropic)) == {"requests_per_window": 50.0, "requests_reset_s": 30.0}
    assert announced_limits(CIMultiDict({"RateLimit-Limit": "10", "RateLimit-Reset": "0.5"})) == {
        "requests_per_window": 10.0,
        "requests_reset_s": 0.5,
    }


@each_of("value", ["", "-1", "nan", "1e400", "1700000000", "1h1", "Z"])
def test_a_reset_that_makes_no_sense_is_left_out(value: str) -> None:
    assert announced_limits(CIMultiDict({"x-ratelimit-reset-requests": value})) == {}


# Configurations


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("openai", {"parameters": {"messages": None}}, "parameters.messages"),
    ("responses", {"parameters": {"input": "x"}}, "parameters.input"),
    ("anthropic", {"parameters": {"system": "x"}}, "parameters.system"),
    ("gemini", {"parameters": {"contents": []}}, "parameters.contents"),
    ("gemini", {"parameters": {"generationConfig": 5}}, "parameters.generationConfig"),
    ("anthropic", {"parameters": {"output_config": "low"}}, "parameters.output_config"),
    ("openai", {"parameters": {"stream": True}}, "parameters.stream"),
    ("openai", {"stream": True, "parameters": {"n": 2}}, "parameters.n"),
    ("openai", {"timeouts": {"idle_s": 5}}, "timeouts.idle_s"),
    ("gemini", {"base_url": "http://h/v1beta/models/m:generateContent"}, "base_url"),
    ("openai", {"base_url": "http://h/v1/responses"}, "base_url"),
]


@each_of(("dialect", "settings", "path"), MISTAKES)
def test_a_wrong_combination_is_refused_with_its_path(dialect: str, settings: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        source(dialect, **settings)
    assert [mistake.path for mistake in caught.value.mistakes] == [f"sources.a.{path}"]


UNMET: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("openai", {"seed": 3, "temperature": 0.7, "response_format": "json_object"}, {}, None),
    ("openai_reasoning", {"temperature": 0.7}, {}, "temperature"),
    ("responses", {"seed": 3}, {}, "seed"),
    ("anthropic", {"seed": 3}, {}, "seed"),
    ("anthropic", {"response_format": "json_object"}, {}, "response_format"),
    ("anthropic", {"temperature": 0.7}, {"temperature": 0.5}, None),
]


@each_of(("dialect", "asked", "parameters", "key"), UNMET)
def test_a_judge_that_needs_what_the_dialect_lacks_is_refused_at_the_start(
    dialect: str, asked: dict[str, Any], parameters: dict[str, Any], key: str | None
) -> None:
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
    ("anthropic", {}, 8192),
    ("anthropic", {"thinking": {"type": "disabled"}}, 512),
    ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 4096}}, 8192),
    ("gemini", {}, 8192),
    ("gemini", {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}, 512),
    ("gemini", {"generationConfig": {"maxOutputTokens": 100, "candidateCount": 3}}, 300),
    ("openai", {}, 512),
    ("openai", {"reasoning_effort": "low"}, 8192),
    ("openai", {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}, 512),
    ("openai_reasoning", {}, 8192),
    ("openai_reasoning", {"max_completion_tokens": 100}, 100),
]


@each_of(("dialect", "parameters", "most"), BOUNDS)
def test_the_tokens_that_are_reserved_are_those_of_the_body(
    dialect: str, parameters: dict[str, Any], most: int
) -> None:
    request = judge().request(SAMPLE, attempt=0)
    opened = source(dialect, parameters=parameters, limits={"tokens_per_minute": 100_000})
    demand = opened.demand(request)
    assert demand is not None
    assert demand.completion == most
    assert demand.prompt >= sum(len(str(part["content"])) for part in request.messages)
    body = json.loads(opened.written(request))
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
    body = json.loads(source(dialect, parameters=parameters).written(judge().request(SAMPLE, attempt=0)))
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


# Streams


def events_of(data: bytes, cuts: list[int] | None = None, most_bytes: int = 10_000) -> list[Event]:
    parser = EventParser(most_bytes)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts or []), len(data)]
    return [event for start, end in pairwise(edges) for event in parser.feed(data[start:end])]


@each_of(
    ("data", "expected"),
    [
        (b"data: a\n\n", [("", b"a")]),
        (b"data:a\r\n\r\ndata: b\r\r", [("", b"a"), ("", b"b")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("", b"a")]),
        (b": keep-alive\n\n: again\n\ndata: a\n\n", [("", b"a")]),
        (b"event: ping\n\nevent: x\ndata: a\nid: 7\nretry: 3\nother: b\n\n", [("x", b"a")]),
        (b"data: a\ndata\ndata:  b\n\n", [("", b"a\n\n b")]),
    ],
)
def test_events(data: bytes, expected: list[tuple[str, bytes]]) -> None:
    assert [(event.name, event.data) for event in events_of(data)] == expected


@given(
    st.lists(st.sampled_from([b"data: \xe2\x82\xac", b"event: x", b": c", b"", b"data: {}"]), max_size=12),
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=12, max_size=12),
    st.lists(st.integers(min_value=0, max_value=400), max_size=20),
)
def test_where_chunks_are_cut_changes_nothing(lines: list[bytes], ends: list[bytes], cuts: list[int]) -> None:
    data = b"".join(line + end for line, end in zip(lines, ends, strict=False)) + b"data: last\n\n"
    assert events_of(data, cuts) == events_of(data) == events_of(data, list(range(len(data))))


@each_of(
    "data", [b"data: " + b"x" * 50_000, b"data: x\n" * 50_000, b": " + b"x" * 50_000 + b"\n", b"x" * 20_000 + b"\n\n"]
)
def test_a_huge_event_is_refused(data: bytes) -> None:
    for cuts in ([], list(range(0, 50_000, 512))):
        with pytest.raises(StreamBroken, match="larger than 10,000 bytes"):
            events_of(data, cuts)


def streamed(dialect: str, *events: Data | bytes) -> StreamReader:
    reader = KNOWN[dialect].stream()
    for event in events:
        name = "" if isinstance(event, bytes) else str(event.get("type", ""))
        reader.read(Event(name, event if isinstance(event, bytes) else orjson.dumps(event)))
    return reader


def piece_of_chat(content: Any = None, finish: str | None = None, **more: Any) -> Data:
    delta = {} if content is None else {"content": content}
    return {"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def block(index: int, **fields: Any) -> list[Data]:
    return [{"type": "content_block_start", "index": index, "content_block": fields}]


def delta(index: int, kind: str, **fields: Any) -> Data:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def closed(index: int) -> Data:
    return {"type": "content_block_stop", "index": index}


def stopped(reason: str = "end_turn", **more: Any) -> Data:
    return {"type": "message_delta", "delta": {"stop_reason": reason, **more}, "usage": {"output_tokens": 7}}


STARTED = {
    "type": "message_start",
    "message": {"model": "claude", "content": [], "usage": {"input_tokens": 100, "output_tokens": 1}},
}


TEXT = [*block(0, type="text", text=""), delta(0, "text_delta", text="fine")]


CREATED = {"type": "response.created", "response": {"model": "gpt", "status": "in_progress", "output": []}}


def item(index: int, kind: str = "message", **fields: Any) -> Data:
    return {"type": "response.output_item.added", "output_index": index, "item": {"type": kind, **fields}}


def piece(text: str, index: int = 0, kind: str = "output_text") -> Data:
    return {"type": f"response.{kind}.delta", "output_index": index, "content_index": 0, "delta": text}


def finished(status: str = "completed", **fields: Any) -> Data:
    usage = {"input_tokens": 100, "output_tokens": 7}
    return {"type": f"response.{status}", "response": {"model": "gpt", "status": status, "usage": usage, **fields}}


def chunk(*parts: Data, finish: str | None = None, tokens: int = 7, **more: Any) -> Data:
    usage = {"promptTokenCount": 100, "candidatesTokenCount": tokens}
    candidate = {"content": {"role": "model", "parts": [*parts]}, "finishReason": finish, "index": 0}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini", **more}


STREAMS: dict[str, list[Data]] = {
    "openai": [
        {"model": "m", "choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]},
        piece_of_chat("fi", ""),
        # What some servers write in the place of null.
        {"choices": [{"index": None, "delta": {"content": "ne"}, "finish_reason": ""}]},
        piece_of_chat(finish="stop"),
        {"choices": None, "usage": {"prompt_tokens": 100, "completion_tokens": 7}},
    ],
    "anthropic": [
        STARTED,
        *block(0, type="thinking", thinking=""),
        delta(0, "thinking_delta", thinking="hm"),
        delta(0, "signature_delta", signature="x"),
        closed(0),
        *block(1, type="text", text=""),
        {"type": "ping"},
        delta(1, "text_delta", text="fi"),
        delta(1, "a_new_delta", text="!"),
        delta(1, "text_delta", text="ne"),
        closed(1),
        {"type": "a_new_event"},
        stopped(),
        {"type": "message_stop"},
    ],
    "responses": [
        CREATED,
        item(0, "reasoning"),
        piece("h", 0, "reasoning_summary_text"),
        {"type": "response.output_item.done", "output_index": 0},
        item(1, phase="commentary"),
        piece("m", 1),
        item(2),
        piece("fi", 2),
        {"type": "response.a_new_event", "delta": 7},
        piece("ne", 2),
        finished(
            output=[
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "h"}]},
                output_text("m", phase="commentary"),
                output_text("fine"),
            ]
        ),
    ],
    "gemini": [
        chunk({"text": "hm", "thought": True}),
        chunk({"text": "fi"}),
        chunk({"text": "ne"}, {"thoughtSignature": "x"}),
        chunk(finish="STOP"),
    ],
}


@pytest.mark.parametrize("dialect", STREAMS)
def test_a_stream_makes_the_body_of_the_same_reply(dialect: str) -> None:
    reader = streamed(dialect, *STREAMS[dialect])
    assert (reader.text, reader.thoughts, reader.whole) == ("fine", "hm", True)
    assert reader.ended is (dialect in ("anthropic", "responses"))
    assert reader.begun
    reply = read(dialect, orjson.dumps(reader.body()))
    assert (reply.text, reply.thinking.replace("\n", ""), reply.finish_reason) == ("fine", "hm", "stop")
    assert reply.usage == Usage(100, 7)
    assert reply.model
    begun = streamed(dialect, *STREAMS[dialect][:2], b"[DONE]")
    assert (begun.ended, begun.whole) == (True, False)


@each_of("output", [None, []])
def test_a_stream_whose_last_event_has_no_output_keeps_its_text(output: Any) -> None:
    """Some gateways leave it out."""
    reader = streamed("responses", CREATED, item(0), piece("fi"), piece("ne"), finished(output=output))
    assert read("responses", orjson.dumps(reader.body())).text == "fine"


def test_thoughts_among_the_parts_of_a_content_are_apart_from_the_answer() -> None:
    for part in ({"type": "thinking", "thinking": [{"type": "text", "text": "9"}]}, {"type": "reasoning", "text": "9"}):
        reader = streamed("openai", piece_of_chat([part]), piece_of_chat([{"type": "text", "text": "a"}], "stop"))
        assert (reader.text, bool(reader.thoughts)) == ("a", True)


@each_of(
    ("dialect", "event"),
    [
        ("openai", {"error": {"message": "oops", "code": 500}}),
        ("openai", {"choices": [{"index": 0, "error": {"message": "oops"}}]}),
        ("anthropic", {"type": "error", "error": {"type": "overloaded_error", "message": "oops"}}),
        ("responses", {"type": "error", "code": "server_error", "message": "oops", "sequence_number": 1}),
        ("responses", finished("failed", error={"code": "server_error", "message": "oops"}, output=[])),
        ("gemini", {"error": {"code": 503, "message": "oops", "status": "UNAVAILABLE"}}),
    ],
)
def test_an_error_in_the_middle_is_the_reply(dialect: str, event: Data) -> None:
    reader = streamed(dialect, *STREAMS[dialect][:2], event)
    assert reader.ended
    with pytest.raises(TransientError, match="oops"):
        read(dialect, reader.body())


def test_a_refusal_of_a_prompt_is_whole() -> None:
    reader = streamed("gemini", {"promptFeedback": {"blockReason": "SAFETY"}})
    assert (reader.whole, reader.body()["promptFeedback"]) == (True, {"blockReason": "SAFETY"})


LIES: list[tuple[str, list[Data | bytes], str]] = [
    ("openai", [b"{"], "not a JSON object"),
    ("openai", [b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}'], "not a JSON object"),
    ("openai", [{"choices": [{}, {}]}], "more than one of the choices"),
    ("openai", [{"choices": [7]}], "choices of the wrong type"),
    ("openai", [{"choices": [{"index": 1, "delta": {"content": "x"}}]}], "a second answer"),
    ("openai", [{"choices": [{"index": 0, "delta": 7}]}], "delta is not an object"),
    ("openai", [piece_of_chat(7)], "content is not text"),
    ("openai", [piece_of_chat("a", "stop"), piece_of_chat("b")], "text after the finish_reason"),
    ("anthropic", [STARTED, *TEXT, stopped(), delta(0, "text_delta", text="x")], "not open"),
    ("anthropic", [STARTED, *TEXT, closed(0), delta(0, "text_delta", text="x")], "not open"),
    ("anthropic", [STARTED, *TEXT, delta(0, "text_delta", text=7)], "text is not text"),
    ("anthropic", [{"type": "message_start", "message": 7}], "message is not an object"),
    ("responses", [CREATED, item(0), {**piece("x"), "delta": 7}], "delta is not text"),
    ("responses", [{"type": "response.completed", "response": []}], "response is not an object"),
    ("gemini", [chunk({"text": "x"}, finish="STOP"), chunk({"text": "y"})], "text after the finishReason"),
    ("gemini", [{"candidates": [{"index": 1}]}], "a second answer"),
    ("gemini", [{"candidates": [{"content": {"parts": [7]}}]}], "wrong type"),
]


@each_of(("dialect", "events", "said"), LIES)
def test_lies_are_refused(dialect: str, events: list[Any], said: str) -> None:
    with pytest.raises(StreamBroken, match=said):
        streamed(dialect, *events)
