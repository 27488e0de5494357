"""A scoring service over HTTP: what it is sent, and what is made of its answers."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import decimal
import json
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qreward_plugins.errors import (
    ConfigurationError,
    InvalidReply,
    PermanentError,
    QRewardError,
    SampleRefused,
    SourceUnusable,
    Throttled,
    TransientError,
)
from qreward_plugins.samples import Sample
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources import HTTPSource, Reply, Request

pytestmark = pytest.mark.anyio
PATIENCE_S = 10.0
TURN = {"role": "user", "content": "2 + 2?"}
SAMPLE = Sample(
    messages=[TURN],
    response="4",
    ground_truth="four",
    data_source="math",
    group_id="g",
    id="i",
    extras={"level": np.int64(3), "rubric": np.array(["a", None], dtype=object)},
)


def unheard() -> None:
    pass


async def failure(source: HTTPSource) -> QRewardError:
    with pytest.raises(QRewardError) as caught:
        await asyncio.wait_for(source.send(Request(SAMPLE), on_sent=unheard), PATIENCE_S)
    return caught.value


@pytest.fixture
def ask(serve: Any, open_service: Any) -> Callable[..., Any]:
    """Ask a service that answers with `answer` once; returns the reply or the error, and the request as it came."""

    async def asked(answer: Any, sample: Sample = SAMPLE, reply: Any = None, **settings: Any) -> Any:
        async def script(exchange: Any) -> None:
            exchange.reply(answer, **(reply or {}))

        async with serve(script) as server:
            source = open_service(server.score_url, **settings)
            try:
                outcome: Any = await asyncio.wait_for(source.send(Request(sample), on_sent=unheard), PATIENCE_S)
            except QRewardError as error:
                outcome = error
            await source.aclose()
        return outcome, server.exchanges[0]

    return asked


async def test_by_default_it_speaks_slimes_remote_reward_model(ask: Any, key: str) -> None:
    reply, exchange = await ask(0.5)
    assert reply == Reply(value=0.5)
    assert exchange.head.startswith("POST /score HTTP/1.1\r\n")
    assert exchange.headers["authorization"] == f"Bearer {key}"
    assert exchange.headers["content-type"] == "application/json"
    assert json.loads(exchange.body) == {"prompt": "2 + 2?", "response": "4", "label": "four"}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([TURN], "2 + 2?"),
        ([], ""),
        ([{"content": "x"}], "x"),
        ([{"role": "system", "content": "x"}], [{"role": "system", "content": "x"}]),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], None),
        ([{"role": "system", "content": "s"}, TURN], None),
        (np.array([TURN, TURN], dtype=object), [TURN, TURN]),
    ],
)
async def test_a_prompt_is_a_text_where_it_is_one(ask: Any, messages: Any, prompt: Any) -> None:
    _, exchange = await ask(0.5, Sample(messages, "4"))
    sent = json.loads(exchange.body)
    assert sent == {"prompt": messages if prompt is None else prompt, "response": "4", "label": None}


async def test_the_body_is_what_the_configuration_says(ask: Any) -> None:
    body = {
        "q": "prompt",
        "turns": "messages",
        "chat": "conversation",
        "a": "response",
        "truth": "ground_truth",
        "source": "data_source",
        "meta": "extras",
        "group": "group_id",
        "name": "id",
        "top": "response",
    }
    _, exchange = await ask(1.0, body=body, parameters={"model": "rm-7b", "top": 1})
    assert json.loads(exchange.body) == {
        "q": "2 + 2?",
        "turns": [TURN],
        "chat": [TURN, {"role": "assistant", "content": "4"}],
        "a": "4",
        "truth": "four",
        "source": "math",
        "meta": {"level": 3, "rubric": ["a", None]},
        "group": "g",
        "name": "i",
        "model": "rm-7b",
        "top": 1,
    }


async def test_half_a_surrogate_pair_is_replaced_wherever_it_stands(ask: Any) -> None:
    sample = Sample([TURN], "a\ud800", ground_truth=np.array(["\udfff"], dtype=object), extras={"x": ("\ud83d\ude00",)})
    _, exchange = await ask(1.0, sample, body={"r": "response", "g": "ground_truth", "e": "extras"})
    assert json.loads(exchange.body) == {"r": "a\ufffd", "g": ["\ufffd"], "e": {"x": ["\U0001f600"]}}


UNFAITHFUL = [
    object(),
    b"bytes",
    {1: object()},
    float("nan"),
    [1.0, float("-inf")],
    np.array([1.0, np.nan]),
    np.float32("inf"),
    2**64,
    {"a": -(2**63) - 1},
    {1, 2},
    {1: "a", "1": "b"},
    {"a": {("t",): 1}},
    1j,
    datetime.timedelta(1),
    decimal.Decimal("0.1"),
    dataclasses.make_dataclass("Point", ["x"])(1),
]


async def test_what_is_no_json_is_refused_and_not_sent(open_service: Any) -> None:
    source = open_service("http://127.0.0.1:9/score")
    for thing in UNFAITHFUL:
        with pytest.raises(SampleRefused, match="ground_truth"):
            await source.send(Request(Sample([], "x", ground_truth=thing)), on_sent=unheard)
    await source.aclose()


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("0.25", 0.25),
        (" 1\n", 1),
        (b"\xef\xbb\xbf2", 2),
        ("true", True),
        ("null", None),
        ('"0.5"', "0.5"),
        ("[0.5]", [0.5]),
        ('{"score": 0.5, "acc": 1}', {"score": 0.5, "acc": 1}),
        ('{"score": 0.5, "error": ""}', {"score": 0.5, "error": ""}),
        ('{"reward": 0.5, "error": null}', {"reward": 0.5, "error": None}),
        ('{"reward": 0.5, "error": 0.1}', {"reward": 0.5, "error": 0.1}),
    ],
)
async def test_the_whole_reply_is_the_value(ask: Any, answer: Any, value: Any) -> None:
    reply, _ = await ask(answer)
    assert reply.value == value
    assert type(reply.value) is type(value)
    assert reply.text == ""


async def test_a_reply_may_tell_its_usage_model_and_limits(ask: Any) -> None:
    answer = {"score": 1, "usage": {"prompt_tokens": 5, "completion_tokens": 0}, "model": "rm-7b"}
    headers = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59"}
    reply, _ = await ask(answer, reply={"headers": headers})
    assert (reply.usage, reply.model) == (Usage(5, 0), "rm-7b")
    assert reply.announced == {"requests_per_window": 60.0, "requests_remaining": 59.0}


@pytest.mark.parametrize(
    ("score_key", "value"),
    [
        ("score", 1),
        ("data.score", 0.5),
        ("data.scores.1", 7),
        ("data.scores.0.score", 6),
        ("data", {"score": 0.5, "scores": [{"score": 6}, 7]}),
        ("0", "zero"),
        ("nothing", None),
    ],
)
async def test_a_score_key_leads_to_the_value(ask: Any, score_key: str, value: Any) -> None:
    answer = {"score": 1, "data": {"score": 0.5, "scores": [{"score": 6}, 7]}, "0": "zero", "nothing": None}
    reply, _ = await ask(answer, score_key=score_key)
    assert reply.value == value


@pytest.mark.parametrize(
    "score_key", ["scores", "data.scoer", "data.scores.2", "data.scores.-1", "score.x", "data.scores.9999999999"]
)
async def test_a_score_that_is_not_there_is_an_invalid_verdict(ask: Any, score_key: str) -> None:
    error, _ = await ask({"score": 1, "data": {"scores": [1, 2]}}, score_key=score_key)
    assert type(error) is InvalidReply
    assert repr(score_key) in str(error)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("NaN", "holds NaN"),
        ('{"score": -Infinity}', "holds -Infinity"),
        ('{"score": 0.5, "aux": NaN}', "holds NaN"),
        ('{"score": 0.5, "score": 0.9}', "has a duplicate key"),
        ('{"data": {"score": 0.5, "score": 0.5}}', "has a duplicate key"),
    ],
)
async def test_what_python_would_let_pass_is_an_invalid_verdict(ask: Any, answer: str, says: str) -> None:
    error, _ = await ask(answer)
    assert type(error) is InvalidReply
    assert says in str(error)
    assert "'rm'" in str(error)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("", "an empty body"),
        ("  ", "an empty body"),
        ("0.5 0.7", "that is not JSON"),
        ("score: 0.5", "that is not JSON"),
        ('{"score": 0.', "that is not JSON"),
        (b'{"score": "\xff"}', "not UTF-8"),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("9" * 300_000, "larger than 200,000 bytes"),
        ({"error": "out of memory"}, "answered with an error (out of memory)"),
    ],
)
async def test_what_cannot_be_read_is_transient(ask: Any, answer: Any, says: str) -> None:
    error, _ = await ask(answer, max_reply_bytes=200_000)
    assert type(error) is TransientError
    assert says in str(error)
    assert len(str(error)) < 400
    assert error.__context__ is None


@pytest.mark.parametrize(
    ("answer", "score_key", "kind"),
    [
        ({"error": {"code": 429}}, None, Throttled),
        ({"error": {"code": "rate_limit_exceeded"}}, "data.score", Throttled),
        ({"error": {"code": 401}}, None, SourceUnusable),
        ({"error": {"code": "content_filter"}}, None, InvalidReply),
        ({"error": {"code": 400}, "score": 1}, "data.score", PermanentError),
        ({"error": "CUDA out of memory", "score": 0.0}, None, TransientError),
        ({"error": {"message": "boom", "code": 500}, "score": 0}, None, TransientError),
        ({"error": "docking timed out", "reward": 0.0}, "reward", TransientError),
        ({"data": {"error": "docking timed out", "score": 0.0}}, "data.score", TransientError),
        ({"data": {"error": "docking timed out", "score": 0.0}}, "data", TransientError),
    ],
)
async def test_an_error_in_a_200_is_one_also_beside_a_score(
    ask: Any, answer: Any, score_key: str | None, kind: type
) -> None:
    error, _ = await ask(answer, score_key=score_key)
    assert type(error) is kind


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        ("400 Bad", {}, PermanentError),
        ("401 No", {}, SourceUnusable),
        ("403 No", {}, SourceUnusable),
        ("404 No", {}, SourceUnusable),
        ("408 Late", {}, TransientError),
        ("422 Bad", {}, PermanentError),
        ("429 Slow", {"Retry-After": "3"}, Throttled),
        ("500 Oops", {}, TransientError),
        ("503 Busy", {"Retry-After": "3"}, Throttled),
        ("307 Go", {"Location": "http://other.example/score/"}, SourceUnusable),
    ],
)
async def test_statuses_mean_what_they_mean_everywhere(ask: Any, status: str, headers: Any, kind: type) -> None:
    error, _ = await ask({"score": 1.0}, reply={"status": status, "headers": headers})
    assert type(error) is kind
    assert error.status == int(status[:3])
    if isinstance(error, Throttled):
        assert error.retry_after_s == 3.0
    if "Location" in headers:
        assert "to http://other.example; redirects are not followed, change url" in str(error)


async def test_on_sent_is_called_as_the_request_is_written_and_cancelling_hangs_up(
    serve: Any, open_service: Any
) -> None:
    got, gone = asyncio.Event(), asyncio.Event()

    async def script(exchange: Any) -> None:
        got.set()
        await exchange.hung_up()
        gone.set()

    sent: list[int] = []
    async with serve(script) as server:
        source = open_service(server.score_url)
        task = asyncio.create_task(source.send(Request(SAMPLE), on_sent=lambda: sent.append(1)))
        await asyncio.wait_for(got.wait(), PATIENCE_S)
        assert sent == [1]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gone.wait(), PATIENCE_S)
        await source.aclose()
    assert sent == [1]


async def test_replicas_share_the_load_and_the_dead_are_avoided(serve: Any, open_service: Any) -> None:
    async def good(exchange: Any) -> None:
        exchange.reply(0.5)

    async def bad(exchange: Any) -> None:
        exchange.reply(b"{}", "500 Oops")

    async with serve(bad) as down:
        pass
    async with serve(good) as one, serve(good) as two, serve(bad) as broken:
        source = open_service(down.score_url, broken.score_url, one.score_url, two.score_url)
        outcomes: list[Any] = []
        for _ in range(8):
            try:
                outcomes.append((await source.send(Request(SAMPLE), on_sent=unheard)).value)
            except TransientError:
                outcomes.append("failed")
        assert outcomes == ["failed", "failed", *[0.5] * 6]
        assert [len(server.exchanges) for server in (broken, one, two)] == [1, 3, 3]
        await source.aclose()


async def test_no_secret_gets_into_any_text_of_an_error(serve: Any, open_service: Any, key: str) -> None:
    secret = "hdr-9876543210-zyxw"
    echo = json.dumps({"error": f"Bad key {key[:11]}...{key[-8:]} and {secret}"})
    scripts: list[Callable[[Any], None]] = [
        lambda e: e.reply(echo, "401 Unauthorized"),
        lambda e: e.reply(echo),
        lambda e: e.reply(f"{key} is not JSON, {secret} neither"),
        lambda e: e.reply(f'{{"{secret}": NaN}}'),
        lambda e: e.reply(b"", "302 Found", {"Location": f"http://{key}.example/{secret}"}),
        lambda e: e.reset(),
    ]

    async def script(exchange: Any) -> None:
        scripts[len(server.exchanges) - 1](exchange)

    async with serve(script) as server:
        source = open_service(server.score_url, headers={"X-Secret": secret})
        for _ in scripts:
            error = await failure(source)
            report = traceback.TracebackException.from_exception(error, capture_locals=True)
            shown = "".join([str(error), repr(error), repr(error.__dict__), repr(source), *report.format()])
            for hidden in (key, secret):
                assert hidden[:8] not in shown
                assert hidden[-8:] not in shown
        await source.aclose()


CONFIG: dict[str, Any] = {"kind": "http", "url": "https://h:8000/score"}


def test_the_name_of_what_answers_tells_apart_what_may_answer_otherwise() -> None:
    def model(**settings: Any) -> str:
        return HTTPSource("s", HTTPSource.Config(**{**CONFIG, **settings})).model

    assert model() == "h:8000/score"
    assert model(url=["http://a/", "http://b/"]) == "a/"
    assert model(model="rm-7b", api_key="k", headers={"x": "y"}, parameters={"key": "secret"}) == "rm-7b"
    default = {"label": "ground_truth", "response": "response", "prompt": "prompt"}
    assert model(body=default) == "h:8000/score"
    others = [model(score_key="a.b"), model(score_key="a.c"), model(body={"response": "response"}), model()]
    assert len(set(others)) == 4
    assert all(name.startswith("h:8000/score") for name in others)
    assert model(model="rm-7b", score_key="a.b").startswith("rm-7b#")


def test_a_source_is_shown_by_its_urls() -> None:
    config = HTTPSource.Config(**CONFIG, api_key="secret-key-1", verify_tls=False)
    source = HTTPSource("s", config)
    assert repr(source) == "HTTPSource('s', https://h:8000/score)"
    assert source._http._connecting.verify_tls is False
    assert "secret-key-1" not in repr(config) + str(config.model_dump())


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"api_key_env": "QREWARD_TEST_UNSET"}, "sources.s.api_key_env"),
        ({"headers": {"a b": "3"}}, 'sources.s.headers["a b"]'),
        ({"parameters": {"response": None}}, "sources.s.parameters.response"),
        ({"images": {"folder": "/nowhere/images"}}, "sources.s.images.folder"),
    ],
)
def test_mistakes_that_only_the_environment_shows(
    settings: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QREWARD_TEST_UNSET", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        HTTPSource("s", HTTPSource.Config(**{**CONFIG, **settings}))
    assert [mistake.path for mistake in caught.value.mistakes] == [path]


def test_the_size_of_a_request_is_that_of_what_is_sent() -> None:
    assert Request(Sample([TURN], "é4", ground_truth="four")).size == len("2 + 2?") + 3 + 4
    parts = [{"type": "text", "text": "abc"}, {"type": "image_url"}, "odd"]
    messages: Any = [{"role": "user", "content": parts}, {"role": "user"}, "odd"]
    assert Request(Sample(messages, "x\ud800", ground_truth=["y"])).size == 3 + 4
    assert Request(SAMPLE, messages=({"role": "user", "content": "abcd"},)).size == 4
