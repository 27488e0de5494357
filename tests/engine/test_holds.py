"""A source that is held by hand: its calls go elsewhere, or wait, and what is under way goes on."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import SourceStateChanged
from qreward_plugins.errors import EngineError

from ..kit import Recorder, Stage, make_samples


def test_calls_go_elsewhere_and_wait_if_there_is_no_elsewhere():
    seen, stage = Recorder(), Stage({"a": 1.0, "b": 1.0})

    async def main(engine):
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
        with pytest.raises(EngineError, match="unknown source 'c'"):
            engine.release("c")
        return [*await under_way, *await later]

    assert all(outcome.reward is not None for outcome in stage.run(main, seen))
    assert {each.source for each in stage.sent if each.at < 0.5} == {"a", "b"}
    after = [each for each in stage.sent if each.at >= 0.5]
    assert [each.source for each in after] == ["b"] * 4 + ["a"] * 2
    assert min(each.at for each in after if each.source == "a") > 10
    changes = [(each.source, each.state) for each in seen.of(SourceStateChanged)]
    assert changes == [("a", "held"), ("b", "held"), ("a", "up")]
