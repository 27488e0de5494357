"""Samples that are too long for their judge: marked, failed or floored, and never cut without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, Scored, load_config
from qreward_plugins.observers.facts import summary
from qreward_plugins.samples import Outcome
from qreward_plugins.testing import JudgeServer

SHORT = Sample([{"role": "user", "content": "What is 2 + 2?"}], "It is 4.", data_source="math")
LONG = Sample([{"role": "user", "content": "What is 2 + 2?"}], "Let me think. " * 100, data_source="math")
WITHIN = Sample([{"role": "user", "content": "What is 2 + 2?"}], "x" * 262_144, data_source="math")


def config(server: JudgeServer, judge: dict[str, Any], tmp_path: Path | None = None, **judges: Any) -> Any:
    return load_config(
        {
            "sources": {"judge": {"kind": "openai", "base_url": server.base_url, "model": "judge"}},
            "judges": {"quality": {"kind": "llm", **judge}, **judges},
            "engine": {"seed": 1, "journal": {"path": str(tmp_path / "journal.sqlite")} if tmp_path else None},
        }
    )


async def outcomes(engine: RewardEngine, *samples: Sample) -> list[Outcome]:
    return await engine.score_all(samples)


@pytest.mark.anyio
async def test_a_cut_sample_is_marked_in_verdict_facts_summary_and_journal(tmp_path: Path) -> None:
    with JudgeServer() as server:
        tree = config(server, {"max_response_chars": 1000}, tmp_path)
        for cached in (False, True):
            async with RewardEngine(tree) as engine:
                found = await outcomes(engine, SHORT, LONG)
                facts = [engine.facts().of(outcome) for outcome in found]
            assert [isinstance(out, Scored) and (out.verdict.cut, out.verdict.cached) for out in found] == [
                (False, cached),
                (True, cached),
            ]
            assert [fact["cut"] for fact in facts] == [0.0, 1.0]
            assert summary(facts)["cut_rate"] == 0.5
        assert server.report().requests == 2


@pytest.mark.anyio
async def test_a_sum_is_cut_where_a_part_is() -> None:
    with JudgeServer() as server:
        tree = config(
            server,
            {"max_response_chars": 1000},
            patient={"kind": "llm"},
            both={"kind": "sum", "weights": {"quality": 1, "patient": 1}},
        )
        async with RewardEngine(tree) as engine:
            found = await outcomes(engine, SHORT, LONG)
    assert [isinstance(outcome, Scored) and outcome.verdict.cut for outcome in found] == [False, True]


@pytest.mark.parametrize(("on_too_long", "reward"), [("fail", None), ("floor", 0.0)])
@pytest.mark.anyio
async def test_a_sample_that_is_too_long_asks_nobody(on_too_long: str, reward: float | None) -> None:
    with JudgeServer() as server:
        tree = config(server, {"max_response_chars": 1000, "on_too_long": on_too_long})
        async with RewardEngine(tree) as engine:
            facts = engine.facts()
            short, long = await outcomes(engine, SHORT, LONG)
            assert set(facts.of(short)) == set(facts.of(long))
        assert server.report().requests == 1
    assert isinstance(short, Scored)
    assert (long.reward, long.failure.label) == (reward, "policy/too_long")
    assert "1,400 characters" in long.failure.detail
    assert "judges.quality.max_response_chars" in long.failure.detail


@pytest.mark.anyio
async def test_sixty_four_thousand_tokens_of_thought_fit_by_default() -> None:
    with JudgeServer() as server:
        async with RewardEngine(config(server, {"on_too_long": "fail"})) as engine:
            (found,) = await outcomes(engine, WITHIN)
    assert isinstance(found, Scored)
    assert not found.verdict.cut
