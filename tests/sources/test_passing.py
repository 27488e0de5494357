"""The hand-on of streams: events stay whole and unchanged, in whatever pieces they come.

What a client sees of it is in `server/test_passing.py`.
"""

from __future__ import annotations

import random

import pytest

from qreward_plugins.secrets import Redactor
from qreward_plugins.sources.passed_requests import Receiver
from qreward_plugins.sources.stream_passing import StreamPassing
from qreward_plugins.sources.streams import StreamBroken

from ..kit import each_of

CHAT = ['data: {"choices":[{"delta":{"role":"assistant","content":""}}]}', ": comment", "event: ping\ndata: {}"]
CHAT += ['data: {"choices":[{"delta":{"content":"é中\\ud800"}}]}', 'data: {"choices":[{"finish_reason":"stop"}]}']
CHAT += ['data: {"usage":{"prompt_tokens":3,"completion_tokens":2},"model":"m"}', "data: [DONE]"]


class Client(Receiver):
    """Gets a stream: `begun` has the number of pieces before its head."""

    def __init__(self):
        self.begun: list[int] = []
        self.pieces: list[str] = []

    def begin(self, head):
        self.begun.append(len(self.pieces))


def passing(*secrets):
    client = Client()
    found = StreamPassing(client, client.pieces.append, Redactor(secrets))
    found.begin(200, {}, 1000)
    return found, client.begun, client.pieces


def fed(stream, data, sizes):
    at = 0
    while at < len(data):
        size = next(sizes)
        stream.take(data[at : at + size])
        at += size
    stream.finish()


@each_of("end", ["\n\n", "\r\n\r\n", "\r\r", "\n\r\n"])
def test_bytes_are_kept_however_they_come(end):
    data = b"\xef\xbb\xbf: \xff\xfe" + end.encode() + end.join(CHAT).encode() + end.encode()
    rng = random.Random(1)
    for most in (1, 2, 7, 40, 1000):
        stream, begun, pieces = passing()
        fed(stream, data, iter(lambda most=most: rng.randint(1, most), 0))  # type: ignore[misc]
        assert "".join(pieces).encode("utf-8", "surrogateescape") == data
        assert begun == [0]
        body = stream.body()
        assert (body["model"], body["usage"]) == ("m", {"prompt_tokens": 3, "completion_tokens": 2})


@each_of("rest", [b"data: junk\n\n", b"data: junk", b'data: {"error": "late"}\n\n', b"x" * 9999])
def test_what_follows_the_end_is_ignored(rest):
    stream, _, pieces = passing()
    events = b"".join(event.encode() + b"\n\n" for event in CHAT)
    stream.take(events + rest)
    stream.finish()
    assert (stream.ended, "".join(pieces).encode()) == (True, events)


FIRST = '{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}'
SECOND = '{"choices":[{"index":1,"delta":{"content":"a"}%s}]}'
CANDIDATE = '{"candidates":[{"index":%d,"content":{}%s}]}'


@each_of(
    ("events", "whole"),
    [
        (['{"choices":[{"delta":{"content":"a"}}]}'], False),
        (['{"choices":[{"delta":{"tool_calls":[{}]},"finish_reason":"tool_calls"}]}'], True),
        # A stream of several answers is whole when each of them is.
        ([SECOND % "", FIRST], False),
        ([SECOND % "", FIRST, SECOND % ',"finish_reason":"stop"'], True),
        (['{"type":"message_start","message":{"usage":{"input_tokens":1}}}'], False),
        (['{"type":"content_block_delta","delta":{"text":"a"}}'], False),
        (['{"type":"content_block_delta"}', '{"type":"message_stop"}'], True),
        (['{"type":"response.created"}', '{"type":"response.output_text.delta"}'], False),
        (['{"type":"response.incomplete","response":{"usage":{"input_tokens":1}}}'], True),
        (['{"candidates":[{"content":{}}]}'], False),
        ([CANDIDATE % (1, ""), CANDIDATE % (0, ',"finishReason":"STOP"')], False),
        (['{"candidates":[{"content":{},"finishReason":"STOP"}]}'], True),
        (['{"promptFeedback":{"blockReason":"SAFETY"}}'], True),
    ],
)
def test_a_stream_is_whole_only_if_its_server_says_so(events, whole):
    stream, _, pieces = passing()
    for event in events:
        stream.take(f"data: {event}\n\n".encode())
    if whole:
        stream.finish()
        assert pieces
    else:
        with pytest.raises(StreamBroken, match="ended before the answer was whole"):
            stream.finish()


def test_secrets_and_sizes():
    stream, _, pieces = passing("sk-0123456789abcdef")
    stream.take(b'data: {"choices":[{"delta":{"content":"my sk-0123456789abcdef"}}]}\n\n')
    assert "my ***" in pieces[0]
    with pytest.raises(StreamBroken, match="an event larger than 1,000 bytes"):
        stream.take(b"data: " + b"x" * 1000)
    said, _, _ = passing("pin-42")  # too short to be redacted in a text, where it may be a word
    with pytest.raises(StreamBroken, match=r"\*\*\* is\\nwrong"):
        said.take(b'data: {"error": {"message": "pin-42 is\\nwrong"}}\n\n')
    held, _, _ = passing()
    with pytest.raises(StreamBroken, match="larger than"):
        held.take(b": keep alive, nothing else\n\n" * 100)
