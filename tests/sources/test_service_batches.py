"""Scoring services that are asked for several samples in one request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.errors import ConfigurationError, InvalidReply, QRewardError
from qreward_plugins.samples import Failed, Scored
from qreward_plugins.sources import HTTPSource, Request

pytestmark = pytest.mark.anyio


@pytest.fixture
def ask(serve: Any) -> Any:
    """Send several requests as one; returns the results or the error, and the body."""

    async def asked(answer: Any, responses: list[str], **settings: Any) -> Any:
        async def script(exchange: Any) -> None:
            exchange.reply(json.dumps(answer(json.loads(exchange.body))))

        async with serve(script) as server:
            config = {"kind": "http", "url": server.base_url + "/score", "batch": {"max_size": 8}, **settings}
            source = HTTPSource("s", HTTPSource.Config.model_validate(config))
            requests = [Request(Sample([{"role": "user", "content": "?"}], text)) for text in responses]
            try:
                if len(requests) == 1:
                    outcome: Any = [await source.send(requests[0], on_sent=lambda: None)]
                else:
                    outcome = await source.send_batch(requests, on_sent=lambda: None)
            except QRewardError as error:
                outcome = error
            await source.aclose()
        return outcome, json.loads(server.exchanges[0].body)

    return asked


def lengths(body: Any) -> list[float]:
    return [float(len(text)) for text in body["response"]]


async def test_every_key_of_the_body_holds_a_list(ask):
    results, body = await ask(lengths, ["a", "bb"], parameters={"mode": "strict"})
    assert body == {"prompt": ["?", "?"], "response": ["a", "bb"], "label": [None, None], "mode": "strict"}
    assert [result.value for result in results] == [1.0, 2.0]


async def test_a_single_sample_is_a_list_too(ask):
    results, body = await ask(lengths, ["abc"])
    assert body["response"] == ["abc"]
    assert results[0].value == 3.0


async def test_results_by_path_and_index(ask):
    def answer(body: Any) -> Any:
        found = [{"at": {"n": n}, "score": {"value": value}} for n, value in enumerate(lengths(body))]
        return {"data": {"results": found[::-1]}, "usage": {"prompt_tokens": 9, "completion_tokens": 0}}

    settings = {"results_key": "data.results", "index_key": "at.n", "score_key": "score.value"}
    results, _ = await ask(answer, ["a", "bb", "ccc"], **settings)
    assert [result.value for result in results] == [1.0, 2.0, 3.0]
    assert sum(result.usage.prompt_tokens for result in results) == 9


@pytest.mark.parametrize(
    ("answer", "settings"),
    [
        (lambda body: lengths(body)[1:], {}),
        (lambda body: [*lengths(body), 1.0], {}),
        (lambda body: 0.5, {}),
        (lambda body: {"scores": lengths(body)}, {}),
        (lambda body: lengths(body), {"results_key": "scores"}),
        (lambda body: [{"score": 1.0} for _ in lengths(body)], {"index_key": "n"}),
        (lambda body: [{"n": 0, "score": 1.0} for _ in lengths(body)], {"index_key": "n"}),
    ],
)
async def test_results_that_cannot_be_matched_are_an_invalid_reply(ask, answer, settings):
    error, _ = await ask(answer, ["a", "bb", "ccc"], **settings)
    assert isinstance(error, InvalidReply)
    assert "each is asked again alone" in str(error)


async def test_a_result_without_a_value_is_the_invalid_reply_of_one(ask):
    results, _ = await ask(
        lambda body: [{"score": 1.0}, {"error": ""}, {"score": 3.0}], ["a", "bb", "ccc"], score_key="score"
    )
    assert isinstance(results[1], InvalidReply)
    assert [results[0].value, results[2].value] == [1.0, 3.0]


@pytest.mark.parametrize("key", ["results_key", "index_key"])
def test_keys_for_lists_need_a_batch(key):
    source = {"kind": "http", "url": "http://s:1/score", key: "results"}
    with pytest.raises(ConfigurationError) as caught:
        RewardEngine({"sources": {"s": source}, "judges": {"j": {"kind": "function"}}})
    assert [mistake.path for mistake in caught.value.mistakes] == [f"sources.s.{key}"]


async def test_an_engine_scores_around_a_sample_that_the_service_refuses(serve):
    async def script(exchange: Any) -> None:
        body = json.loads(exchange.body)
        if "bad" in body["response"]:
            exchange.reply("{}", status="422 Unprocessable Entity")
        else:
            exchange.reply(json.dumps(lengths(body)))

    async with serve(script) as server:
        source = {"kind": "http", "url": server.base_url + "/score", "batch": {"max_size": 16}}
        config = {"sources": {"s": source}, "judges": {"j": {"kind": "function"}}}
        async with RewardEngine(config) as engine:
            texts = ["x" * n for n in range(4, 12)] + ["bad"]
            samples = [Sample([{"role": "user", "content": "?"}], text) for text in texts]
            outcomes = await asyncio.wait_for(engine.score_all(samples), 20)
    assert [outcome.verdict.score for outcome in outcomes[:-1] if isinstance(outcome, Scored)] == list(range(4, 12))
    assert isinstance(outcomes[-1], Failed)
