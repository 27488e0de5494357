"""A step whose samples several judges score: every part takes its requests, and a sample is one sample."""

from __future__ import annotations

import pytest


@pytest.fixture
def summed(tree):
    """Two language judges of unlike scales over the source `a`, a scoring service `rm`, and their sum."""

    def make(a=None, **rm):
        config = tree(a={"concurrency": 10} if a is None else a)
        config["sources"]["rm"] = {"kind": "http", "url": "http://planned.invalid/score", "limits": rm}
        config["judges"] = {
            "quality": {"kind": "llm", "criteria": {"proof": "Is it proven?"}},
            "style": {"kind": "llm", "score_range": [-5, -1], "instructions": "How is it written? " * 50},
            "rules": {"kind": "function", "components": ["tags"], "reward_range": [3, 4]},
            "total": {"kind": "sum", "weights": {"quality": 1, "style": 0.5, "rules": -0.1}},
        }
        return config

    return make


def test_every_part_takes_its_requests(summed, exact_plan):
    found = exact_plan(summed(), 50, latency_s={"a": 2.0, "rm": 1.0})
    used = {use.name: use.requests for use in found.sources}
    assert (used, found.attempts) == ({"a": 100, "rm": 50}, 3.0)
    assert (found.judged, found.failed, found.late) == ({"total": 50}, {}, 0.0)
    assert found.step_s.p50 == pytest.approx(20, rel=0.1)
    assert found.bottleneck.sources == ("a",)
    assert not any("not asked" in note for note in found.notes)


def test_parts_that_ask_the_same_source_are_neither_retries_nor_hedges(summed, exact_plan):
    found = exact_plan(summed(a={"concurrency": 200}), 50)
    assert len(found.timeline.bars) == 150
    assert {bar.kind for bar in found.timeline.bars} == {"first"}
