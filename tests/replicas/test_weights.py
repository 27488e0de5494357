"""Weights that are updated while replicas serve, and replicas that sleep: stand-ins for vLLM, in an engine.

A stand-in names in each reply all weights that took part in it, so that a mixed reply is seen.
"""

from __future__ import annotations

import asyncio

import pytest
from pools import comes

from qreward_plugins import RewardEngine, Sample

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("qreward_plugins.replicas.pool._BACKOFF_S", (0.05, 0.1))


def tree(stand_ins, *options, engine=None, **more):
    own = {
        "kind": "replicas",
        "server": "vllm",
        "program": stand_ins.program(*options),
        "model": str(stand_ins.weights("first")),
        "platform": "cpu",
        "data_parallel": 2,
        "start_within_s": 30.0,
        "weight_updates": "in_place",
        **more,
    }
    judge = {"kind": "llm", "score_range": [0, 10], "max_tokens": 64}
    return {"sources": {"own": own}, "judges": {"quality": judge}, "engine": {"seed": 7, **(engine or {})}}


def samples(count, **more):
    return [Sample([{"role": "user", "content": "Why?"}], f"Because of {n}.", id=str(n), **more) for n in range(count)]


def said(outcomes):
    assert [outcome.describe() for outcome in outcomes if outcome.reward is None] == []
    return [outcome.verdict.rationale for outcome in outcomes]


def states(engine):
    return [state.state for state in engine.upstreams["own"].source.replicas]


async def under_load(engine, change, count=40):
    """Change something while samples are scored, before and after; return what they said and what the change gave."""
    running, outcomes = True, []

    async def load():
        number = 0
        while running or number < count:
            number += 1
            outcomes.extend(await engine.score_all(samples(8, step=number), deadline_s=30))

    loads = [asyncio.ensure_future(load()) for _ in range(2)]
    await comes(lambda: len(outcomes) >= 16)
    try:
        result = await change
    finally:
        running, count = False, 0
        await asyncio.gather(*loads)
    return outcomes, result


@pytest.mark.parametrize("mode", ["rolling", "together"])
async def test_weights_are_updated_in_place_under_load(stand_ins, mode):
    async with RewardEngine(tree(stand_ins, "delay=0.01")) as engine:
        update = engine.update_weights("own", path=stand_ins.weights("second"), version="step-1", mode=mode)
        outcomes, weights = await under_load(engine, update)
        assert weights.version == "step-1"
        assert set(said(outcomes)) == {"first", "second"}  # and no mixed one
        named = {"first": "", "second": "step-1"}
        assert all(outcome.verdict.weight_version == named[outcome.verdict.rationale] for outcome in outcomes)
        if mode == "together":
            assert set(said(await engine.score_all(samples(8)))) == {"second"}
        assert states(engine) == ["up", "up"]
        assert engine.upstreams["own"].state(0.0) == "up"
        replicas = engine.statistics().sources["own"].replicas
        assert [replica.version for replica in replicas] == ["step-1"] * 2
        assert sum(replica.failures for replica in replicas) == 0
        orders = [note.split()[1] for note in stand_ins.notes() if "own-0-" in note]
        for earlier, later in [("/pause?mode=wait", "/collective_rpc"), ("/collective_rpc", "/reset_prefix_cache")]:
            assert orders.index(earlier) < orders.index(later) < orders.index("/resume")
    assert stand_ins.living() == []
