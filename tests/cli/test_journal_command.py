"""`qreward journal`: steps, sources and verdicts of a journal, and what is no journal."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.cli.journal import show_journal
from qreward_plugins.cli.journal_reports import read_rows, steps_of
from qreward_plugins.journal import Journal
from qreward_plugins.samples import Scored, Verdict
from qreward_plugins.samples.spent import Spent
from qreward_plugins.testing import JudgeServer

from ..kit import read_only


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


def test_it_shows_the_steps_the_sources_and_what_was_said(run_cli, journal):
    result = run_cli("journal", journal)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{journal}: 15 outcomes, 1 of them failed"
    assert [line.split()[:2] for line in lines[4:8]] == [
        ["0", "val"],
        ["1", "quality"],
        ["2", "quality"],
        ["3", "quality"],
    ]
    assert lines[7].split()[2:5] == ["5", "1", "1.00"]
    assert "as it [should] be" in result.stdout
    assert max(map(len, lines[1:])) <= 110


def test_a_step_shows_its_slowest_samples(run_cli, journal):
    with sqlite3.connect(journal) as connection:
        connection.execute(
            "UPDATE outcomes SET latency_s = 9.0, service_s = 0.5, attempts = 3 WHERE step = 2 AND id % 4 = 0"
        )
    connection.close()
    result = run_cli("journal", journal, "--step", "2", "--verdicts", "2")
    assert result.exit_code == 0
    assert f"{journal}: 4 outcomes, 0 of them failed" in result.stdout
    row = next(line.split() for line in result.stdout.splitlines() if line.startswith("2 "))
    assert row[6:] == ["9.00s", "8.50s", "3", "a"]
    verdicts = result.stdout.partition("slowest of the step first")[2].splitlines()[2:4]
    assert ["9.00s" in line for line in verdicts] == [True, False]
    limited = run_cli("journal", journal, "--steps", "2", "--verdicts", "0").stdout
    assert "the last 2 of 4" in limited
    assert "verdicts," not in limited


def test_a_failure_says_why(run_cli, journal):
    said = run_cli("journal", journal, "--verdicts", "15").stdout
    assert "the reply holds no verdict with this call's id" in " ".join(said.split())


def test_what_is_no_journal_is_one_message(run_cli, journal, tmp_path):
    missing = run_cli("journal", tmp_path / "none.sqlite")
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "there is no journal at" in missing.stderr
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE outcomes (id)")
    connection.close()
    text = tmp_path / "text.sqlite"
    text.write_text("hello" * 400)
    for path, problem in ((other, "is no journal of qreward"), (text, "is not a journal")):
        result = run_cli("journal", path)
        assert (result.exit_code, result.stdout) == (2, "")
        assert problem in result.stderr
    nothing = run_cli("journal", journal, "--step", "77")
    assert nothing.exit_code == 2
    assert "has no outcomes of step 77" in nothing.stderr


def test_looking_changes_nothing_and_works_while_a_run_writes(run_cli, journal):
    before = sorted(path.name for path in journal.parent.iterdir())
    writer = sqlite3.connect(journal, isolation_level=None)
    try:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM outcomes WHERE step = 3")
        assert "15 outcomes" in run_cli("journal", journal).stdout
        writer.execute("ROLLBACK")
    finally:
        writer.close()
    assert sorted(path.name for path in journal.parent.iterdir()) == before


def changed(journal, statement, *values):
    with sqlite3.connect(journal) as connection:
        connection.execute(statement, values)
    connection.close()


def recorded(path, *, run, workers, step, cached, keys):
    """Rows of a run, as `workers` write them: all processes of a container have the same ids in the next one."""

    async def main(keys):
        journal = Journal(path, run_id=run)
        for key in keys:
            verdict = Verdict(0.5, judge="quality", source="a", cached=cached, spent=Spent(1, latency_s=1.0))
            await journal.put(key, replace(sample(1, step=step), id=f"{run} {key}"), Scored(verdict))
        await journal.aclose()

    for worker in range(workers):
        asyncio.run(main(keys[worker::workers]))


def test_runs_with_equal_process_ids_are_told_apart(run_cli, tmp_path):
    path = tmp_path / "shared.sqlite"
    recorded(path, run="first", workers=2, step=1, cached=False, keys=["a", "b", "c", "d"])
    recorded(path, run="first", workers=2, step=2, cached=False, keys=["e", "f"])
    recorded(path, run="second", workers=2, step=2, cached=True, keys=["e", "f", "e", "f"])
    rows = read_rows(str(path))
    assert len({row.process_id for row in rows}) == 1
    assert [(one.run_id, one.label, one.rows) for one in steps_of(rows)] == [
        ("first", "1", 4),
        ("first", "2", 2),
        ("second", "2", 4),
    ]
    lines = run_cli("journal", path).stdout.splitlines()
    assert lines[0] == f"{path}: 10 outcomes of 2 runs, 0 of them failed"
    assert [line.split()[:4] for line in lines[3:7]] == [
        ["run", "step", "judge", "n"],
        ["first", "1", "quality", "4"],
        ["first", "2", "quality", "2"],
        ["second", "2", "quality", "4"],
    ]
    assert run_cli("journal", path, "--step", "1").stdout.startswith(f"{path}: 4 outcomes, 0 of")


def test_siblings_that_answer_alike_in_two_workers_of_a_run_are_two_samples(tmp_path):
    path = tmp_path / "shared.sqlite"
    recorded(path, run="one", workers=1, step=1, cached=False, keys=["a"])
    recorded(path, run="one", workers=3, step=1, cached=True, keys=["a", "a", "a"])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE outcomes SET process_id = id")  # each worker is a process of its own
    connection.close()
    assert [(one.label, one.rows) for one in steps_of(read_rows(str(path)))] == [("1", 4)]


def test_rows_without_a_run_stand_apart_from_those_with_one(run_cli, journal):
    changed(journal, "UPDATE outcomes SET run_id = NULL WHERE step < 2")
    (run,) = {row.run_id for row in read_rows(str(journal), 2)}
    lines = run_cli("journal", journal).stdout.splitlines()
    assert lines[0] == f"{journal}: 15 outcomes of 2 runs, 1 of them failed"
    assert [line.split()[:2] for line in lines[4:8]] == [["-", "0"], ["-", "1"], [run, "2"], [run, "3"]]


def test_a_step_that_a_resumed_run_repeats_has_each_sample_once_without_runs(journal):
    # Rows of older schema versions have no run.
    changed(journal, "UPDATE outcomes SET key = 'key ' || id, process_id = 7, run_id = NULL")
    before = steps_of(read_rows(str(journal)))
    with sqlite3.connect(journal) as connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(outcomes)") if row[1] != "id"]
        new = ", ".join({"cached": "1", "process_id": "8", "sample_id": "'another'"}.get(name, name) for name in names)
        repeated = "step = 2 AND outcome = 'scored'"
        for _ in range(2):  # two equal answers of siblings, of which the first run had judged one
            connection.execute(f"INSERT INTO outcomes ({', '.join(names)}) SELECT {new} FROM outcomes WHERE {repeated}")
            repeated += " AND process_id = 7 AND id = (SELECT min(id) FROM outcomes WHERE step = 2)"
    connection.close()
    rows = read_rows(str(journal))
    assert len(rows) == 20
    after = steps_of(rows)
    assert [(one.label, one.rows) for one in after] == [("0 val", 2), ("1", 4), ("2", 5), ("3", 5)]
    assert [one for one in after if one.label != "2"] == [one for one in before if one.label != "2"]


def test_what_a_judge_repeats_of_a_response_does_not_command_the_terminal(run_cli, journal):
    hostile = "\x1b[2J\x1b]0;owned\x07\x9b31m [red]kept[/nothing]\nsecond line\u202e"
    changed(journal, "UPDATE outcomes SET rationale = ?, detail = ?", hostile, hostile)
    changed(journal, "UPDATE outcomes SET split = ?, source = ?, judge = ?", "[/b]\x1b[2J", "\x1b]8;;x", "[/x]\x1b[1m")
    result = run_cli("journal", journal, "--verdicts", "15")
    assert result.exit_code == 0
    assert "[red]kept[/nothing]" in result.stdout
    assert "second line" in result.stdout
    assert "[/b]" in result.stdout
    assert all(letter.isprintable() for letter in result.stdout.replace("\n", ""))


def test_values_of_other_types_and_steps_beyond_integers_are_no_traceback(run_cli, journal):
    changed(journal, "UPDATE outcomes SET latency_s = 'slow', judge = x'41', score = x'', step = 'two' WHERE id = 1")
    assert run_cli("journal", journal).exit_code == 0
    beyond = run_cli("journal", journal, "--step", 2**63)
    assert beyond.exit_code == 2
    assert f"has no outcomes of step {2**63}" in beyond.stderr
    changed(journal, "UPDATE outcomes SET rationale = CAST(x'ff41' AS TEXT)")
    undecodable = run_cli("journal", journal)
    assert undecodable.exit_code == 2
    assert "error: the journal" in undecodable.stderr


def test_it_says_that_only_the_latest_outcomes_are_read(run_cli, journal, monkeypatch):
    for module in ("qreward_plugins.cli.journal_reports", "qreward_plugins.cli.journal"):
        monkeypatch.setattr(f"{module}.LATEST", 5)
    assert f"{journal}: the latest 5 outcomes, 1 of them failed" in run_cli("journal", journal).stdout


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_journal_in_a_directory_that_cannot_be_written_is_read(run_cli, journal):
    # Not below `tmp_path`, which nobody but its owner may enter.
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept.sqlite")
        shutil.copy(journal, kept)
        with read_only(Path(folder)):
            result = run_cli("journal", kept)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "15 outcomes" in result.stdout


def test_a_narrow_terminal_cuts_no_number(journal):
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE outcomes SET judge = 'correctness', attempts = 123, prompt_tokens = 12300")
    connection.close()

    def shown(width, verdicts):
        console = Console(file=io.StringIO(), width=width)
        show_journal(journal, console, step=None, steps=10, verdicts=verdicts)
        return console.file.getvalue()

    said = shown(40, 0)
    assert "\u2026" not in said
    assert said.count("correctness") == said.count(" 123 ") == 4
    assert max(map(len, shown(60, 8).partition("verdicts,")[2].splitlines()[:-1])) <= 80


def test_a_file_that_is_no_journal_is_not_to_be_removed(run_cli, tmp_path):
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text('{"prompt": "?", "response": "!"}\n' * 50)
    said = run_cli("journal", rollouts).stderr
    assert "is not a journal; name another file" in said
    assert "remove" not in said


def test_a_journal_on_a_read_only_file_system_is_read(run_cli, journal, monkeypatch):
    connect = sqlite3.connect

    def read_only(database, **options):
        if "immutable=1" not in database:
            raise sqlite3.OperationalError("unable to open database file")
        return connect(database, **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    assert "15 outcomes" in run_cli("journal", journal).stdout
