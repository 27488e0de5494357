"""The hand-on of streams: events stay whole and unchanged, in whatever pieces they come."""

from __future__ import annotations

import json
import random
import time

import pytest

from qreward_plugins.errors import TransientError
from qreward_plugins.samples import Sample
from qreward_plugins.secrets import Redactor
from qreward_plugins.sources import Request
from qreward_plugins.sources.passed_requests import PassedRequest
from qreward_plugins.sources.stream_passing import StreamPassing, progress_of
from qreward_plugins.sources.streams import StreamBroken

ENDS = ["\n\n", "\r\n\r\n", "\r\r", "\n\r\n"]
CHAT = ['data: {"choices":[{"delta":{"role":"assistant","content":""}}]}', ": comment", "event: ping\ndata: {}"]
CHAT += ['data: {"choices":[{"delta":{"content":"é中\\ud800"}}]}', 'data: {"choices":[{"finish_reason":"stop"}]}']
CHAT += ['data: {"usage":{"prompt_tokens":3,"completion_tokens":2},"model":"m"}', "data: [DONE]"]


def passing(dialect="openai", **options):
    begun, pieces = [], []
    found = StreamPassing(
        progress_of(dialect),
        on_begin=lambda status, headers: begun.append(len(pieces)),
        on_piece=pieces.append,
        **options,
    )
    found.begin(200, {}, 1000)
    return found, begun, pieces


def fed(stream, data, sizes):
    at = 0
    while at < len(data):
        size = next(sizes)
        stream.take(data[at : at + size])
        at += size
    stream.finish()


@pytest.mark.parametrize("end", ENDS)
def test_bytes_are_kept_however_they_come(end):
    data = b"\xef\xbb\xbf" + end.join(CHAT).encode() + end.encode()
    rng = random.Random(1)
    for most in (1, 2, 7, 40, 1000):
        stream, begun, pieces = passing()
        fed(stream, data, iter(lambda most=most: rng.randint(1, most), 0))
        assert "".join(pieces).encode("utf-8", "surrogateescape") == data
        assert begun == [0]
        assert stream.facts() == {"model": "m", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def test_nothing_is_handed_on_before_the_answer():
    stream, begun, pieces = passing()
    for event in CHAT[:3]:
        stream.take(event.encode() + b"\n\n")
    assert (begun, pieces) == ([], [])
    stream.take(CHAT[3].encode() + b"\n")
    assert pieces == []
    stream.take(b"\n")
    assert "".join(pieces) == "".join(f"{event}\n\n" for event in CHAT[:4])


def test_bytes_that_are_no_text_stay_as_they_are():
    stream, _, pieces = passing()
    data = b': \xff\xfe\n\ndata: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
    fed(stream, data, iter([len(data)]))
    assert "".join(pieces).encode("utf-8", "surrogateescape") == data


@pytest.mark.parametrize(
    ("dialect", "events", "whole"),
    [
        ("openai", ['data: {"choices":[{"delta":{"content":"a"}}]}'], False),
        ("openai", ['data: {"choices":[{"delta":{"tool_calls":[{}]},"finish_reason":"tool_calls"}]}'], True),
        ("anthropic", ['data: {"type":"message_start","message":{"usage":{"input_tokens":1}}}'], False),
        ("anthropic", ['data: {"type":"content_block_delta","delta":{"text":"a"}}'], False),
        ("anthropic", ['data: {"type":"content_block_delta"}', 'data: {"type":"message_stop"}'], True),
        ("responses", ['data: {"type":"response.created"}', 'data: {"type":"response.output_text.delta"}'], False),
        ("responses", ['data: {"type":"response.incomplete","response":{"usage":{"input_tokens":1}}}'], True),
        ("gemini", ['data: {"candidates":[{"content":{}}]}'], False),
        ("gemini", ['data: {"candidates":[{"content":{},"finishReason":"STOP"}]}'], True),
        ("gemini", ['data: {"promptFeedback":{"blockReason":"SAFETY"}}'], True),
    ],
)
def test_a_stream_is_whole_only_if_its_server_says_so(dialect, events, whole):
    stream, _, pieces = passing(dialect)
    for event in events:
        stream.take(event.encode() + b"\n\n")
    if whole:
        stream.finish()
        assert pieces
    else:
        with pytest.raises(StreamBroken, match="ended before the answer was whole"):
            stream.finish()


@pytest.mark.parametrize(
    ("dialect", "event"),
    [
        ("openai", b'data: {"error":{"message":"overloaded"}}\n\n'),
        ("anthropic", b'event: error\ndata: {"type":"error","error":{"message":"overloaded"}}\n\n'),
        ("responses", b'data: {"type":"response.failed","response":{"error":{"message":"overloaded"}}}\n\n'),
        ("gemini", b'data: {"error":{"message":"overloaded"}}\n\n'),
    ],
)
def test_an_error_first_is_not_handed_on(dialect, event):
    stream, begun, pieces = passing(dialect)
    with pytest.raises(StreamBroken, match=r"an error instead of an answer \(overloaded\)"):
        stream.take(event)
    assert (begun, pieces) == ([], [])


def test_secrets_and_sizes():
    stream, _, pieces = passing(clean=Redactor(["sk-0123456789abcdef"]).clean)
    stream.take(b'data: {"choices":[{"delta":{"content":"my sk-0123456789abcdef"}}]}\n\n')
    assert "my ***" in pieces[0]
    with pytest.raises(StreamBroken, match="an event larger than 1,000 bytes"):
        stream.take(b"data: " + b"x" * 1000)
    held, _, _ = passing()
    with pytest.raises(StreamBroken, match="larger than"):
        held.take(b": keep alive, nothing else\n\n" * 100)


@pytest.mark.parametrize(
    ("dialect", "event"),
    [
        ("openai", {"choices": [{"index": 0, "delta": {"content": "a"}}]}),
        ("gemini", {"candidates": [{"index": 0, "content": {}}]}),
    ],
)
def test_a_stream_of_several_answers_is_whole_when_each_of_them_is(dialect, event):
    [(key, [part])] = event.items()
    finish = {"openai": "finish_reason", "gemini": "finishReason"}[dialect]
    stream, _, _ = passing(dialect)
    for index, end in ((0, None), (1, None), (0, "stop")):
        stream.take(b"data: " + json.dumps({key: [{**part, "index": index, finish: end}]}).encode() + b"\n\n")
    with pytest.raises(StreamBroken, match="before the answer was whole"):
        stream.finish()
    stream.take(b"data: " + json.dumps({key: [{**part, "index": 1, finish: "stop"}]}).encode() + b"\n\n")
    stream.finish()


@pytest.mark.parametrize("rest", [b"data: junk\n\n", b"data: junk", b'data: {"error": "late"}\n\n', b"x" * 9999])
def test_what_follows_the_end_is_ignored(rest):
    stream, _, pieces = passing()
    events = b"".join(event.encode() + b"\n\n" for event in CHAT)
    stream.take(events + rest)
    assert stream.ended
    stream.finish()
    assert "".join(pieces).encode() == events


def test_a_large_event_in_small_pieces_is_searched_once():
    stream, _, pieces = passing()
    stream.begin(200, {}, 2**20)
    began = time.process_time()
    stream.take(b'data: {"choices":[{"finish_reason":"stop","x":"')
    for _ in range(5000):
        stream.take(b"x" * 100)
    # Searching all of it for each piece would take 20 s.
    assert time.process_time() - began < 2
    stream.take(b'"}]}\n\n')
    assert len(pieces) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("begun", [False, True])
async def test_what_a_server_says_in_a_stream_is_one_line_without_secrets(serve, open_source, begun):
    secret = "pin-42"  # too short to be redacted in a text, where it may be a word
    long = "x" * 190 + " sk-0123456789abcdef"

    async def script(exchange):
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        if begun:
            exchange.write(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        error = {"error": {"message": f"{secret} is\nwrong: {long}"}}
        exchange.write(b"data: " + json.dumps(error).encode() + b"\n\n")
        await exchange.writer.drain()
        exchange.writer.close()

    async with serve(script) as server:
        source = open_source(server.base_url, api_key=secret, headers={"X-Key": "sk-0123456789abcdef"})
        passed = PassedRequest({"model": "m", "messages": [], "stream": True}, stream=True)
        request = Request(Sample([], ""), passed=passed, on_text=lambda piece: None)
        with pytest.raises(TransientError) as error:
            await source.send(request, on_sent=lambda: None)
        await source.aclose()
    said = str(error.value)
    assert "*** is\\nwrong: xxx" in said
    assert not any(part in said for part in (secret, "sk-", "\n"))
