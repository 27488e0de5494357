"""The start of an engine: a reward model that gives every text the same numbers ends it with the likely cause."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.cli.probe import probe
from qreward_plugins.engine.trial import PAIRS
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.samples import Failed, Scored

pytestmark = pytest.mark.anyio
SAMPLE = Sample([{"role": "user", "content": "?"}], "four")


def scripted(logits: Callable[[str], Any], heard: list[str]) -> Any:
    async def script(exchange: Any) -> None:
        heard.append(json.loads(exchange.body)["messages"][-1]["content"])
        said = logits(heard[-1])
        if isinstance(said, int):
            exchange.reply("{}", status=f"{said} Error")
        else:
            exchange.reply(json.dumps({"data": [{"probs": said}]}))

    return script


def configured(server: Any, **top: Any) -> dict[str, Any]:
    url = server.base_url.removesuffix("/v1")
    source = {"kind": "reward_model", "base_url": url, "model": "m", "limits": {"concurrency": 1}}
    return {"sources": {"rm": source}, "judges": {"j": {"kind": "reward_model", "label": 0}}, **top}


async def test_different_numbers_start_after_two_questions(serve):
    heard: list[str] = []
    async with (
        serve(scripted(lambda text: [float(len(text))], heard)) as server,
        RewardEngine(configured(server)) as engine,
    ):
        outcomes = await engine.score_all([SAMPLE] * 3)
        assert [outcome.reward for outcome in outcomes] == [4.0] * 3
        assert isinstance(await engine.score(SAMPLE), Scored)
        assert (engine.statistics().submitted, engine.statistics().sources["rm"].requests) == (4, 6)
        assert engine.last_batch() is not None
    assert heard == [PAIRS[0].bad, PAIRS[0].good, *["four"] * 4]


@pytest.mark.parametrize(
    ("logits", "cause"),
    [
        ([1.0], "a softmax over one logit is 1 for every text"),
        ([0.0], "the server seems to apply an activation"),
        ([0.25, -3.0], "cut every text to the same few tokens"),
    ],
)
async def test_equal_numbers_end_the_start(serve, logits, cause):
    heard: list[str] = []
    async with serve(scripted(lambda _: logits, heard)) as server, RewardEngine(configured(server)) as engine:
        for ask in (engine.score(SAMPLE), engine.score_all([SAMPLE] * 3), engine.score(SAMPLE)):
            with pytest.raises(ConfigurationError) as caught:
                await ask
            (mistake,) = caught.value.mistakes
            assert mistake.path == "sources.rm"
            assert cause in str(mistake)
            assert "right answers and nonsense the same numbers" in str(mistake)
    assert "four" not in heard
    assert len(heard) == 2 * len(PAIRS)


async def test_numbers_that_differ_in_one_pair_only_are_enough(serve):
    heard: list[str] = []
    async with (
        serve(scripted(lambda text: [float(text == PAIRS[1].bad)], heard)) as server,
        RewardEngine(configured(server)) as engine,
    ):
        assert (await engine.score(SAMPLE)).reward == 0.0


async def test_a_source_that_does_not_answer_is_not_tested(serve):
    heard: list[str] = []
    async with (
        serve(scripted(lambda text: [4.0] if text == "four" else 400, heard)) as server,
        RewardEngine(configured(server)) as engine,
    ):
        assert (await engine.score(SAMPLE)).reward == 4.0


async def test_the_start_does_not_outlast_the_deadline(serve):
    async def script(exchange: Any) -> None:
        await exchange.hung_up()

    async with serve(script) as server, RewardEngine(configured(server)) as engine:
        outcome = await engine.score(SAMPLE, deadline_s=0.05)
        assert isinstance(outcome, Failed)
        assert outcome.reason == "deadline"


async def test_sources_that_a_caller_gives_are_not_asked(serve):
    heard: list[str] = []
    async with serve(scripted(lambda _: [1.0], heard)) as server:
        config = configured(server)
        source = RewardEngine(config).upstreams["rm"].source
        async with RewardEngine(config, sources={"rm": source}) as engine:
            assert (await engine.score(SAMPLE)).reward == 1.0
    assert heard == ["four"]


async def test_many_callers_share_one_start(serve):

    heard: list[str] = []
    async with (
        serve(scripted(lambda text: [float(len(text))], heard)) as server,
        RewardEngine(configured(server)) as engine,
    ):
        waiting = [asyncio.ensure_future(engine.score(SAMPLE)) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        outcomes = await asyncio.gather(*waiting[1:])
        assert [outcome.reward for outcome in outcomes] == [4.0] * 4
    assert heard == [PAIRS[0].bad, PAIRS[0].good, *["four"] * 4]


async def test_check_names_the_same_cause(serve):
    async with serve(scripted(lambda _: [1.0], [])) as server, RewardEngine(configured(server)) as engine:
        (result,) = await probe(engine)
    assert result.trial is not None
    assert result.trial.problem.startswith("it gives right answers and nonsense the same reward, 1: a softmax over one")
