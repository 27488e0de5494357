"""The parser of server-sent events, and the reader of streamed chat completions."""

from __future__ import annotations

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.sources.dialects.chat import CompletionStream
from qreward_plugins.sources.streams import Event, EventParser, StreamBroken


def events(data: bytes, cuts: list[int] | None = None, most_bytes: int = 10_000) -> list[Event]:
    parser = EventParser(most_bytes)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts or []), len(data)]
    return [event for start, end in pairwise(edges) for event in parser.feed(data[start:end])]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"data: a\n\n", [("", b"a")]),
        (b"data:a\r\n\r\ndata: b\r\r", [("", b"a"), ("", b"b")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("", b"a")]),
        (b": keep-alive\n\n: again\n\ndata: a\n\n", [("", b"a")]),
        (b"event: ping\n\nevent: x\ndata: a\nid: 7\nretry: 3\nother: b\n\n", [("x", b"a")]),
        (b"data: a\ndata\ndata:  b\n\n", [("", b"a\n\n b")]),
        (b"data: a\n\ndata: half", [("", b"a")]),
        (b"data: \xe2\x82\xac\n\n", [("", b"\xe2\x82\xac")]),
    ],
)
def test_events(data: bytes, expected: list[tuple[str, bytes]]) -> None:
    assert [(event.name, event.data) for event in events(data)] == expected


@given(
    st.lists(st.sampled_from([b"data: \xe2\x82\xac", b"event: x", b": c", b"", b"data: {}"]), max_size=12),
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=12, max_size=12),
    st.lists(st.integers(min_value=0, max_value=400), max_size=20),
)
def test_where_chunks_are_cut_changes_nothing(lines: list[bytes], ends: list[bytes], cuts: list[int]) -> None:
    data = b"".join(line + end for line, end in zip(lines, ends, strict=False)) + b"data: last\n\n"
    assert events(data, cuts) == events(data) == events(data, list(range(len(data))))


@pytest.mark.parametrize(
    "data", [b"data: " + b"x" * 50_000, b"data: x\n" * 50_000, b": " + b"x" * 50_000 + b"\n", b"x" * 20_000 + b"\n\n"]
)
@pytest.mark.parametrize("cuts", [[], list(range(0, 50_000, 512))])
def test_a_huge_event_is_refused(data: bytes, cuts: list[int]) -> None:
    with pytest.raises(StreamBroken, match="larger than 10,000 bytes"):
        events(data, cuts)


def chunk(content: object = None, finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {} if content is None else {"content": content}, "finish_reason": finish}
    return orjson.dumps({"model": "m", "choices": [choice], **more})


def read(*data: bytes) -> CompletionStream:
    reader = CompletionStream()
    for each in data:
        reader.read(Event("", each))
    return reader


def test_the_body_is_that_of_a_reply_without_streaming() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    reader = read(chunk("a"), chunk("b"), chunk(finish="stop"), orjson.dumps({"choices": [], "usage": usage}))
    assert (reader.text, reader.whole, reader.ended, reader.tokens) == ("ab", True, False, 2)
    reader.read(Event("", b"[DONE]"))
    assert reader.ended
    assert reader.body() == {
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}],
        "usage": usage,
    }


def test_thoughts_are_apart_from_the_answer() -> None:
    thought = orjson.dumps({"choices": [{"index": 0, "delta": {"reasoning_content": "hm" * 200}}]})
    reader = read(thought, thought, chunk("a", "stop"))
    assert (reader.text, reader.tokens) == ("a", 3)
    assert reader.body()["choices"][0]["message"]["reasoning_content"].startswith("hmhm")


def test_thoughts_among_the_parts_of_a_content_are_apart_from_the_answer() -> None:
    for part in ({"type": "thinking", "thinking": [{"type": "text", "text": "9"}]}, {"type": "reasoning", "text": "9"}):
        reader = read(chunk([part]), chunk([{"type": "text", "text": "a"}], "stop"))
        assert (reader.text, bool(reader.thoughts), reader.tokens) == ("a", True, 2)


def test_what_some_servers_write_in_the_place_of_null_is_read_as_null() -> None:
    usage = orjson.dumps({"choices": None, "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
    unnumbered = orjson.dumps({"choices": [{"index": None, "delta": {"content": "b"}, "finish_reason": ""}]})
    reader = read(chunk("a", ""), unnumbered, chunk(finish="stop"), usage)
    assert (reader.text, reader.whole, reader.body()["choices"][0]["finish_reason"]) == ("ab", True, "stop")


@pytest.mark.parametrize(
    "data", [b'{"error": {"message": "no", "code": 500}}', b'{"choices": [{"index": 0, "error": {"message": "no"}}]}']
)
def test_an_error_in_the_middle_is_the_body(data: bytes) -> None:
    reader = read(chunk("a"), data)
    assert reader.ended
    assert reader.body()["error"]["message"] == "no"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([b"{"], "not a JSON object"),
        ([b"[]"], "not a JSON object"),
        ([b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}'], "not a JSON object"),
        ([b'{"choices": {}}'], "more than one choice"),
        ([b'{"choices": [{}, {}]}'], "more than one choice"),
        ([b'{"choices": [7]}'], "wrong type"),
        ([b'{"choices": [{"index": 1, "delta": {"content": "x"}}]}'], "a second choice"),
        ([b'{"choices": [{"index": 0, "delta": 7}]}'], "delta of the wrong type"),
        ([chunk(7)], "content is not text"),
        ([chunk("a", "stop"), chunk("b")], "text after the finish_reason"),
    ],
)
def test_lies_are_refused(data: list[bytes], said: str) -> None:
    with pytest.raises(StreamBroken, match=said):
        read(*data)
