"""A scoring service over HTTP: what it is sent, one sample or several, and what is made of its answers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from qreward_plugins.errors import InvalidReply, PermanentError, SampleRefused, Throttled, TransientError
from qreward_plugins.samples import Sample
from qreward_plugins.sources import Request
from qreward_plugins.sources.service import HTTPSource

from ..kit import each_of
from .wire import KEY, outcome_of, serving

pytestmark = pytest.mark.anyio
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


async def ask(answer, *samples, **settings):
    """Send samples as one request to a service that answers with `answer`, which may be a function of the body. Return
    the outcome, and the request as it came.
    """

    def script(exchange):
        exchange.reply(answer(exchange.json) if callable(answer) else answer)

    async with serving(script) as server:
        node = {"kind": "http", "url": server.score_url, "api_key": KEY, **settings}
        source = HTTPSource("rm", HTTPSource.Config.model_validate(node))
        requests = [Request(sample) for sample in samples or [SAMPLE]]
        outcome = await outcome_of(source, requests if len(requests) > 1 else requests[0])
        await source.aclose()
    return outcome, server.exchanges[0]


@each_of(
    ("messages", "prompt"),
    [
        ([TURN], "2 + 2?"),
        ([], ""),
        ([{"role": "system", "content": "x"}], [{"role": "system", "content": "x"}]),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], None),
        (np.array([TURN, TURN], dtype=object), [TURN, TURN]),
    ],
)
async def test_a_prompt_is_a_text_where_it_is_one(messages, prompt):
    _, exchange = await ask(0.5, Sample(messages, "4"))
    assert exchange.json == {"prompt": messages if prompt is None else prompt, "response": "4", "label": None}


async def test_the_body_is_what_the_configuration_says():
    fields = {
        "prompt": "2 + 2?",
        "messages": [TURN],
        "conversation": [TURN, {"role": "assistant", "content": "4"}],
        "response": "4",
        "ground_truth": "four",
        "data_source": "math",
        "extras": {"level": 3, "rubric": ["a", None]},
        "group_id": "g",
        "id": "i",
    }
    _, exchange = await ask(1.0, body={f"my {name}": name for name in fields}, parameters={"model": "rm-7b"})
    assert exchange.json == {**{f"my {name}": value for name, value in fields.items()}, "model": "rm-7b"}


@each_of("thing", [np.array([1.0, np.nan]), {1, 2}, {1: "a", "1": "b"}, dataclasses.make_dataclass("Point", ["x"])(1)])
async def test_what_is_no_json_is_refused_and_not_sent(thing):
    source = HTTPSource("rm", HTTPSource.Config(kind="http", url="http://127.0.0.1:9/score"))
    outcome = await outcome_of(source, Request(Sample([], "x", ground_truth=thing)))
    await source.aclose()
    assert isinstance(outcome, SampleRefused)
    assert "ground_truth" in str(outcome)


# Answers


@each_of(
    ("answer", "value"),
    [
        ("0.25", 0.25),
        (" 1\n", 1),
        (b"\xef\xbb\xbf2", 2),
        ("null", None),
        ('"0.5"', "0.5"),
        ('{"score": 0.5, "acc": 1}', {"score": 0.5, "acc": 1}),
        ('{"score": 0.5, "error": ""}', {"score": 0.5, "error": ""}),
        ('{"reward": 0.5, "error": null}', {"reward": 0.5, "error": None}),
    ],
)
async def test_the_whole_reply_is_the_value(answer, value):
    reply, _ = await ask(answer)
    assert (reply.value, type(reply.value), reply.text) == (value, type(value), "")


@each_of(
    ("score_key", "value"),
    [
        ("score", 1),
        ("data.score", 0.5),
        ("data.scores.0.score", 6),
        ("0", "zero"),
        ("nothing", None),
        *((key, InvalidReply) for key in ("scores", "data.scoer", "data.scores.2", "data.scores.-1", "score.x")),
    ],
)
async def test_a_score_key_leads_to_the_value(score_key, value):
    answer = {"score": 1, "data": {"score": 0.5, "scores": [{"score": 6}, 7]}, "0": "zero", "nothing": None}
    outcome, _ = await ask(answer, score_key=score_key)
    if value is InvalidReply:
        assert type(outcome) is InvalidReply
        assert repr(score_key) in str(outcome)
    else:
        assert outcome.value == value


@each_of(
    ("answer", "kind", "says"),
    [
        # What Python would let pass is an answer to this sample, which another try would not change.
        ("NaN", InvalidReply, "holds NaN"),
        ('{"score": 0.5, "aux": NaN}', InvalidReply, "holds NaN"),
        ('{"score": 0.5, "score": 0.9}', InvalidReply, "has a duplicate key"),
        ('{"data": [{"score": 0.5, "score": 0.5}]}', InvalidReply, "has a duplicate key"),
        # What cannot be read may be better next time.
        ("", TransientError, "an empty body"),
        ("0.5 0.7", TransientError, "that is not JSON"),
        ('{"score": 0.', TransientError, "that is not JSON"),
        (b'{"score": "\xff"}', TransientError, "not UTF-8"),
        ("[" * 101 + "]" * 101, TransientError, "nested more than 100 deep"),
        ("9" * 300_000, TransientError, "larger than 200,000 bytes"),
    ],
)
async def test_what_is_no_value(answer, kind, says):
    error, _ = await ask(answer, max_reply_bytes=200_000)
    assert type(error) is kind
    assert says in str(error)
    assert len(str(error)) < 400
    assert error.__context__ is None


@each_of(
    ("answer", "score_key", "kind"),
    [
        ({"error": "out of memory"}, None, TransientError),
        ({"error": {"code": 429}}, None, Throttled),
        ({"error": {"code": "rate_limit_exceeded"}}, "data.score", Throttled),
        ({"error": {"code": 400}, "score": 1}, "data.score", PermanentError),
        ({"error": "CUDA out of memory", "score": 0.0}, None, TransientError),
        ({"data": {"error": "docking timed out", "score": 0.0}}, "data.score", TransientError),
    ],
)
async def test_an_error_in_a_200_is_one_also_beside_a_score(answer, score_key, kind):
    error, _ = await ask(answer, score_key=score_key)
    assert type(error) is kind


# Several samples in one request


def lengths(body):
    return [float(len(text)) for text in body["response"]]


async def ask_batch(answer, *responses, **settings):
    """Send several samples as one request. Return the results or the error, and the body."""
    samples = [Sample([{"role": "user", "content": "?"}], text) for text in responses]
    outcome, exchange = await ask(answer, *samples, batch={"max_size": 8}, **settings)
    return outcome, exchange.json


async def test_every_key_of_the_body_holds_a_list():
    results, body = await ask_batch(lengths, "a", "bb", parameters={"mode": "strict"})
    assert body == {"prompt": ["?", "?"], "response": ["a", "bb"], "label": [None, None], "mode": "strict"}
    assert [result.value for result in results] == [1.0, 2.0]
    result, body = await ask_batch(lengths, "abc")
    assert (body["response"], result.value) == (["abc"], 3.0)


async def test_results_by_path():
    def answer(body):
        found = [{"score": {"value": value}} for value in lengths(body)]
        return {"data": {"results": found}, "usage": {"prompt_tokens": 9, "completion_tokens": 0}}

    settings = {"results_key": "data.results", "score_key": "score.value"}
    results, _ = await ask_batch(answer, "a", "bb", "ccc", **settings)
    assert [result.value for result in results] == [1.0, 2.0, 3.0]
    assert sum(result.usage.prompt_tokens for result in results) == 9


@each_of(
    ("answer", "settings"),
    [
        (lambda body: lengths(body)[1:], {}),
        (lambda body: [*lengths(body), 1.0], {}),
        (lambda body: 0.5, {}),
        (lambda body: lengths(body), {"results_key": "scores"}),
    ],
)
async def test_results_that_cannot_be_matched_are_an_invalid_reply(answer, settings):
    error, _ = await ask_batch(answer, "a", "bb", "ccc", **settings)
    assert isinstance(error, InvalidReply)
    assert "each is asked again alone" in str(error)


async def test_a_result_without_a_value_is_the_invalid_reply_of_one():
    said = [{"score": 1.0}, {"error": ""}, {"score": 3.0}]
    results, _ = await ask_batch(lambda body: said, "a", "bb", "ccc", score_key="score")
    assert isinstance(results[1], InvalidReply)
    assert [results[0].value, results[2].value] == [1.0, 3.0]


def test_a_named_model_stands_for_the_address():
    def question(host, **settings):
        node = {"kind": "http", "url": f"http://{host}/score", **settings}
        return HTTPSource("rm", HTTPSource.Config.model_validate(node)).question(Request(Sample([TURN], "4")))

    assert question("a", model="rm-7b") == question("b", model="rm-7b")
    assert question("a", headers={"X-Route": "b"}) == question("a", headers={"x-route": "b"}) != question("a")
