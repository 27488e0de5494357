"""The ready configurations of judges, each played against a judge server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, load_config
from qreward_plugins.testing import JudgeServer

RECIPES = Path(__file__).parents[2] / "recipes" / "judges"

pytestmark = pytest.mark.anyio


def sample(number: int, response: str, **fields: Any) -> Sample:
    given = {"ground_truth": "42", "group_id": "g", "id": str(number), **fields}
    return Sample([{"role": "user", "content": "What is 17 plus 25?"}], response, **given)


def says(call: Any) -> Any:
    """A judge whose answer stands in the response, after `worth`; of a reference, whether the answer is forty-two."""
    response = call.blocks["response"]
    return float(response.split("worth ")[-1]) if "worth" in response else float(response in ("42", "forty-two"))


async def scored(
    recipe: str, server: JudgeServer, samples: list[Sample], monkeypatch: Any, tmp_path: Path
) -> list[Any]:
    monkeypatch.setenv("QREWARD_JOURNAL", str(tmp_path / "journal.sqlite"))
    for name in ("JUDGE_BASE_URL", "JUDGE_A_URL", "JUDGE_B_URL", "JUDGE_C_URL"):
        monkeypatch.setenv(name, server.base_url)
    for name in ("JUDGE_MODEL", "JUDGE_A_MODEL", "JUDGE_B_MODEL", "JUDGE_C_MODEL"):
        monkeypatch.setenv(name, "judge")
    async with RewardEngine(load_config(RECIPES / recipe)) as engine:
        return await engine.score_all(samples)


async def test_a_model_looks_again_at_what_a_program_calls_wrong(monkeypatch, tmp_path):
    samples = [sample(0, r"\boxed{42}"), sample(1, r"\boxed{forty-two}"), sample(2, r"\boxed{43}"), sample(3, "none")]
    with JudgeServer(says) as server:
        outcomes = await scored("math_then_judge.yaml", server, samples, monkeypatch, tmp_path)
        assert server.report().requests == 2
    assert [outcome.reward for outcome in outcomes] == [1, 1, 0, 0]
    assert [outcome.verdict.correct for outcome in outcomes] == [True, True, False, False]


async def test_right_answers_are_ranked(monkeypatch, tmp_path):
    samples = [sample(number, rf"\boxed{{{number % 2 + 41}}} worth {number}") for number in range(6)]
    with JudgeServer(says) as server:
        outcomes = await scored("rank.yaml", server, samples, monkeypatch, tmp_path)
        assert server.report().requests == 1
    assert [outcome.reward for outcome in outcomes] == [0, 0.5, 0, 0.75, 0, 1]
    assert [outcome.verdict.correct for outcome in outcomes] == [False, True] * 3
