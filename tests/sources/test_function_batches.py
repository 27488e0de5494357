"""Functions that score several samples in one call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.errors import ConfigurationError, InvalidReply, QRewardError
from qreward_plugins.samples import Failed, Scored
from qreward_plugins.sources import FunctionSource, Request

pytestmark = pytest.mark.anyio

FUNCTIONS = """
import os, time

def fields(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    assert len(data_source) == len(solution_str) == len(ground_truth) == len(extra_info)
    return [scale * len(text) for text in solution_str]

def verl(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(data_sources) == len(solution_strs) == len(ground_truths) == len(extra_infos)
    return [float(len(text)) for text in solution_strs]

def samples(samples):
    return tuple(float(len(sample.response)) for sample in samples)

async def awaited(samples):
    return [float(len(sample.response)) for sample in samples]

def array(samples):
    import numpy
    return numpy.array([len(sample.response) for sample in samples], dtype="float32")

def too_few(samples):
    return [1.0] * (len(samples) - 1)

def one_number(samples):
    return 0.5

def count(samples):
    return [float(len(samples)) for _ in samples]

def bad(samples):
    texts = [sample.response for sample in samples]
    if "raise" in texts:
        raise ValueError("cannot score this")
    if "crash" in texts:
        os._exit(3)
    if "hang" in texts:
        time.sleep(600)
    return [float(len(text)) for text in texts]
"""


@pytest.fixture
def node(tmp_path: Path) -> Any:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)

    def made(name: str, **settings: Any) -> dict[str, Any]:
        batch = {"batch": {"max_size": 8}}
        return {"kind": "function", "function": f"{path}:{name}", "workers": 1, **batch, **settings}

    return made


async def called(node: dict[str, Any], responses: list[str]) -> Any:
    source = FunctionSource("f", FunctionSource.Config.model_validate(node))
    sent: list[bool] = []
    requests = [Request(Sample([], text, ground_truth="g", data_source="d")) for text in responses]
    try:
        return [reply.value for reply in await source.send_batch(requests, on_sent=lambda: sent.append(True))]
    except QRewardError as error:
        return error
    finally:
        await source.aclose()
        assert sent == [True]


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("fields", "fields"), ("verl", "fields"), ("samples", "sample"), ("awaited", "sample"), ("array", "sample")],
)
async def test_a_function_gets_lists_and_returns_a_value_for_each(node, name, arguments, mode):
    assert await called(node(name, arguments=arguments, mode=mode), ["a", "bb", "ccc"]) == [1.0, 2.0, 3.0]


async def test_a_single_request_is_a_list_too(node):
    source = FunctionSource("f", FunctionSource.Config.model_validate(node("samples", arguments="sample")))
    assert (await source.send(Request(Sample([], "abc")), on_sent=lambda: None)).value == 3.0
    await source.aclose()


async def test_further_arguments_are_no_lists(node):
    assert await called(node("fields", kwargs={"scale": 2.0}), ["a", "bb"]) == [2.0, 4.0]


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize(
    ("name", "said"),
    [("too_few", "returned 2 values for 3 samples"), ("one_number", "type float; with `batch` it must return a list")],
)
async def test_a_wrong_number_of_values_is_a_clear_error(node, name, said, mode):
    error = await called(node(name, arguments="sample", mode=mode), ["a", "bb", "ccc"])
    assert isinstance(error, InvalidReply)
    assert said in str(error)


def test_tokens_of_functions_are_not_counted(node):
    config = {"sources": {"f": node("samples", batch={"max_tokens": 100})}, "judges": {"j": {"kind": "function"}}}
    with pytest.raises(ConfigurationError) as caught:
        RewardEngine(config)
    assert [mistake.path for mistake in caught.value.mistakes] == ["sources.f.batch.max_tokens"]


async def test_the_question_of_the_journal_does_not_depend_on_the_batch(node):
    def opened(**settings: Any) -> FunctionSource:
        return FunctionSource("f", FunctionSource.Config.model_validate(node("samples", version="1", **settings)))

    sources = opened(), opened(batch=None)
    asked = Request(Sample([], "abc"))
    assert sources[0].question(asked) == sources[1].question(asked)
    for source in sources:
        await source.aclose()


async def scored(node: dict[str, Any], responses: list[str]) -> Any:
    config = {"sources": {"f": node}, "judges": {"j": {"kind": "function"}}}
    async with RewardEngine(config) as engine:
        samples = [Sample([{"role": "user", "content": "?"}], text) for text in responses]
        outcomes = await asyncio.wait_for(engine.score_all(samples), 60)
        return outcomes, engine.statistics().sources["f"]


async def test_a_stream_keeps_enough_samples_for_full_calls(node):
    config = {"sources": {"f": node("count", arguments="sample")}, "judges": {"j": {"kind": "function"}}}
    samples = (Sample([{"role": "user", "content": "?"}], f"text {n}") for n in range(64))
    async with RewardEngine(config) as engine:
        outcomes = [outcome async for _, outcome in engine.score_stream(samples)]
        counted = engine.statistics().sources["f"]
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert counted.batches < 20


async def test_an_engine_scores_a_batch_in_few_calls(node):
    outcomes, counted = await scored(node("count", arguments="sample"), [f"text {n}" for n in range(20)])
    assert sorted(outcome.verdict.score for outcome in outcomes) == [4.0] * 4 + [8.0] * 16
    assert (counted.batches, counted.batched) == (3, 20)


@pytest.mark.parametrize(("response", "reason"), [("raise", "raised"), ("crash", "crashed")])
async def test_one_bad_sample_costs_no_neighbour(node, response, reason):
    outcomes, _ = await scored(node("bad", arguments="sample"), ["a", "bb", response, "ccc", "dddd"])
    assert [outcome.verdict.score for outcome in outcomes if isinstance(outcome, Scored)] == [1.0, 2.0, 3.0, 4.0]
    assert isinstance(outcomes[2], Failed)
    assert outcomes[2].reason == reason


async def test_a_sample_that_hangs_costs_no_neighbour(node):
    settings = {"arguments": "sample", "timeouts": {"total_s": 2}, "workers": 2}
    outcomes, _ = await scored(node("bad", **settings), ["a", "bb", "hang", "ccc", "dddd"])
    assert [isinstance(outcome, Scored) for outcome in outcomes] == [True, True, False, True, True]
    assert outcomes[2].reason == "hung"
