"""Completions that hold no answer: it is the provider's trouble, which another try may mend, and never a verdict."""

from __future__ import annotations

import json
from typing import Any

import pytest
from yarl import URL

from qreward_plugins.errors import TransientError
from qreward_plugins.secrets import Redactor
from qreward_plugins.sources.dialects.chat import CompletionAnswer
from qreward_plugins.sources.http_reading import HTTPReply


def answer(message: dict[str, Any], finish_reason: Any = "stop") -> CompletionAnswer:
    body = {"choices": [{"message": message, "finish_reason": finish_reason}]}
    http = HTTPReply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())
    return CompletionAnswer("judge", URL("http://judge.example/v1"), "model", "base_url", http, Redactor())


@pytest.mark.parametrize(
    ("message", "finish_reason", "says"),
    [
        ({"content": None}, "stop", "a content of null"),
        ({"content": None}, None, "a content of null"),
        ({}, "stop", "a content of null"),
        ({"content": None, "reasoning_content": "Let me see."}, "stop", "reasoning and no answer"),
        ({"content": "", "reasoning": "Let me see."}, "stop", "reasoning and no answer"),
        ({"content": " \n", "reasoning_content": "Let me see."}, "stop", "reasoning and no answer"),
        ({"content": '{"score": 7}'}, "error", "broke off"),
        ({"content": "half"}, "abort", "broke off"),
    ],
)
def test_a_reply_without_an_answer_is_tried_again(message: dict[str, Any], finish_reason: Any, says: str) -> None:
    with pytest.raises(TransientError, match=says):
        answer(message, finish_reason).reply()


def test_a_reply_that_ended_in_its_thoughts_is_for_the_judge_to_refuse() -> None:
    # As an error of the source, a question that makes a model think for long would open the circuit for all others.
    reply = answer({"content": None, "reasoning_content": "Let me see."}, "length").reply()
    assert (reply.text, reply.thinking, reply.finish_reason) == ("", "Let me see.", "length")


@pytest.mark.parametrize(
    "message", [{"content": "7"}, {"content": ""}, {"content": "7", "reasoning_content": "Let me see."}]
)
def test_what_a_model_wrote_is_for_the_judge_to_read(message: dict[str, Any]) -> None:
    assert answer(message).reply().text == message["content"]


@pytest.mark.parametrize("kind", ["thinking", "reasoning", "reasoning_text", "Thought"])
def test_thoughts_among_the_parts_of_a_content_are_no_answer(kind: str) -> None:
    draft = {"type": kind, "text": '{"score": 9}'}
    reply = answer({"content": [draft, {"type": "text", "text": "7"}]}).reply()
    assert (reply.text, bool(reply.thinking)) == ("7", True)
    with pytest.raises(TransientError, match="reasoning and no answer"):
        answer({"content": [draft]}).reply()
