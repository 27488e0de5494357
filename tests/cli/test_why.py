"""`qreward why`: the story of a sample in a terminal, and what it says of a sample that is not there."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.testing import Faults, JudgeServer

HOSTILE = "It is \x1b[2J[bold]four\u202e</script>\nsecond line"


@pytest.fixture
def journal(tmp_path, write_config):
    """A journal of two steps: a good answer, a hostile one that was judged at the second try, and one that failed."""
    path = tmp_path / "verdicts.sqlite"

    def score(call):
        response = call.blocks["response"]
        if "BAD" in response:
            return "I would rather not."
        return {"score": 0.25 if "four" in response else 1.0, "rationale": f"it says {response}"}

    async def run(config):
        async with RewardEngine(config) as engine:
            for step, number, text in ((1, 0, "4"), (2, 0, "4"), (2, 1, HOSTILE), (2, 2, "BAD")):
                question = [{"role": "user", "content": "What is 2 + 2?"}]
                await engine.score(Sample(question, text, "4", "sums", "g", step, "train", id=f"s{number}"))

    with JudgeServer(score, faults=Faults(script=lambda number: {2: "error_500"}.get(number))) as server:
        settings = {"journal": {"path": str(path), "reuse": False}, "seed": 1}
        asyncio.run(run(write_config({"a": server}, engine=settings)))
    return path


def lines(result):
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_a_sample_is_told_of_from_its_prompt_to_its_reward(run_cli, journal):
    told = lines(run_cli("why", journal, "--sample", "s1"))
    text = "\n".join(told)
    assert told[0].startswith("step 2 · train · sums · sample s1 · run ")
    assert "  quality: 0.25 1 failed  mean 0.625" in told
    assert text.count("  │ user: What is 2 + 2?") == 1
    assert "  │ 4" in told
    assert "quality: reward 0.25" in told
    assert "  a (judge); 2 attempts, " in text
    first, second = (line for line in told if line.startswith(("  1  a", "  2  a")))
    assert ("failed" in first, "valid" in second) == (True, True)
    assert "█" in second
    assert "sent (attempt 2)" in told
    assert "<<<response" in text
    assert "replied (attempt 2, valid)" in told
    assert "the judge's words" in told
    assert not any(character in text for character in "\x1b\u202e")
    assert "  │ It is \\x1b[2J[bold]four\\u202e</script>" in told
    assert "  │ second line" in told


def test_who_failed_and_who_was_worst(run_cli, journal):
    told = "\n".join(lines(run_cli("why", journal, "--failed")))
    assert "quality: no reward, verdict/invalid: " in told
    assert "replied (attempt 1, invalid)\n  │ I would rather not." in told
    assert "shown: " not in told
    told = "\n".join(lines(run_cli("why", journal, "--worst", "--most", "1")))
    assert "sample s1" in told
    assert "shown: 1 of 2 samples;" in told
    told = [line for line in lines(run_cli("why", journal, "--most", "9")) if line.startswith("step ")]
    assert [line.split(" · ")[3] for line in told] == ["sample s2", "sample s1", "sample s0", "sample s0"]


def test_a_row_of_the_journal_and_a_step(run_cli, journal):
    assert "sample s0" in lines(run_cli("why", journal, "--row", "2"))[0]
    assert lines(run_cli("why", journal, "--step", "1"))[0].startswith("step 1 ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sample", "nobody"], "matches --sample nobody; `qreward journal`"),
        (["--step", "7", "--failed"], "matches --step 7 --failed;"),
        (["--row", "77"], "matches --row 77"),
    ],
)
def test_a_sample_that_is_not_there(run_cli, journal, arguments, said):
    result = run_cli("why", journal, *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert "qreward journal" in result.stderr
