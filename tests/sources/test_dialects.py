"""The dialects of chat servers: what each sends, against the official packages' own types, and what it reads.

Every rule about statuses and error objects is here, too: all kinds of server share it.
"""

from __future__ import annotations

import base64
import json
import pkgutil
import time
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from io import BytesIO
from itertools import pairwise
from typing import Any, get_type_hints

import orjson
import pytest
from multidict import CIMultiDict
from pydantic import TypeAdapter
from yarl import URL

from qreward_plugins import RewardEngine
from qreward_plugins.config import Config
from qreward_plugins.errors import (
    InvalidReply,
    PermanentError,
    QRewardError,
    SourceError,
    SourceUnusable,
    Throttled,
    TransientError,
)
from qreward_plugins.judges import LLMJudge, Opening
from qreward_plugins.judges.verdicts import why_no_verdict
from qreward_plugins.samples import Sample
from qreward_plugins.samples.images import EncodedImage, Image
from qreward_plugins.samples.json_values import encoded
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources import Request
from qreward_plugins.sources.dialects import DIALECTS as KNOWN
from qreward_plugins.sources.http import HTTPReply
from qreward_plugins.sources.openai import OpenAISource
from qreward_plugins.sources.passed_requests import PassedRequest, forwarded_headers
from qreward_plugins.sources.replies import announced_limits, retry_after_s
from qreward_plugins.sources.service import HTTPSource
from qreward_plugins.sources.streams import Event, EventParser, StreamBroken

from ..kit import each_of, mistakes_of
from .wire import request_of

Data = Mapping[str, Any]
SAMPLE = Sample([{"role": "user", "content": "6 * 7?"}], "42", ground_truth="42")
DIALECTS = ("openai", "openai_reasoning", "responses", "anthropic", "gemini")


def source(dialect, **settings):
    node = {"kind": "openai", "base_url": "http://judge.invalid/v1", "model": "m", "dialect": dialect, **settings}
    return OpenAISource("a", OpenAISource.Config.model_validate(node))


def judge(**settings):
    criteria = {} if "labels" in settings else {"criteria": {"style": "Good style."}}
    config = LLMJudge.Config.model_validate({"kind": "llm", **criteria, **settings})
    return LLMJudge("main", config, Opening(Config(), ("a",), b"0" * 32, {}.__getitem__))


def sent(dialect, *, settings=None, **asked):
    """The body that a judge's request becomes."""
    request = judge(**asked).request(SAMPLE, attempt=0)
    body: dict[str, Any] = json.loads(source(dialect, **(settings or {})).written(request))
    return body


# Bodies


def consumed(value):
    """Run the checks of lazy iterators."""
    if isinstance(value, Mapping):
        return {key: consumed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, Iterator)) or type(value).__name__ == "ValidatorIterator":
        return [consumed(item) for item in value]
    return value


def check(params, body):
    """Check a body against a TypedDict of an official package."""
    assert set(body) <= set(get_type_hints(params))
    # The iterators need the adapter until they are consumed.
    adapter = TypeAdapter(params)
    consumed(adapter.validate_python(body))


FORMATS = ("json_schema", "json_object", "none")
OFFICIAL = {
    "openai": "openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming",
    "openai_reasoning": "openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming",
    "responses": "openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming",
    "anthropic": "anthropic.types.message_create_params.MessageCreateParamsNonStreaming",
}
FURTHER = {
    "responses": {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}},
    "anthropic": {"output_config": {"effort": "low"}},
}


@pytest.mark.parametrize("dialect", OFFICIAL)
def test_bodies_are_what_the_official_package_would_send(dialect):
    for response_format in FORMATS:
        if (dialect, response_format) == ("anthropic", "json_object"):
            continue  # it has none
        settings = {"parameters": FURTHER.get(dialect, {})}
        body = sent(dialect, settings=settings, response_format=response_format)
        check(pkgutil.resolve_name(OFFICIAL[dialect]), body)
        assert ("temperature" in body) is (dialect == "openai")
        if dialect == "responses":
            assert (body["text"]["verbosity"], "format" in body["text"]) == ("low", response_format != "none")
            assert (body["store"], body["max_output_tokens"]) == (False, 8192)
            assert body["instructions"].startswith("You are")
        if dialect == "anthropic":
            asked_for = body["output_config"]
            assert (asked_for["effort"], "format" in asked_for) == ("low", response_format == "json_schema")
            assert body["max_tokens"] == 8192


def test_the_schema_for_anthropic_is_what_its_package_makes_of_ours():
    from anthropic.lib._parse._transform import transform_schema

    ours = sent("openai")["response_format"]["json_schema"]["schema"]
    assert sent("anthropic")["output_config"]["format"]["schema"] == transform_schema(ours)


def test_the_shared_prefix_is_cached_and_holds_nothing_of_the_sample():
    body = sent("anthropic")
    first, second = body["messages"][0]["content"]
    assert first["cache_control"] == {"type": "ephemeral"}
    assert "cache_control" not in second
    assert "6 * 7" not in first["text"]
    [whole] = [message["content"] for message in sent("openai")["messages"] if message["role"] == "user"]
    assert first["text"] + second["text"] == whole
    assert "cache_control" not in body["system"][0]


@pytest.mark.parametrize("response_format", FORMATS)
def test_gemini_gets_what_google_s_package_would_send(response_format):
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


def test_reasoning_models_get_no_temperature_and_the_bound_that_they_read():
    opened = source("openai_reasoning", parameters={"reasoning_effort": "low", "seed": None, "absent": None})
    body = json.loads(opened.written(request_of("Judge.", max_tokens=5, temperature=0.0, seed=3)))
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Judge."}],
        "max_completion_tokens": 5,
        "reasoning_effort": "low",
    }


# Images: the form of the official APIs

REMOTE = "https://h/a.png"
PARTS = {
    "responses": lambda body: body["input"][-1]["content"],
    "anthropic": lambda body: body["messages"][-1]["content"],
    "gemini": lambda body: body["contents"][-1]["parts"],
}


def with_image(url):
    parts = [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": url}}]
    messages: Any = ({"role": "system", "content": "s"}, {"role": "user", "content": parts})
    return Request(Sample([], "4"), messages=messages, parameters={"max_tokens": 9}, max_completion_tokens=9)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_image_has_the_form_of_the_dialect_and_counts_as_tokens(dialect):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

    def written(color):
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


def read(dialect, body, status=200, headers=None, **settings):
    stated = CIMultiDict({"Content-Type": "application/json", **(headers or {})})
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = URL("http://judge.invalid/v1/chat/completions")
    return source(dialect, **settings).answer(url, HTTPReply(status, stated, data)).reply()


def completion(message, finish_reason="stop", **choice):
    usage = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 90}}
    usage["completion_tokens_details"] = {"reasoning_tokens": 4}
    choices = [{"message": message, "finish_reason": finish_reason, **choice}]
    return {"model": "judge-1", "choices": choices, "usage": usage, "error": None}


def message(*content, stop="end_turn", **more):
    usage = {"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 5, "output_tokens": 7}
    usage["output_tokens_details"] = {"thinking_tokens": 4}
    return {"type": "message", "model": "claude", "content": [*content], "stop_reason": stop, "usage": usage, **more}


def response(*output, status="completed", **more):
    usage = {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 90}}
    usage["output_tokens_details"] = {"reasoning_tokens": 4}
    return {"object": "response", "model": "gpt", "status": status, "output": [*output], "usage": usage, **more}


def generated(*parts, finish="STOP", **more):
    usage = {"promptTokenCount": 100, "cachedContentTokenCount": 90, "candidatesTokenCount": 3, "thoughtsTokenCount": 4}
    candidate = {"content": {"role": "model", "parts": [*parts]}, "finishReason": finish}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini", **more}


def output_text(text, **more):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


THOUGHTS = {
    "openai": completion({"content": "fine", "reasoning_content": "hm"}),
    "responses": response(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, output_text("fine")
    ),
    "anthropic": message({"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "fine"}),
    "gemini": generated({"text": "hm", "thought": True}, {"text": "fine"}),
}


@pytest.mark.parametrize("dialect", THOUGHTS)
def test_thoughts_are_kept_apart_and_usage_has_its_parts(dialect):
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
def test_contents_of_every_known_type(content, text, thinks):
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
def test_usage_that_makes_no_sense_is_none(usage):
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
def test_a_reply_that_ended_in_its_thoughts_costs_no_source_its_health(dialect, body):
    reply = read(dialect, body)
    assert (reply.text, reply.finish_reason) == ("", "length")
    main = judge()
    with pytest.raises(InvalidReply, match=r"cut off .* raise judges\.main\.max_tokens, now 512"):
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
def test_refusals(dialect, body, says):
    with pytest.raises(InvalidReply, match=says):
        read(dialect, body)


COMMENTED = [output_text("I will grade it.", phase="commentary"), output_text("fine", phase="final_answer")]


@each_of(
    ("dialect", "body", "text", "why"),
    [
        ("gemini", generated({"text": "half"}, finish="SAFETY"), "half", "given up"),
        ("gemini", json.dumps([generated({"text": "fine"})]).encode(), "fine", ""),
        ("responses", response(output_text("fine"), status="incomplete", incomplete_details={}), "fine", "cut off"),
        ("responses", response(*COMMENTED), "fine", ""),
    ],
)
def test_what_is_the_answer_and_whether_it_is_whole(dialect, body, text, why):
    reply = read(dialect, body)
    assert (reply.text, why_no_verdict(reply.finish_reason)) == (text, why)


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
def test_a_reply_without_an_answer_is_tried_again(dialect, body):
    with pytest.raises(TransientError) as caught:
        read(dialect, body)
    assert type(caught.value) is TransientError
    assert "'a'" in str(caught.value)
    assert len(str(caught.value)) < 400


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
    ],
)
def test_every_status_has_its_class(status, headers, kind):
    for body in (b"", b"<html>x</html>", b'{"error": {"message": "no"}}', b'{"detail": [{"loc": []}]}'):
        with pytest.raises(SourceError) as caught:
            read("openai", body, status, headers)
        assert type(caught.value) is kind
        assert caught.value.status == status
        assert str(status) in str(caught.value)
        if isinstance(caught.value, Throttled):
            assert caught.value.retry_after_s == (3.0 if headers else None)
        assert "pw" not in str(caught.value)


BAD_KEY = {"code": 400, "message": "API key not valid.", "details": [{"reason": "API_KEY_INVALID"}]}


@each_of(
    ("dialect", "status", "error", "kind", "says"),
    [
        ("openai", 429, {"code": "insufficient_quota", "message": "You exceeded"}, SourceUnusable, "out of credit"),
        ("openai", 400, {"code": "content_filter"}, InvalidReply, "content filter"),
        ("openai", 400, {"innererror": {"code": "ResponsibleAIPolicyViolation"}}, InvalidReply, "content filter"),
        ("openai", 500, {"code": "content_filter"}, TransientError, "500"),
        ("openai", 403, {"type": "content_policy_violation"}, InvalidReply, "content filter"),
        ("openai", 404, {"code": "model_not_found"}, SourceUnusable, "unknown model 'm'"),
        ("openai", 200, {"code": 429}, Throttled, "429"),
        ("openai", 200, {"code": "content_filter"}, InvalidReply, "content filter"),
        ("openai", 401, {"code": "invalid_api_key"}, SourceUnusable, "check api_key or api_key_env"),
        ("openai", 404, "", SourceUnusable, "unknown model 'm'"),
        ("openai", 400, {"code": "unsupported_parameter"}, PermanentError, "dialect: openai_reasoning"),
        ("openai", 400, {"message": "Use 'max_completion_tokens'"}, PermanentError, "dialect: openai_reasoning"),
        ("openai", 400, {"message": "no response_format here"}, PermanentError, "set response_format: none"),
        ("gemini", 400, BAD_KEY, SourceUnusable, "api_key"),
        ("anthropic", 529, {"type": "overloaded_error", "message": "Overloaded"}, TransientError, "Overloaded"),
        ("anthropic", 400, {"type": "billing_error", "message": "x"}, SourceUnusable, "credit"),
        ("anthropic", 200, "", TransientError, "answered with an error"),
    ],
)
def test_codes_decide_where_the_status_does_not(dialect, status, error, kind, says):
    with pytest.raises(QRewardError, match=says) as caught:
        # Of some servers, the body itself is the error.
        read(dialect, {"error": error} if error else {"type": "error", "code": "model_not_found"}, status)
    assert type(caught.value) is kind


def test_frequent_mistakes_in_the_url_come_with_their_remedy():
    for path, hinted in (("/chat/completions", True), ("/v1/chat/completions", False)):
        answer = source("openai").answer(URL(f"http://host{path}"), HTTPReply(404, {}, b'{"detail": "Not Found"}'))
        with pytest.raises(SourceUnusable) as caught:
            answer.reply()
        assert ("ends in /v1" in str(caught.value)) is hinted
    with pytest.raises(TransientError, match=r"\(a web page; check base_url\)"):
        read("openai", b"<html>Welcome</html>", headers={"Content-Type": "Text/HTML; charset=utf-8"})


def test_gemini_states_its_pause_in_the_body():
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
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "١"}, None),
        ({"Retry-After": "9" * 60}, 300.0),
        ({"Retry-After": "9" * 5000}, None),
        ({"retry-after-ms": "250", "Retry-After": "7"}, 0.25),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:09 GMT", "Date": DATE}, 9.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:27:00 GMT", "Date": DATE}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 300.0),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "9s"}, None),
    ],
)
def test_a_pause_is_read_clamped_or_nothing(headers, pause_s):
    assert retry_after_s(CIMultiDict(headers)) == pytest.approx(pause_s)
    # Without a Date header, a date is relative to the wall clock.
    dated = retry_after_s(CIMultiDict({"Retry-After": formatdate(time.time() + 100, usegmt=True)}))
    assert dated is not None
    assert 50 < dated <= 100


@each_of(
    ("header", "stated", "limits"),
    [
        ("x-ratelimit-limit-requests", "5000", {"requests_per_window": 5000}),
        ("x-ratelimit-remaining-requests", "4999", {"requests_remaining": 4999}),
        ("x-ratelimit-reset-requests", "12ms", {"requests_reset_s": 0.012}),
        ("x-ratelimit-limit-tokens", "160000", {"tokens_per_window": 160000}),
        ("x-ratelimit-reset-tokens", "1m2.5s", {"tokens_reset_s": 62.5}),
        ("anthropic-ratelimit-requests-limit", "50", {"requests_per_window": 50}),
        ("anthropic-ratelimit-requests-reset", "2015-10-21T07:28:30Z", {"requests_reset_s": 30}),
        ("RateLimit-Limit", "10", {"requests_per_window": 10}),
        ("RateLimit-Reset", "0.5", {"requests_reset_s": 0.5}),
        *(("x-ratelimit-reset-requests", no, {}) for no in ("", "-1", "nan", "1e400", "1700000000", "1h1", "Z")),
    ],
)
def test_the_limits_of_every_spelling_are_read(header, stated, limits):
    assert announced_limits(CIMultiDict({"Date": DATE, header: stated})) == pytest.approx(limits)


# Configurations


def with_parameters(**parameters):
    return {"parameters": parameters}


COMBINATIONS: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("openai", with_parameters(messages=None), {}, "sources.a.parameters.messages"),
    ("responses", with_parameters(input="x"), {}, "sources.a.parameters.input"),
    ("anthropic", with_parameters(system="x"), {}, "sources.a.parameters.system"),
    ("gemini", with_parameters(contents=[]), {}, "sources.a.parameters.contents"),
    ("gemini", with_parameters(generationConfig=5), {}, "sources.a.parameters.generationConfig"),
    ("anthropic", with_parameters(output_config="low"), {}, "sources.a.parameters.output_config"),
    ("openai", with_parameters(stream=True), {}, "sources.a.parameters.stream"),
    ("openai", {"stream": True, **with_parameters(n=2)}, {}, "sources.a.parameters.n"),
    ("openai", {"timeouts": {"idle_s": 5}}, {}, "sources.a.timeouts.idle_s"),
    ("gemini", {"base_url": "http://h/v1beta/models/m:generateContent"}, {}, "sources.a.base_url"),
    ("openai", {"base_url": "http://h/v1/responses"}, {}, "sources.a.base_url"),
    # What the judge needs and the dialect lacks.
    ("openai", {}, {"seed": 3, "temperature": 0.7, "response_format": "json_object"}, None),
    ("openai_reasoning", {}, {"temperature": 0.7}, "judges.main.temperature"),
    ("anthropic", {}, {"seed": 3}, "judges.main.seed"),
    ("gemini", {}, {"read": "logprobs", "labels": {"yes": 1, "no": 0}}, "judges.main.read"),
    ("anthropic", {}, {"response_format": "json_object"}, "judges.main.response_format"),
    ("anthropic", with_parameters(temperature=0.5), {"temperature": 0.7}, None),
]


@each_of(("dialect", "settings", "asked", "path"), COMBINATIONS)
def test_a_wrong_combination_is_refused_with_its_path(dialect, settings, asked, path):
    node = {"kind": "openai", "base_url": "http://h/v1", "model": "m", "dialect": dialect, **settings}
    config = {"sources": {"a": node}, "judges": {"main": {"kind": "llm", **asked}}}
    if path is None:
        RewardEngine(config)
        return
    [(found, said)] = mistakes_of(RewardEngine, config).items()
    assert (found, "'a'" in said or path.startswith("sources")) == (path, True)


# What a request takes at most, read from the body that is really sent

BOUNDS: list[tuple[str, dict[str, Any], int]] = [
    ("responses", {}, 8192),
    ("anthropic", {}, 8192),
    ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 4096}}, 8192),
    ("gemini", {}, 8192),
    ("gemini", {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}, 512),
    ("gemini", {"generationConfig": {"maxOutputTokens": 100, "candidateCount": 3}}, 300),
    ("openai_reasoning", {"max_completion_tokens": 100}, 100),
    ("openai", {}, 512),
    ("openai", {"reasoning_effort": "low"}, 8192),
    ("openai", {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}, 512),
    ("openai", {"max_tokens": "4096"}, 4096),
    ("openai", {"max_tokens": 4096, "n": 8}, 8 * 4096),
    ("openai", {"max_completion_tokens": 100}, 512),  # a server that knows max_tokens only
    ("openai", {"thinking": {"type": "enabled", "budget_tokens": 8000}}, 8000 + 8192),
    ("openai", {"extra_body": {"thinking_budget": 1000}, "n": 2}, 2 * (1000 + 512)),
]


@each_of(("dialect", "parameters", "most"), BOUNDS)
def test_the_tokens_that_are_reserved_are_those_of_the_body(dialect, parameters, most):
    request = judge().request(SAMPLE, attempt=0)
    opened = source(dialect, parameters=parameters, limits={"tokens_per_minute": 100_000})
    demand = opened.demand(request)
    assert demand is not None
    assert demand.completion == most
    assert demand.prompt >= sum(len(str(part["content"])) for part in request.messages)
    body = json.loads(opened.written(request))
    if dialect != "openai":  # of it, the next test
        for key in opened.bound_key:
            body = body[key]
        assert body * parameters.get("generationConfig", {}).get("candidateCount", 1) == most


@each_of(
    ("dialect", "parameters", "key"),
    [
        *(("openai", {"max_tokens": value}, "max_tokens") for value in (None, -1, 0, "many", True)),
        *(("openai_reasoning", {"max_completion_tokens": value}, "max_completion_tokens") for value in (None, "all")),
        ("responses", {"max_output_tokens": None}, "max_output_tokens"),
        ("gemini", {"generationConfig": {"maxOutputTokens": None}}, "generationConfig.maxOutputTokens"),
        ("gemini", {"generationConfig": None}, "generationConfig.maxOutputTokens"),
    ],
)
def test_a_bound_that_is_removed_cannot_be_combined_with_a_limit_on_tokens(dialect, parameters, key):
    source(dialect, parameters=parameters)
    found = mistakes_of(source, dialect, parameters=parameters, limits={"tokens_per_minute": 1000})
    assert [*found] == [f"sources.a.parameters.{key}"]


def test_whatever_is_sent_is_part_of_the_prompt():
    tools = source("openai", parameters={"tools": [{"name": "x" * 5000}]}).demand(request_of())
    node = {"kind": "http", "url": "http://h/score", "body": {"r": "response", "e": "extras"}}
    service = HTTPSource("a", HTTPSource.Config.model_validate(node))
    extras = service.demand(Request(Sample([], "short", extras={"context": "z" * 9000})))
    assert tools is not None
    assert extras is not None
    assert (tools.prompt >= 5000, extras.prompt >= 9000) == (True, True)


def passed(**body):
    request = PassedRequest({"model": "gpt-5", **body})
    return source("openai").demand(Request(SAMPLE, max_completion_tokens=4096, passed=request))


@each_of(
    ("part", "is_text"),
    [
        ({"type": "document", "source": {"type": "text", "data": "some words of a document " * 2000}}, True),
        ({"type": "text", "text": "data:text/plain;base64," + "some words " * 4000}, True),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}, False),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64," + "A" * 40_000}}, False),
        ({"type": "input_audio", "input_audio": {"format": "wav", "data": "A" * 40_000}}, False),
        ({"inlineData": {"mimeType": "image/png", "data": "A" * 40_000 + "=="}}, False),
    ],
)
def test_of_a_clients_request_only_attachments_do_not_count_as_text(part, is_text):
    prompt = passed(messages=[{"role": "user", "content": [part]}]).prompt
    assert prompt > 40_000 if is_text else 4096 < prompt < 5000


def test_a_header_of_a_client_that_comes_several_times_is_joined():
    sent = CIMultiDict([("anthropic-beta", "a-1"), ("Anthropic-Beta", "b-2"), ("X-Tenant", "t")])
    assert forwarded_headers(sent) == {"anthropic-beta": "a-1, b-2"}


@each_of(("body", "most"), [({"n": 8}, 8 * 4096), ({"max_tokens": None}, 4096), ({"max_tokens": 10, "n": 3}, 30)])
def test_of_a_clients_request_every_completion_counts(body, most):
    assert passed(messages=[], **body).completion == most


def test_the_journal_key_holds_the_dialect_the_version_header_and_the_model():
    request = judge(response_format="none", max_tokens=9).request(SAMPLE, attempt=0)
    questions = [source(dialect, version="1").question(request) for dialect in DIALECTS]
    questions.append(source("anthropic", version="1", headers={"anthropic-version": "2026-10-21"}).question(request))
    questions.append(source("gemini", version="1", model="n").question(request))
    assert len(set(map(repr, questions))) == len(questions)


TOKENS = (("yes", (("yes", -0.1), ("no", -2.5))), (".", ((".", -0.0),)))


def test_log_probabilities_are_asked_for_and_read():
    asked = sent("openai", read="logprobs", labels={"yes": 1, "no": 0})
    assert asked.items() >= {"logprobs": True, "top_logprobs": 20, "max_tokens": 4}.items()
    content = [
        {"token": token, "top_logprobs": [{"token": each, "logprob": number} for each, number in likely]}
        for token, likely in TOKENS
    ]
    odd = {"token": "yes", "logprob": "high"}
    broken = [None, {"content": [1]}, {"content": [{}]}, {"content": [{**content[0], "top_logprobs": [odd]}]}]
    for said, found in (({"content": content}, TOKENS), *((each, ()) for each in broken)):
        body = completion({"content": "yes."}, logprobs=said)
        assert read("openai", body).logprobs == found, said


# Streams


def events_of(data, cuts=None, most_bytes=10_000):
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
def test_events(data, expected):
    assert [(event.name, event.data) for event in events_of(data)] == expected


@each_of(
    "data", [b"data: " + b"x" * 50_000, b"data: x\n" * 50_000, b": " + b"x" * 50_000 + b"\n", b"x" * 20_000 + b"\n\n"]
)
def test_a_huge_event_is_refused(data):
    for cuts in ([], list(range(0, 50_000, 512))):
        with pytest.raises(StreamBroken, match="larger than 10,000 bytes"):
            events_of(data, cuts)


def streamed(dialect, *events):
    reader = KNOWN[dialect].stream()
    for event in events:
        name = "" if isinstance(event, bytes) else str(event.get("type", ""))
        reader.read(Event(name, event if isinstance(event, bytes) else orjson.dumps(event)))
    return reader


def event(kind, **fields):
    return {"type": kind, **fields}


def piece_of_chat(content=None, finish=None, **delta):
    delta = delta if content is None else {"content": content}
    return {"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def delta(index, kind, **fields):
    return event("content_block_delta", index=index, delta=event(kind, **fields))


def piece(text, index=0, kind="output_text"):
    return event(f"response.{kind}.delta", output_index=index, content_index=0, delta=text)


def finished(status="completed", **fields):
    usage = {"input_tokens": 100, "output_tokens": 7}
    return event(f"response.{status}", response={"model": "gpt", "status": status, "usage": usage, **fields})


def chunk(*parts, finish=None):
    usage = {"promptTokenCount": 100, "candidatesTokenCount": 7}
    candidate = {"content": {"role": "model", "parts": [*parts]}, "finishReason": finish, "index": 0}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini"}


STARTED = event("message_start", message={"model": "claude", "usage": {"input_tokens": 100, "output_tokens": 1}})
TEXT = event("content_block_start", index=0, content_block=event("text", text=""))
STOPPED = event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7})
ITEM = event("response.output_item.added", output_index=2, item=event("message"))
STREAMS: dict[str, list[Data]] = {
    "openai": [
        piece_of_chat(reasoning_content="hm"),
        piece_of_chat("fi", ""),
        # What some servers write in the place of null.
        {"choices": [{"index": None, "delta": {"content": "ne"}, "finish_reason": ""}]},
        piece_of_chat(finish="stop"),
        {"choices": None, "usage": {"prompt_tokens": 100, "completion_tokens": 7}},
    ],
    "anthropic": [
        STARTED,
        event("content_block_start", index=1, content_block=event("thinking", thinking="")),
        delta(1, "thinking_delta", thinking="hm"),
        delta(1, "signature_delta", signature="x"),
        event("content_block_stop", index=1),
        TEXT,
        event("ping"),
        delta(0, "text_delta", text="fi"),
        delta(0, "a_new_delta", text="!"),
        delta(0, "text_delta", text="ne"),
        event("content_block_stop", index=0),
        event("a_new_event"),
        STOPPED,
        event("message_stop"),
    ],
    "responses": [
        event("response.created", response={"model": "gpt", "status": "in_progress", "output": []}),
        event("response.output_item.added", output_index=0, item=event("reasoning")),
        piece("h", 0, "reasoning_summary_text"),
        event("response.output_item.done", output_index=0),
        event("response.output_item.added", output_index=1, item=event("message", phase="commentary")),
        piece("m", 1),
        ITEM,
        piece("fi", 2),
        event("response.a_new_event", delta=7),
        event("response.mcp_call.failed", error="a tool's"),
        piece("ne", 2),
        # Some gateways leave the `output` out.
        finished(output=None),
    ],
    "gemini": [
        chunk({"text": "hm", "thought": True}),
        chunk({"text": "fi"}),
        chunk({"text": "ne"}, {"thoughtSignature": "x"}),
        chunk(finish="STOP"),
    ],
}


@pytest.mark.parametrize("dialect", STREAMS)
def test_a_stream_makes_the_body_of_the_same_reply(dialect):
    reader = streamed(dialect, *STREAMS[dialect])
    assert (reader.text, reader.thoughts, reader.whole) == ("fine", "hm", True)
    assert reader.ended is (dialect in ("anthropic", "responses"))
    assert reader.begun
    reply = read(dialect, orjson.dumps(reader.body()))
    assert (reply.text, reply.finish_reason, reply.usage) == ("fine", "stop", Usage(100, 7))
    assert reply.thinking == ("" if dialect == "responses" else "hm")  # it would stand in the `output`
    assert reply.model
    begun = streamed(dialect, *STREAMS[dialect][:2], b"[DONE]")
    assert (begun.ended, begun.whole) == (True, False)


def test_thoughts_among_the_parts_of_a_content_are_apart_from_the_answer():
    for part in ({"type": "thinking", "thinking": [{"type": "text", "text": "9"}]}, {"type": "reasoning", "text": "9"}):
        reader = streamed("openai", piece_of_chat([part]), piece_of_chat([{"type": "text", "text": "a"}], "stop"))
        assert (reader.text, bool(reader.thoughts)) == ("a", True)


@each_of(
    ("dialect", "error"),
    [
        ("openai", {"choices": [{"index": 0, "error": {"message": "oops"}}]}),
        ("responses", event("error", code="server_error", message="oops", sequence_number=1)),
        ("responses", finished("failed", error={"code": "server_error", "message": "oops"}, output=[])),
    ],
)
def test_an_error_in_the_middle_is_the_reply(dialect, error):
    reader = streamed(dialect, *STREAMS[dialect][:2], error)
    assert reader.ended
    with pytest.raises(TransientError, match="oops"):
        read(dialect, reader.body())


LIES: list[tuple[str, list[Data | bytes], str]] = [
    ("openai", [{"choices": [{}, {}]}], "more than one of the choices"),
    ("openai", [{"choices": [7]}], "choices of the wrong type"),
    ("openai", [{"choices": [{"index": 0, "delta": 7}]}], "delta is not an object"),
    ("openai", [piece_of_chat(7)], "content is not text"),
    ("anthropic", [STARTED, TEXT, delta(0, "text_delta", text=7)], "text is not text"),
    ("anthropic", [event("message_start", message=7)], "message is not an object"),
    ("responses", [ITEM, piece(7, 2)], "delta is not text"),
    ("responses", [event("response.completed", response=[])], "response is not an object"),
    ("gemini", [{"candidates": [{"content": {"parts": [7]}}]}], "wrong type"),
]
"""What a judge server does not play (`test_faults`)."""


@each_of(("dialect", "events", "said"), LIES)
def test_lies_are_refused(dialect, events, said):
    with pytest.raises(StreamBroken, match=said):
        streamed(dialect, *events)
