"""Judges over sources that stream."""

from __future__ import annotations

import json
import math

import pytest

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.testing import FaultKind, Faults, JudgeServer

from ..kit import make_config, make_sample


@pytest.fixture
def tree():
    def make(server, **source):
        config = make_config({"a": server})
        config["sources"]["a"].update({"stream": True, **source})
        return config

    return make


@pytest.mark.anyio
async def test_verdicts_are_those_without_a_stream(tree):
    with JudgeServer() as server:
        async with RewardEngine(tree(server)) as engine:
            streamed = await engine.score_all([make_sample(n) for n in range(20)])
            source = engine.statistics().sources["a"]
        async with RewardEngine(make_config({"a": server})) as engine:
            plain = await engine.score_all([make_sample(n) for n in range(20)])
            assert math.isnan(engine.statistics().sources["a"].first_token_p50_s)
    assert [outcome.reward for outcome in streamed] == [outcome.reward for outcome in plain]
    assert 0 < source.first_token_p50_s <= source.latency_p95_s
    assert [outcome.verdict.spent.usage for outcome in streamed] == [outcome.verdict.spent.usage for outcome in plain]


@pytest.mark.anyio
async def test_what_is_no_verdict_alone_is_read_to_its_end(tree):
    def drafting(call):
        draft, verdict = ({"id": call.nonce, "rationale": "r", "score": score} for score in (10, 0))
        return f"A draft: {json.dumps(draft)}. But no: {json.dumps(verdict)}"

    with JudgeServer(drafting) as server:
        async with RewardEngine(tree(server)) as engine:
            outcome = await engine.score(make_sample(1))
    assert (outcome.cause.value, outcome.reason) == ("infra", "invalid") or not isinstance(outcome, Scored)


@pytest.mark.anyio
async def test_broken_streams_cost_tries_and_no_sample(tree):
    broken = [str(kind) for kind in FaultKind if kind.stage == "stream"]
    faults = Faults(script=broken, huge_bytes=3_000_000, drip_interval_s=0.0)
    with JudgeServer(faults=faults) as server:
        config = tree(server, timeouts={"idle_s": 0.3, "total_s": 20}, max_reply_bytes=100_000)
        async with RewardEngine(config) as engine:
            outcomes = await engine.score_all([make_sample(n) for n in range(60)])
        assert set(server.report().faults) == set(broken)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
