"""The readers of streams of messages, responses and Gemini: thoughts, early ends, lies, and unknown events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from multidict import CIMultiDict
from yarl import URL

from qreward_plugins.errors import TransientError
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources import OpenAISource, Reply
from qreward_plugins.sources.dialects import DIALECTS
from qreward_plugins.sources.http_reading import HTTPReply
from qreward_plugins.sources.streams import Event, StreamBroken, StreamReader

Data = Mapping[str, Any]


def read(dialect: str, *events: Data) -> StreamReader:
    reader = DIALECTS[dialect].stream()
    for event in events:
        reader.read(Event(str(event.get("type", "")), orjson.dumps(event)))
    return reader


def reply_of(dialect: str, body: Data) -> Reply:
    node = {"kind": "openai", "base_url": "http://judge.invalid/v1", "model": "m", "dialect": dialect}
    source = OpenAISource("a", OpenAISource.Config.model_validate(node))
    http = HTTPReply(200, CIMultiDict({"Content-Type": "text/event-stream"}), orjson.dumps(body))
    return source.answer(URL("http://judge.invalid/v1"), http).reply()


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


THOUGHTS: dict[str, list[Data]] = {
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
        # Some gateways leave the output out of the last event.
        finished(output=[]),
    ],
    "gemini": [
        chunk({"text": "hm", "thought": True}),
        chunk({"text": "fi"}),
        chunk({"text": "ne"}, {"thoughtSignature": "x"}),
        chunk(finish="STOP"),
    ],
}


@pytest.mark.parametrize("dialect", THOUGHTS)
def test_thoughts_are_apart_from_the_answer(dialect: str) -> None:
    reader = read(dialect, *THOUGHTS[dialect])
    assert (reader.text, reader.thoughts, reader.whole) == ("fine", "hm", True)
    assert reader.ended is (dialect != "gemini")
    assert reader.tokens == (4 if dialect == "responses" else 3)
    reply = reply_of(dialect, reader.body())
    assert (reply.text, reply.thinking, reply.finish_reason) == ("fine", "hm", "stop")
    assert reply.usage == Usage(100, 7)
    assert reply.model


def test_the_input_of_the_tool_is_read_as_it_was_written() -> None:
    call = [
        *block(1, type="tool_use", id="t", name="verdict", input={}),
        delta(1, "input_json_delta", partial_json='{"score": '),
        delta(1, "input_json_delta", partial_json='7, "score": 8}'),
    ]
    call_alone = [{**event, "index": 0} for event in call[:2]]
    reader = read("anthropic", STARTED, *TEXT, closed(0), *call, closed(1), stopped("tool_use"))
    assert reply_of("anthropic", reader.body()).text == 'fine\n{"score": 7, "score": 8}\n'
    half = read("anthropic", STARTED, *call_alone, stopped("max_tokens"))
    reply = reply_of("anthropic", half.body())
    assert (reply.text, reply.finish_reason) == ('\n{"score": ', "length")


ERRORS: list[tuple[str, Data]] = [
    ("anthropic", {"type": "error", "error": {"type": "overloaded_error", "message": "oops"}}),
    ("responses", {"type": "error", "code": "server_error", "message": "oops", "sequence_number": 1}),
    ("responses", finished("failed", error={"code": "server_error", "message": "oops"}, output=[])),
    ("gemini", {"error": {"code": 503, "message": "oops", "status": "UNAVAILABLE"}}),
]


@pytest.mark.parametrize(("dialect", "event"), ERRORS)
def test_an_error_in_the_middle_is_the_reply(dialect: str, event: Data) -> None:
    half = THOUGHTS[dialect][:4] if dialect != "gemini" else THOUGHTS[dialect][:2]
    reader = read(dialect, *half, event)
    assert reader.ended
    assert "error" in reader.body()
    with pytest.raises(TransientError, match="oops"):
        reply_of(dialect, reader.body())


def test_a_refusal_of_a_prompt_is_whole() -> None:
    reader = read("gemini", {"promptFeedback": {"blockReason": "SAFETY"}})
    assert reader.whole
    assert reader.body()["promptFeedback"] == {"blockReason": "SAFETY"}


LIES: list[tuple[str, list[Data], str]] = [
    ("anthropic", [STARTED, delta(0, "text_delta", text="x")], "not open"),
    ("anthropic", [STARTED, *TEXT, delta(1, "text_delta", text="x")], "not open"),
    ("anthropic", [STARTED, *TEXT, closed(0), delta(0, "text_delta", text="x")], "not open"),
    ("anthropic", [STARTED, *TEXT, *block(1, type="text", text="")], "out of order"),
    ("anthropic", [STARTED, *TEXT, closed(0), *block(0, type="text", text="")], "out of order"),
    ("anthropic", [STARTED, *TEXT, stopped(), delta(0, "text_delta", text="x")], "after the stop_reason"),
    ("anthropic", [STARTED, *TEXT, closed(0), stopped(), *block(1, type="text")], "after the stop_reason"),
    ("anthropic", [STARTED, *TEXT, delta(0, "thinking_delta", thinking="x")], "of another type"),
    ("anthropic", [STARTED, *TEXT, delta(0, "text_delta", text=7)], "text is not text"),
    ("anthropic", [{"type": "message_start", "message": 7}], "message is not an object"),
    ("responses", [CREATED, item(0), piece("x", 1)], "has not begun"),
    ("responses", [CREATED, item(0), piece("x"), item(1), piece("x", 0)], "has not begun"),
    (
        "responses",
        [CREATED, item(0), piece("x"), {"type": "response.output_text.done", "output_index": 0}, piece("x")],
        "after its end",
    ),
    ("responses", [CREATED, item(0), {**piece("x"), "delta": 7}], "delta is not text"),
    ("responses", [{"type": "response.completed", "response": []}], "response is not an object"),
    ("gemini", [chunk({"text": "x"}, finish="STOP"), chunk({"text": "y"})], "text after the finishReason"),
    ("gemini", [{"candidates": [{}, {}]}], "more than one candidate"),
    ("gemini", [{"candidates": {}, "x": 1}, {"candidates": {"a": 1}}], "more than one candidate"),
    ("gemini", [{"candidates": [{"index": 1}]}], "second candidate"),
    ("gemini", [{"candidates": [7]}], "wrong type"),
    ("gemini", [{"candidates": [{"content": {"parts": [7]}}]}], "wrong type"),
    ("gemini", [{"candidates": [{"content": 7}]}], "content is not an object"),
]


@pytest.mark.parametrize(("dialect", "events", "said"), LIES)
def test_lies_are_refused(dialect: str, events: list[Data], said: str) -> None:
    with pytest.raises(StreamBroken, match=said):
        read(dialect, *events)


@pytest.mark.parametrize("dialect", THOUGHTS)
def test_done_ends_a_stream_and_makes_no_answer_whole(dialect: str) -> None:
    reader = read(dialect, *THOUGHTS[dialect][:2])
    reader.read(Event("", b"[DONE]"))
    assert (reader.ended, reader.whole) == (True, False)


@pytest.mark.parametrize(("name", "quiet"), [("ping", True), ("keepalive", True), ("", False), ("message_stop", False)])
def test_pings_only_keep_the_connection_alive(name: str, quiet: bool) -> None:
    assert Event(name, b"{}").keeps_alive is quiet
