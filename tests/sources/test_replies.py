from __future__ import annotations

import json
from typing import Any

import pytest
from multidict import CIMultiDict
from yarl import URL

from qreward_plugins.errors import (
    InvalidReply,
    PermanentError,
    QRewardError,
    SourceError,
    SourceUnusable,
    Throttled,
    TransientError,
)
from qreward_plugins.samples.spent import Usage
from qreward_plugins.secrets import Redactor
from qreward_plugins.sources import Reply
from qreward_plugins.sources.dialects.chat import CompletionAnswer
from qreward_plugins.sources.http_reading import HTTPReply

KEY = "sk-test-0123456789abcdefghij"


def answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    http = HTTPReply(status, CIMultiDict({"Content-Type": "application/json", **(headers or {})}), data)
    url = URL("http://h/v1/chat/completions")
    return CompletionAnswer("fast", url, "judge", "base_url", http, Redactor([KEY])).reply()


def completion(message: Any, **choice: Any) -> dict[str, Any]:
    return {"model": "judge-1", "choices": [{"message": message, "finish_reason": "stop", **choice}]}


def test_a_completion_becomes_a_reply() -> None:
    body = completion({"content": "fine", "reasoning_content": "hm"})
    body["usage"] = {"prompt_tokens": 12, "completion_tokens": 3}
    body["error"] = None
    reply = answer(body, headers={"x-ratelimit-limit-requests": "60"})
    assert reply == Reply(
        text="fine",
        thinking="hm",
        usage=Usage(12, 3),
        model="judge-1",
        finish_reason="stop",
        announced={"requests_per_window": 60.0},
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "x"}, {"type": "text", "text": "b"}], "ab"),
        ([], ""),
    ],
)
def test_contents_of_every_known_type(content: Any, text: str) -> None:
    reply = answer(completion({"content": content}, finish_reason="length"))
    assert (reply.text, reply.finish_reason) == (text, "length")


@pytest.mark.parametrize(
    "message",
    [{"content": None, "refusal": "I cannot"}, {"content": [{"type": "refusal", "refusal": "I cannot"}]}],
)
def test_a_refusal_is_an_invalid_verdict(message: Any) -> None:
    with pytest.raises(InvalidReply, match="refused to judge: I cannot"):
        answer(completion(message))


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        {"prompt_tokens": 1},
        {"prompt_tokens": -1, "completion_tokens": 1},
        {"prompt_tokens": True, "completion_tokens": 1},
        {"prompt_tokens": 1.5, "completion_tokens": 1},
        {"prompt_tokens": 10**12, "completion_tokens": 1},
        {"prompt_tokens": "1", "completion_tokens": 1},
    ],
)
def test_usage_that_makes_no_sense_is_none(usage: Any) -> None:
    assert answer({**completion({"content": "x"}), "usage": usage}).usage is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"[]",
        b"null",
        b"3",
        b'{"choices": [{"message": {"content": "x',
        b'{"choices": [{"message": {"content": "\xff"}}]}',
        b'{"choices": [{"message": {"content": NaN}}]}',
        b"<html>login</html>",
        b"data: {}\n\n",
        b"[" * 5000 + b"]" * 5000,
        {},
        {"choices": None},
        {"choices": []},
        {"choices": {}},
        {"choices": [None]},
        {"choices": [{}]},
        {"choices": [{"message": "x"}]},
        completion({"content": 3}),
        completion({"content": {"a": 1}}),
        completion({"content": ["a"]}),
        {"error": "overloaded"},
        {"error": {"message": "no idea", "code": None}},
        {"error": {"message": "x", "code": 500}},
        {"error": True},
        completion({"content": ""}, error={"code": 502, "message": "upstream"}),
    ],
)
def test_what_cannot_be_read_is_transient(body: Any) -> None:
    with pytest.raises(TransientError) as caught:
        answer(body)
    assert type(caught.value) is TransientError
    assert "'fast'" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (400, {}, PermanentError),
        (401, {}, SourceUnusable),
        (402, {}, SourceUnusable),
        (403, {}, SourceUnusable),
        (404, {}, SourceUnusable),
        (405, {}, SourceUnusable),
        (408, {}, TransientError),
        (409, {}, TransientError),
        (413, {}, PermanentError),
        (418, {}, PermanentError),
        (422, {}, PermanentError),
        (425, {}, TransientError),
        (429, {}, Throttled),
        (500, {}, TransientError),
        (500, {"Retry-After": "3"}, TransientError),
        (502, {}, TransientError),
        (503, {}, TransientError),
        (503, {"Retry-After": "3"}, Throttled),
        (503, {"Retry-After": "-3"}, TransientError),
        (504, {}, TransientError),
        (529, {}, TransientError),
        (529, {"Retry-After": "3"}, Throttled),
        (599, {}, TransientError),
        (301, {"Location": "https://user:pw@other.example/x?key=y"}, SourceUnusable),
        (307, {}, SourceUnusable),
        (302, {"Location": "http://[bad"}, SourceUnusable),
        (304, {}, SourceUnusable),
    ],
)
@pytest.mark.parametrize(
    "body", [b"", b"<html>x</html>", b'{"error": {"message": "no"}}', b'{"detail": [{"loc": []}]}']
)
def test_every_status_has_its_class(status: int, headers: dict[str, str], kind: type, body: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        answer(body, status, headers)
    assert type(caught.value) is kind
    assert caught.value.status == status
    assert str(status) in str(caught.value)
    if isinstance(caught.value, Throttled):
        assert caught.value.retry_after_s == (3.0 if headers else None)
    if "Location" in headers and "other" in headers["Location"]:
        assert "https://other.example;" in str(caught.value)
        assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error", "kind", "says"),
    [
        (429, {"code": "insufficient_quota", "message": "You exceeded"}, SourceUnusable, "out of credit"),
        (429, {"type": "insufficient_quota"}, SourceUnusable, "out of credit"),
        (400, {"code": "content_filter"}, InvalidReply, "content filter"),
        (400, {"code": "x", "innererror": {"code": "ResponsibleAIPolicyViolation"}}, InvalidReply, "content filter"),
        (403, {"type": "content_policy_violation"}, InvalidReply, "content filter"),
        (500, {"code": "content_filter"}, TransientError, "500"),
        (404, {"code": "model_not_found"}, SourceUnusable, "unknown model 'judge'"),
        (200, {"code": 429}, Throttled, "429"),
        (200, {"code": "429"}, Throttled, "429"),
        (200, {"code": "rate_limit_exceeded"}, Throttled, "429"),
        (200, {"code": 401}, SourceUnusable, "401"),
        (200, {"code": "content_filter"}, InvalidReply, "content filter"),
        (200, {"code": "insufficient_quota"}, SourceUnusable, "out of credit"),
        (200, {"code": 400}, PermanentError, "400"),
        (200, {"code": [1], "type": {}}, TransientError, "an error"),
    ],
)
def test_codes_decide_where_the_status_does_not(
    status: int, error: dict[str, Any], kind: type[QRewardError], says: str
) -> None:
    with pytest.raises(QRewardError, match=says) as caught:
        answer({"error": error}, status)
    assert type(caught.value) is kind


def test_an_error_that_is_the_body_itself_is_understood() -> None:
    with pytest.raises(SourceUnusable, match="unknown model"):
        answer({"object": "error", "message": "The model `x` does not exist", "code": "model_not_found"}, 404)


@pytest.mark.parametrize("status", [200, 400, 401, 429, 500])
def test_an_echoed_key_is_struck_out(status: int) -> None:
    for body in ({"error": {"message": f"Incorrect API key: {KEY[:10]}****"}}, f"<p>{KEY}</p>".encode()):
        with pytest.raises(SourceError) as caught:
            answer(body, status)
        assert KEY[:8] not in str(caught.value)
        assert "***" in str(caught.value)


@pytest.mark.parametrize(("path", "hinted"), [("/chat/completions", True), ("/v1/chat/completions", False)])
def test_a_404_hints_at_the_version_that_a_base_url_ends_in(path: str, hinted: bool) -> None:
    reply = HTTPReply(404, {}, b'{"detail": "Not Found"}')
    answer = CompletionAnswer("a", URL(f"http://host{path}"), "m", "base_url", reply, Redactor())
    with pytest.raises(SourceUnusable) as caught:
        answer.reply()
    assert ("ends in /v1" in str(caught.value)) is hinted


@pytest.mark.parametrize(
    ("body", "status", "headers", "hint"),
    [
        ({}, 401, {}, "check api_key or api_key_env"),
        (b"<html>Welcome</html>", 200, {"Content-Type": "Text/HTML; charset=utf-8"}, "(a web page; check base_url)"),
        (
            {"error": {"message": "no max_tokens", "code": "unsupported_parameter"}},
            400,
            {},
            "dialect: openai_reasoning",
        ),
    ],
)
def test_a_frequent_mistake_comes_with_its_remedy(body: Any, status: int, headers: dict[str, str], hint: str) -> None:
    with pytest.raises(QRewardError) as caught:
        answer(body, status, headers)
    assert hint in str(caught.value)
