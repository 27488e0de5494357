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
