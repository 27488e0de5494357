"""`qreward journal`: steps, sources and verdicts of a journal, and what is no journal."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.samples import Scored, Verdict
from qreward_plugins.testing import JudgeServer

from ..kit import read_only
from .conftest import record


def sample(number: int, *, step: int, split: str | None = None, text: str = "") -> Sample:
    prompt = [{"role": "user", "content": f"What is {number} plus 1?"}]
    return Sample(prompt, f"It is {number + 1}.{text}", str(number + 1), step=step, split=split)


@pytest.fixture
def journal(tmp_path, write_config):
    """A journal of a validation and three steps; the last sample failed, because its verdict was no verdict."""

    def score(call):
        if "BAD" in call.blocks["response"]:
            return "I would rather not."
        return {"score": float("plus" not in call.blocks["response"]), "rationale": "as it [should] be"}

    path = tmp_path / "verdicts.sqlite"
    samples = [sample(n, step=0, split="val") for n in range(2)]
    samples += [sample(10 * step + n, step=step) for step in (1, 2, 3) for n in range(4)]
    samples.append(sample(99, step=3, text=" BAD"))

    async def run(config):
        async with RewardEngine(config) as engine:
            for one in samples:
                await engine.score(one)

    with JudgeServer(score) as server:
        asyncio.run(run(write_config({"a": server}, engine={"journal": {"path": str(path)}})))
    return path


def changed(journal, statement, *values):
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute(statement, values)


def test_it_shows_the_steps_the_sources_and_what_was_said(run_cli, journal):
    before = sorted(path.name for path in journal.parent.iterdir())
    result = run_cli("journal", journal, "--verdicts", "15")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{journal}: 15 outcomes, 1 of them failed"
    steps = [line.split() for line in lines[4:8]]
    assert [step[:2] for step in steps] == [["0", "val"], ["1", "quality"], ["2", "quality"], ["3", "quality"]]
    assert steps[3][2:5] == ["5", "1", "1.00"]
    assert "as it [should] be" in result.stdout
    assert "the reply holds no verdict with this call's id" in " ".join(result.stdout.split())
    assert max(map(len, lines[1:])) <= 110
    assert sorted(path.name for path in journal.parent.iterdir()) == before, "looking changes nothing"


def test_a_step_shows_its_slowest_samples(run_cli, journal):
    slow = "UPDATE outcomes SET latency_s = 9.0, service_s = 0.5, attempts = 3 WHERE step = 2 AND id % 4 = 0"
    changed(journal, slow)
    result = run_cli("journal", journal, "--step", "2", "--verdicts", "2")
    assert result.exit_code == 0
    assert f"{journal}: 4 outcomes, 0 of them failed" in result.stdout
    row = next(line.split() for line in result.stdout.splitlines() if line.startswith("2 "))
    assert row[6:] == ["9.00s", "8.50s", "3", "a"]
    verdicts = result.stdout.partition("slowest of the step first")[2].splitlines()[2:4]
    assert ["9.00s" in line for line in verdicts] == [True, False]
    limited = run_cli("journal", journal, "--last", "2", "--verdicts", "0").stdout
    assert "the last 2 of 4" in limited
    assert "verdicts," not in limited


def test_what_is_no_journal_is_one_message(run_cli, journal, tmp_path):
    other, text = (tmp_path / name for name in ("other.sqlite", "text.sqlite"))
    changed(other, "CREATE TABLE outcomes (id)")
    text.write_text("hello" * 400)
    old = shutil.copy(journal, tmp_path / "old.sqlite")
    changed(old, "PRAGMA user_version = 4")
    torn = shutil.copy(journal, tmp_path / "torn.sqlite")
    changed(torn, "UPDATE outcomes SET rationale = CAST(x'ff41' AS TEXT)")
    for arguments, said in (
        ([tmp_path / "none.sqlite"], "there is no journal at"),
        ([other], "is no journal of qreward"),
        ([text], "is not a journal; name another file"),
        ([old], "has schema version 4"),
        ([torn], "error: the journal"),
        ([journal, "--step", "77"], "has no outcomes of step 77"),
    ):
        result = run_cli("journal", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert said in result.stderr
        assert "remove" not in result.stderr


def test_it_is_read_while_a_run_writes_and_where_nobody_may_write(run_cli, journal):
    with closing(sqlite3.connect(journal, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM outcomes WHERE step = 3")
        assert "15 outcomes" in run_cli("journal", journal).stdout
        writer.execute("ROLLBACK")
    # Not below `tmp_path`, which nobody but its owner may enter.
    with tempfile.TemporaryDirectory() as folder:
        kept = shutil.copy(journal, Path(folder, "kept.sqlite"))
        with read_only(Path(folder)):
            result = run_cli("journal", kept)
        assert (result.exit_code, result.stderr, "15 outcomes" in result.stdout) == (0, "", True)


def test_what_a_judge_repeats_of_a_response_does_not_command_the_terminal(run_cli, journal):
    hostile = "\x1b[2J\x1b]0;owned\x07\x9b31m [red]kept[/nothing]\nsecond line\u202e"
    changed(journal, "UPDATE outcomes SET rationale = ?, detail = ?", hostile, hostile)
    changed(journal, "UPDATE outcomes SET split = ?, source = ?, judge = ?", "[/b]\x1b[2J", "\x1b]8;;x", "[/x]\x1b[1m")
    result = run_cli("journal", journal, "--verdicts", "15")
    assert result.exit_code == 0
    for part in ("[red]kept[/nothing]", "second line", "[/b]"):
        assert part in result.stdout
    assert all(letter.isprintable() for letter in result.stdout.replace("\n", ""))


def test_runs_are_told_apart_and_steps_of_several_files_are_in_their_order(run_cli, tmp_path):
    """Steps may overlap, and processes of a container have the same ids in the next one."""
    scored = Scored(Verdict(0.5, judge="quality", source="a"))

    def write(name, run, *steps):
        outcomes = [(sample(number, step=step), scored) for number, step in enumerate(steps)]
        record(tmp_path / name, outcomes, run_id=run)

    write("a.sqlite", "first", 2, 1, 11)
    write("b.sqlite", "first", 3, 10, 1)
    write("b.sqlite", "second", 1, 1)
    lines = run_cli("journal", tmp_path / "a.sqlite", tmp_path / "b.sqlite", "--verdicts", "0").stdout.splitlines()
    assert "8 outcomes of 2 runs, 0 of them failed" in lines[0]
    rows = [line.split()[:4] for line in lines if " quality " in line and "-" in line]
    assert [(run, step, number) for run, step, _, number in rows] == [
        ("first", "1", "2"),
        *(("first", step, "1") for step in ("2", "3", "10", "11")),
        ("second", "1", "2"),
    ]


def test_it_says_that_only_the_latest_outcomes_are_read(run_cli, journal, monkeypatch):
    monkeypatch.setattr("qreward_plugins.cli.journal.LATEST", 5)
    assert f"{journal}: the latest 5 outcomes, 1 of them failed" in run_cli("journal", journal).stdout


def test_a_narrow_terminal_cuts_no_number(run_cli, journal, monkeypatch):
    changed(journal, "UPDATE outcomes SET judge = 'correctness', attempts = 123, prompt_tokens = 12300")
    monkeypatch.setattr("qreward_plugins.cli.console.OUT.width", 40)
    said = run_cli("journal", journal, "--verdicts", "0").stdout
    assert "\u2026" not in said
    assert said.count("correctness") == said.count(" 123 ") == 4
    monkeypatch.setattr("qreward_plugins.cli.console.OUT.width", 60)
    wide = run_cli("journal", journal).stdout.partition("verdicts,")[2].splitlines()[:-1]
    assert max(map(len, wide)) <= 80
