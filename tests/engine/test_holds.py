"""A source that is held by hand: its calls go elsewhere, or wait, and what is under way goes on."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardEngine
from qreward_plugins.errors import EngineError
from qreward_plugins.simulation import SimulatedSource, run

from ..kit import Recorder, make_config, make_samples, scored_text, takes


def test_calls_go_elsewhere_and_wait_if_there_is_no_elsewhere():
    asked = []
    seen = Recorder()

    def source(name):
        def behaviour(number, request, now):
            asked.append((name, now))
            return takes(1.0)(number, request, now)

        return SimulatedSource(name, behaviour=behaviour, answer=scored_text)

    async def main():
        sources = {name: source(name) for name in "ab"}
        async with RewardEngine(make_config("ab"), sources=sources, observers=[seen]) as engine:
            under_way = asyncio.ensure_future(engine.score_all(make_samples(8)))
            await asyncio.sleep(0.5)
            engine.hold("a")
            assert engine.statistics().sources["a"].state == "held"
            await engine.score_all(make_samples(4))
            engine.hold("b")
            later = asyncio.ensure_future(engine.score_all(make_samples(2)))
            await asyncio.sleep(10)
            assert not later.done()
            engine.release("a")
            outcomes = [*await under_way, *await later]
            with pytest.raises(EngineError, match="unknown source 'c'"):
                engine.release("c")
            return outcomes

    outcomes = run(main())
    assert all(outcome.reward is not None for outcome in outcomes)
    assert {name for name, at in asked if at < 0.5} == {"a", "b"}
    assert [name for name, at in asked if at >= 0.5] == ["b"] * 4 + ["a"] * 2
    assert min(at for name, at in asked if name == "a" and at >= 0.5) > 10
    changes = [(each.source, each.state) for each in seen.events if type(each).__name__ == "SourceStateChanged"]
    assert changes == [("a", "held"), ("b", "held"), ("a", "up")]
