"""The part of a request that siblings share."""

from __future__ import annotations

from typing import Any

import pytest

from qreward_plugins.samples import Sample
from qreward_plugins.sources.base import Request
from qreward_plugins.sources.passed_requests import PassedRequest
from qreward_plugins.sources.routing import Prefix, shared_prefix

LONG = "a response of some length"


def request(*texts: Any, nonce: str = "", response: str = LONG) -> Request:
    messages = tuple({"role": "user", "content": text} for text in texts)
    return Request(Sample([{"role": "user", "content": "What?"}], response), messages, nonce=nonce)


def test_what_comes_before_the_nonce_is_shared() -> None:
    one = shared_prefix(request("system", "Judge. Question. <n1> 4 </n1> rules", nonce="n1"))
    two = shared_prefix(request("system", "Judge. Question. <n2> 5 and more </n2> rules", nonce="n2"))
    assert one == two is not None
    assert shared_prefix(request("system", "Judge. Questions. <n2> 5 </n2>", nonce="n2")) != one
    assert shared_prefix(request("other", "Judge. Question. <n2> 5 </n2>", nonce="n2")) != one


def test_without_a_nonce_what_comes_before_the_response_is_shared() -> None:
    one = shared_prefix(request(f"Judge this: {LONG}"))
    assert one == shared_prefix(request(f"Judge this: {LONG[::-1]}, please", response=LONG[::-1]))


def test_without_a_response_in_it_the_beginning_is_shared() -> None:
    head = "x" * 4096
    assert (
        shared_prefix(request(head + "one"))
        == shared_prefix(request(head + "two"))
        == Prefix(
            shared_prefix(request(head)).key,  # type: ignore[union-attr]
            1024,
        )
    )
    assert shared_prefix(request(head + "one"), 2048) != shared_prefix(request(head + "two"), 2048)


def test_the_first_tokens_decide() -> None:
    texts = [f"abcdefgh {question} <n>" for question in ("one", "two")]
    one, two = (request(text, nonce="<n>") for text in texts)
    assert shared_prefix(one, 2) == shared_prefix(two, 2) != shared_prefix(one, 3)
    assert shared_prefix(one, 3) != shared_prefix(two, 3)


def test_a_service_shares_the_question() -> None:
    def of(question: Any, response: str) -> Prefix | None:
        return shared_prefix(Request(Sample([{"role": "user", "content": question}], response)))

    assert of("What?", "4") == of("What?", "5") == Prefix(of("What?", "").key, 2)  # type: ignore[union-attr]
    assert of("Why?", "4") != of("What?", "4")
    assert of("", "4") is of(None, "4") is of(7, "4") is None


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"input": "Hello", "instructions": ["no text"]},
        {"contents": [{"parts": [{"text": "Hello"}]}], "messages": 7},
    ],
)
def test_the_beginning_of_a_clients_own_request_is_shared(body: dict[str, Any]) -> None:
    found = shared_prefix(Request(Sample([], ""), passed=PassedRequest(body)))
    assert found == shared_prefix(request("Hello"))
    long = {"messages": [{"role": "user", "content": 8192 * "x"}]}
    assert shared_prefix(Request(Sample([], ""), passed=PassedRequest(long))) == shared_prefix(request(4096 * "x"))


def test_parts_and_strange_contents_are_read() -> None:
    parts = [{"type": "text", "text": "Judge. "}, {"type": "image_url", "image_url": {"url": "http://x"}}, "n1", 7]
    assert shared_prefix(request(parts, nonce="n1")) == shared_prefix(request("Judge. ", "n1", nonce="n1"))
    assert shared_prefix(request("\ud800 é", nonce="n")) is not None


def test_it_is_the_same_in_every_process() -> None:
    assert shared_prefix(request("Judge. n1", nonce="n1")) == Prefix(5069825471389650243, 2)


@pytest.mark.parametrize("response", [None, 7, b"bytes", ["a"]])
def test_a_broken_response_is_no_error(response: Any) -> None:
    assert shared_prefix(request("Judge.", response=response)) == shared_prefix(request("Judge."))
