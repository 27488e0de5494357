"""What of the comparison in ROLL holds without ROLL: its judge, what it says where ROLL is missing, its table."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
import roll_judge
from rich.console import Console

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.testing import JudgeServer
from qreward_plugins.testing.judge_calls import JudgeCall

THEIR_PROMPT = """Say YES or NO.

**Question:**
which number is 7

**Solution Process (Final Step Only):**
{response}

**Reference Answer:**
{reference}

**Output:**
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "roll" / "pipeline" / "rlvr").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(("response", "answer"), [("number 7", "YES"), ("number 77", "NO"), ("", "NO")])
def test_roll_s_prompt_is_answered_in_roll_s_words(response, answer):
    # ROLL ends the lines of its prompt with two spaces.
    prompt = THEIR_PROMPT.replace("\n", "  \n").format(response=response, reference="number 7")
    assert roll_judge.grade(JudgeCall(model="judge", messages=[{"role": "user", "content": prompt}])) == answer


def test_another_prompt_is_nobody_s():
    with pytest.raises(ValueError, match="not ROLL's prompt"):
        roll_judge.grade(JudgeCall(model="judge", messages=[{"role": "user", "content": "hello"}]))


def test_the_same_judge_gives_this_package_the_same_rewards():
    def sample(number):
        return Sample(
            messages=[{"role": "user", "content": f"which number is {number}"}],
            response=f"number {number if roll_judge.expected(number) else number + 1}",
            ground_truth=f"number {number}",
        )

    async def rewards(config):
        async with RewardEngine(config) as engine:
            return [outcome.reward for outcome in await engine.score_all([sample(number) for number in range(4)])]

    with JudgeServer(roll_judge.grade) as server:
        source = {"kind": "openai", "base_url": server.base_url, "model": "judge"}
        config = {"sources": {"judge": source}, "judges": {"quality": {"kind": "llm"}}}
        assert asyncio.run(rewards(config)) == [roll_judge.expected(number) for number in range(4)] == [0, 1, 0, 1]


def test_it_says_what_is_missing(checkout, tmp_path, monkeypatch):
    assert "QREWARD_ROLL_SRC is not set" in roll_judge.why_not({})
    assert "not a checkout of ROLL" in roll_judge.why_not({"QREWARD_ROLL_SRC": str(tmp_path / "nowhere")})
    monkeypatch.setattr(roll_judge, "find_spec", lambda name: name not in ("ray", "dacite"))
    told = roll_judge.why_not({"QREWARD_ROLL_SRC": str(checkout)})
    assert "(dacite, ray)" in told
    assert roll_judge.ENVIRONMENT in told
    monkeypatch.setattr(roll_judge, "find_spec", lambda name: True)
    assert roll_judge.why_not({"QREWARD_ROLL_SRC": str(checkout)}) is None


@pytest.mark.parametrize("arguments", [[], ["--samples", "4", "--workers", "3"]])
def test_it_ends_with_2_and_one_message(arguments, monkeypatch, capsys):
    monkeypatch.delenv("QREWARD_ROLL_SRC", raising=False)
    with pytest.raises(SystemExit) as ended:
        roll_judge.main(arguments)
    assert ended.value.code == 2
    *_, message = capsys.readouterr().err.splitlines()
    assert ("cannot be shared" if arguments else "QREWARD_ROLL_SRC is not set") in message


def test_wrong_rewards_are_no_measurement(monkeypatch):
    monkeypatch.setattr(roll_judge, "score", lambda cluster, batch, way: [0.0, 1.0])
    assert roll_judge.seconds(None, range(2), "one call") >= 0
    with pytest.raises(SystemExit, match="wrong rewards"):
        roll_judge.seconds(None, range(3), "one call")


def test_the_table_compares_medians_with_ours(checkout, monkeypatch, tmp_path, capsys):
    spent = {"ours, 1 worker": {"16 in one call": [0.5, 9.0, 0.4]}, "ROLL's, 1 worker": {"16 in one call": [4.0]}}
    told = io.StringIO()
    roll_judge.show(spent, 0.2, Console(file=told, width=120))
    assert "0.50" in told.getvalue()
    assert "4.00    8.0x" in told.getvalue()

    monkeypatch.setenv("QREWARD_ROLL_SRC", str(checkout))
    monkeypatch.setattr(roll_judge, "find_spec", lambda name: True)
    monkeypatch.setattr(roll_judge, "measure", lambda *arguments: spent)
    roll_judge.main(["--json", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["spent"] == spent
    assert "8.0x" in capsys.readouterr().out
