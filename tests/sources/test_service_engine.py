"""The whole engine over scoring services: limits kept, faults survived, verdicts recorded."""

from __future__ import annotations

from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.testing import Faults, JudgeServer, Latency, ScoreCall, ServerLimits

pytestmark = pytest.mark.anyio


def samples(count: int) -> list[Sample]:
    return [
        Sample([{"role": "user", "content": f"{number} + 1?"}], f"It is {number + number % 2}.", str(number + 1))
        for number in range(count)
    ]


def right(call: Any) -> dict[str, object]:
    assert isinstance(call, ScoreCall)
    score = float(f" {call.blocks['reference']}." in call.blocks["response"])
    return {"score": score, "acc": bool(score), "length": len(call.response)}


def tree(servers: dict[str, JudgeServer], **limits: Any) -> dict[str, Any]:
    return {
        "sources": {
            name: {"kind": "http", "url": server.score_url, "limits": limits, "timeouts": {"total_s": 20}}
            for name, server in servers.items()
        },
        "judges": {"rm": {"kind": "function", "reward_range": [0, 1], "components": ["acc"]}},
        "engine": {"seed": 7, "deadline_s": 60},
    }


async def test_a_batch_is_scored_within_the_limits_of_two_services() -> None:
    limits = ServerLimits(requests_per_minute=600, concurrency=4, window_s=1.0)
    faults = Faults(rates={"error_500": 0.1, "score_nan": 0.02, "reset": 0.05})
    with (
        JudgeServer(right, limits=limits, faults=faults, latency=Latency(0.002), seed=1) as one,
        JudgeServer(right, limits=limits, latency=Latency(0.002), seed=2) as two,
    ):
        config = tree({"one": one, "two": two}, requests_per_minute=600, concurrency=4, window_s=1.0)
        async with RewardEngine(config) as engine:
            outcomes = await engine.score_all(samples(60))
        reports = [server.report() for server in (one, two)]
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert [outcome.reward for outcome in outcomes] == [float(number % 2) for number in range(60)]
    assert {tuple(outcome.verdict.components) for outcome in outcomes if isinstance(outcome, Scored)} == {("acc",)}
    assert [report.violations_total for report in reports] == [0, 0]
    assert all(report.answered for report in reports)
    assert reports[0].faults


async def test_tokens_of_what_is_sent_are_counted_before_it_is_sent() -> None:
    limits = ServerLimits(tokens_per_minute=15_000, window_s=0.2)
    with JudgeServer(right, limits=limits) as server:
        async with RewardEngine(tree({"rm": server}, tokens_per_minute=15_000, window_s=0.2)) as engine:
            outcomes = await engine.score_all(samples(20))
        report = server.report()
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert (report.violations_total, report.answered) == (0, 20)
    assert report.prompt_tokens > 60  # more than in one window


async def test_an_invalid_score_is_the_verdicts_failure_and_a_dead_service_none_of_it() -> None:
    with JudgeServer(lambda call: 7.0 if "5" in call.prompt else 1.0) as server:
        config = tree({"rm": server})
        del config["judges"]["rm"]["components"]
        async with RewardEngine(config) as engine:
            outcomes = await engine.score_all(samples(8))
    assert [getattr(outcome, "cause", None) for outcome in outcomes].count("verdict") == 1
    assert outcomes[5].reward is None
    dead = tree({"rm": server})
    dead["engine"] |= {"max_attempts": 2, "deadline_s": 2.0}
    async with RewardEngine(dead) as engine:
        (outcome,) = await engine.score_all(samples(1))
    assert (outcome.reward, outcome.cause) == (None, "infra")


async def test_the_journal_answers_for_the_same_service_and_for_no_other(tmp_path: Any) -> None:
    with JudgeServer(right) as one, JudgeServer(right) as two:

        async def requests(server: JudgeServer, **settings: Any) -> int:
            config = tree({"rm": server})
            config["sources"]["rm"] |= settings
            config["engine"]["journal"] = {"path": str(tmp_path / "verdicts.sqlite")}
            before = server.report().requests
            async with RewardEngine(config) as engine:
                assert all(isinstance(outcome, Scored) for outcome in await engine.score_all(samples(3)))
            return server.report().requests - before

        assert await requests(one) == 3
        assert await requests(one, weight=2, headers={"x-api-key": "k"}) == 0
        assert await requests(one, headers={"x-route": "b"}) == 3, "a header may choose another reward"
        assert await requests(two, version="rm", headers={"x-route": "b"}) == 3
        assert await requests(one, version="rm", headers={"X-Route": "b"}) == 0, "the version stands for the address"
        assert await requests(one, parameters={"x": 1}) == 3, "another task may be another reward"
        assert await requests(one, parameters={"x": 1}, weight=2) == 0
        assert await requests(two) == 3, "another address may be another reward model"
        assert await requests(one, body={"response": "response", "label": "ground_truth"}) == 3
        assert await requests(one, model="rm-7b") == 3
        assert await requests(two, model="rm-7b") == 0, "the same reward model at another address"
