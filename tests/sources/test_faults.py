"""Every fault that the judge server knows, met by each kind of source over real connections, with both clients; and
streams that are handed on stay whole and unchanged, in whatever pieces they come.
"""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from typing import Any

import pytest

from qreward_plugins.config import Config
from qreward_plugins.errors import InvalidReply, PermanentError, SourceUnusable, Throttled, TransientError
from qreward_plugins.judges import FunctionJudge, Opening
from qreward_plugins.samples import Sample, Verdict
from qreward_plugins.secrets import Redactor
from qreward_plugins.sources import Reply, Request
from qreward_plugins.sources.passed_requests import Receiver, StreamPassing
from qreward_plugins.sources.reward_model import RewardModelSource
from qreward_plugins.sources.streams import StreamBroken
from qreward_plugins.testing import FaultKind, JudgeServer

from ..kit import each_of
from .wire import KEY, NextFault, asked, completion, outcome_of, request_of, serving

pytestmark = pytest.mark.anyio
OPENING = Opening(Config(), (), b"", {}.__getitem__)


def stage(*names):
    return {kind.value for kind in FaultKind if kind.stage in names}


KINDS = [kind for kind in FaultKind if kind is not FaultKind.HANG]
SHARED: dict[type, set[str]] = {
    PermanentError: {"error_400", "error_413", "error_422"},
    SourceUnusable: {"error_401", "error_403", "error_404", "redirect", "redirect_loop"},
    Throttled: {kind.value for kind in FaultKind if kind.value.startswith("error_429")} | {"error_503_seconds"},
}
WHOLE = {"close_after", "wrong_model", "slow_headers", "slow_body"} | stage("stream")
"""Faults that leave the reply whole. One that is not streamed has no faults of streams."""
CLOSING = ("close_after", "slow_headers", "slow_body", "short_length")
"""The next request may still be written into the connection that is going away; it is not sent twice unseen."""
PAUSES_S = {"error_429_huge": 300.0, "error_429_negative": None, "error_429": None}
DIALECTS = ("openai", "responses", "anthropic", "gemini")
EACH_DIALECT = pytest.mark.parametrize(
    ("client", "dialect"), [*(("aiohttp", dialect) for dialect in DIALECTS), ("httpx", "openai")], indirect=["client"]
)
"""The clients differ below the dialects, so the second one is shown with one of these."""


def expected(kind, classes):
    """The class of an outcome; what no table names is a transient error."""
    found = [outcome for outcome, names in {**SHARED, **classes}.items() if kind.value in names]
    return found[0] if found else TransientError


async def meet(source, kind, request, classes):
    """Ask while a fault is played, and again. Return both outcomes."""
    sent: list[int] = []
    outcome = await outcome_of(source, request, lambda: sent.append(1))
    first = outcome[0] if isinstance(outcome, list) else outcome
    assert type(first) is expected(kind, classes), (kind, outcome)
    assert sent == [1], kind
    assert KEY not in str(first)
    if isinstance(first, Throttled):
        pause_s = first.retry_after_s
        assert pause_s == PAUSES_S[kind.value] if kind.value in PAUSES_S else 0 < (pause_s or 0) <= 300, kind
    if kind.value in CLOSING:
        await outcome_of(source, request)
    return outcome, await outcome_of(source, request)


@EACH_DIALECT
async def test_every_fault_of_a_judge_has_its_class(dialect, open_source):
    next_fault = NextFault()
    # Withheld answers have no text in Anthropic's messages: both kinds are one stop_reason.
    refused = {"refusal"} | ({"content_filter"} if dialect == "anthropic" else set())
    # What is left of the "verdict" stage is a proper reply; its text is the judge's to refuse.
    classes = {InvalidReply: refused, Reply: WHOLE | stage("list", "verdict") - {"null_content"}}
    with JudgeServer(lambda call: 0.5, faults=next_fault.faults, api_key=KEY) as server:
        source = open_source(server.base_url, dialect=dialect)
        for kind in next_fault.each(KINDS):
            _, after = await meet(source, kind, request_of(), classes)
            assert after.text, kind
        await source.aclose()


@pytest.mark.parametrize(
    ("client", "answer", "settings"),
    [
        ("aiohttp", 0.25, {}),
        ("aiohttp", {"data": {"score": 0.25}, "took_s": 3}, {"score_key": "data.score"}),
        ("httpx", 0.25, {}),
    ],
    ids=["number", "nested", "httpx"],
    indirect=["client"],
)
async def test_every_fault_of_a_service_has_its_class(answer, settings, open_service):
    judge = FunctionJudge("j", FunctionJudge.Config(kind="function", reward_range=(0, 1)), OPENING)
    request, next_fault = judge.request(Sample([{"role": "user", "content": "q"}], "r"), attempt=0), NextFault()
    # JSON that stops in the middle, a sentence, and two values are no JSON: that is the server's trouble.
    invalid = {"no_choices", "wrong_json_type"} | stage("verdict") - {"cut_off", "prose", "two_verdicts"}
    classes = {InvalidReply: invalid, Verdict: WHOLE | stage("list")}

    class Judged:
        async def send(self, asked, *, on_sent):
            return judge.verdict(asked, await source.send(asked, on_sent=on_sent))

    with JudgeServer(lambda call: answer, faults=next_fault.faults, api_key=KEY) as server:
        source = open_service(server.score_url, **settings)
        for kind in next_fault.each(KINDS):
            outcome, after = await meet(Judged(), kind, request, classes)
            scores = [each.score for each in (outcome, after) if isinstance(each, Verdict)]
            assert scores == [0.25] * (1 + isinstance(outcome, Verdict)), kind
        await source.aclose()


# Reward models, with one text and with several in a request

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PROTOCOLS = ("vllm_classify", "vllm_score", "sglang_classify", "tei_predict", "openrlhf")
OF_ONE_RESULT = stage("verdict") - {"two_verdicts", "forged_verdict", "wrong_nonce", "duplicate_keys"}
"""Faults of one result, which cost no other."""


def length(call):
    return float(len(call.response.rpartition("assistant: ")[2].strip()))


@pytest.fixture
def node(tmp_path, client):
    """The configuration of a reward model at a judge server."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))

    def made(server, protocol="vllm_classify", **settings):
        own = {} if protocol == "vllm_score" else {"chat_template": str(tmp_path)}
        common = {"kind": "reward_model", "model": "judge", "batch": {"max_size": 8}, "api_key": KEY, "client": client}
        return {**common, "base_url": server.root_url, "protocol": protocol, **own, **settings}

    return made


def requests_of(size):
    turn = {"role": "user", "content": "2 + 2?"}
    texts = ["a" * (n + 1) for n in range(size)]
    return [Request(Sample([], text), messages=(turn, {"role": "assistant", "content": text})) for text in texts]


@pytest.mark.parametrize("client", ["aiohttp"], indirect=True)
@pytest.mark.parametrize(("protocol", "size"), [("vllm_classify", 1), *((protocol, 3) for protocol in PROTOCOLS)])
async def test_every_fault_of_a_reward_model_has_its_class(protocol, size, node):
    # The protocols differ in their results only, so the faults below these are played with one of them.
    kinds = [kind for kind in KINDS if protocol == "vllm_classify" or kind.stage == "list"]
    # A single result needs no index, and a server that states none keeps the order.
    unnumbered = {"results_unnumbered", "results_misnumbered"}
    numbers = size > 1 and protocol.startswith("vllm")
    invalid = {"results_too_few", "results_too_many", "no_choices", "wrong_json_type"} | OF_ONE_RESULT
    classes = {
        InvalidReply: invalid | (unnumbered if numbers else set()),
        Reply: WHOLE | {"results_shuffled"} | unnumbered | (stage("verdict") - OF_ONE_RESULT),
    }
    requests, scores, next_fault = requests_of(size), [float(n + 1) for n in range(size)], NextFault()
    with JudgeServer(length, faults=next_fault.faults, api_key=KEY) as server:
        source = RewardModelSource("rm", RewardModelSource.Config.model_validate(node(server, protocol)))
        for kind in next_fault.each(kinds):
            request: Any = requests if size > 1 else requests[0]
            outcome, after = await meet(source, kind, request, classes)
            good = outcome if isinstance(outcome, list) else [outcome] if isinstance(outcome, Reply) else []
            good = good[1:] if kind.value in OF_ONE_RESULT else good
            assert [next(iter(each.value.values())) for each in good] == scores[size - len(good) :], kind
            after = after if isinstance(after, list) else [after]
            assert [next(iter(each.value.values())) for each in after] == scores, kind
        await source.aclose()


# Streams

TEXT = json.dumps({"rationale": "fine " * 40, "score": 5})
LONG = {"max_tokens": 400}


@EACH_DIALECT
async def test_every_fault_of_a_stream_has_its_class(dialect, open_source):
    next_fault = NextFault()
    with JudgeServer(lambda call: TEXT, faults=next_fault.faults) as server:
        open_one = partial(open_source, server.base_url, stream=True, dialect=dialect, max_reply_bytes=50_000)
        hasty, patient = open_one(timeouts={"idle_s": 0.5}), open_one(timeouts={"idle_s": 30.0})
        for kind in next_fault.each(kind for kind in FaultKind if kind.stage == "stream"):
            silent = kind.value in ("stream_silent", "stream_comments")
            source = hasty if silent else patient
            outcome = await outcome_of(source, request_of(**LONG))
            if kind.value in ("stream_no_done", "stream_odd", "stream_drip"):
                assert isinstance(outcome, Reply), (kind, outcome)
                assert json.loads(outcome.text)["score"] == 5
            else:
                assert type(outcome) is TransientError, (kind, outcome)
            assert ("no event within 0.5 s" in str(outcome)) == silent
            # The next one is read well, over whatever connection.
            assert silent or isinstance(await outcome_of(source, request_of(**LONG)), Reply), kind
        assert isinstance(await outcome_of(hasty, request_of(**LONG)), Reply)
        await hasty.aclose()
        await patient.aclose()


async def test_a_server_that_ignores_the_wish_is_read_as_it_answers(open_source):
    async with serving(completion()) as server:
        [reply] = await asked(open_source(server.base_url, stream=True))
    assert server.exchanges[0].json["stream"] is True
    assert (reply.text, reply.first_token_s) == ("fine", None)


async def test_a_stream_that_was_read_to_its_end_keeps_its_connection(open_source):
    async def script(exchange):
        chunk = {"choices": [{"index": 0, "delta": {"content": "fine"}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
        exchange.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        exchange.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
        await asyncio.sleep(0.01)
        exchange.write(b"0\r\n\r\n")

    async with serving(script) as server:
        replies = await asked(open_source(server.base_url, stream=True), *[request_of() for _ in range(4)])
    assert ([reply.text for reply in replies], server.connections) == (["fine"] * 4, 1)


# The hand-on of streams; what a client sees of it is in `server/test_passing.py`


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


@each_of("end", ["\n\n", "\r\n\r\n", "\r\r", "\n\r\n"])
def test_bytes_are_kept_however_they_come(end):
    data = b"\xef\xbb\xbf: \xff\xfe" + end.encode() + end.join(CHAT).encode() + end.encode()
    rng = random.Random(1)
    for most in (1, 2, 7, 40, 1000):
        (stream, begun, pieces), left = passing(), data
        while left:
            size = rng.randint(1, most)
            stream.take(left[:size])
            left = left[size:]
        stream.finish()
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
