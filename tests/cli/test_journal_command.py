"""`qreward journal`: steps and sources of a journal, and what is no journal."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing

import pytest

from qreward_plugins.samples import SCREENED, Cause, Failed, Sample, Scored, Verdict
from qreward_plugins.samples.spent import Spent, Usage

from ..kit import record


def sample(number, **fields):
    return Sample([], f"It is {number}.", **{"split": "train", "id": f"s{number}", **fields})


def scored(score, latency_s=1.0, service_s=0.5, **fields):
    spent = Spent(fields.pop("attempts", 1), Usage(700, 50), latency_s, 0.01)
    return Scored(Verdict(score, judge="quality", source="a", service_s=service_s, spent=spent, **fields))


FAILED = Failed(Cause.VERDICT, "invalid", judge="quality")
MASKED = Failed(*(Cause(SCREENED.split("/")[0]), SCREENED.split("/")[1]), judge="quality")
FLOOR = Scored(Verdict(0.0, judge="quality", basis="floor", failure=FAILED))


@pytest.fixture
def journal(tmp_path):
    """A journal of a validation and two steps: one with a failure, a floor and an answer that was used again."""
    path = tmp_path / "verdicts.sqlite"
    first = [(sample(number, step=0, split="val"), scored(1.0)) for number in range(2)]
    second = [(sample(2, step=1), scored(0.25)), (sample(3, step=1), scored(0.75, 9.0, attempts=3))]
    third = [(sample(number, step=2), each) for number, each in enumerate((FAILED, MASKED, FLOOR, scored(1.0)), 4)]
    again = [(sample(8, step=2), scored(1.0, 0.0, 0.0, attempts=0, cached=True))]
    record(path, [*first, *second, *third, *again])
    return path


def changed(journal, statement, *values):
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute(statement, values)


def test_it_shows_the_steps_their_slowest_samples_and_the_sources(run_cli, journal):
    before = sorted(path.name for path in journal.parent.iterdir())
    result = run_cli("journal", journal)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{journal}: 9 outcomes, 1 of them failed, 1 got a floor"
    assert [line.split() for line in lines[3:7]] == [
        ["step", "judge", "n", "failed", "score", "slowest", "waited", "tries", "source", "sample"],
        ["0", "val", "quality", "2", "0", "1", "1.00s", "0.50s", "1", "a", "s0"],
        ["1", "quality", "2", "0", "0.5", "9.00s", "8.50s", "3", "a", "s3"],
        ["2", "quality", "5", "1", "0.6667", "1.00s", "0.50s", "1", "a", "s7"],
    ]
    assert lines[-4].split() == ["a", "6", "1", "2", "0.50s", "4500", "0.0600"]
    assert sorted(path.name for path in journal.parent.iterdir()) == before, "looking changes nothing"
    limited = run_cli("journal", journal, "--last", "2").stdout
    assert f"the whole story of a sample: qreward why {journal} --sample ID" in limited
    assert ("the last 2 of 3" in limited, "0 val" in limited) == (True, False)


def test_what_is_no_journal_is_one_message(run_cli, journal, tmp_path):
    other, text = (tmp_path / name for name in ("other.sqlite", "text.sqlite"))
    changed(other, "CREATE TABLE outcomes (id)")
    text.write_text("hello" * 400)
    old = shutil.copy(journal, tmp_path / "old.sqlite")
    changed(old, "PRAGMA user_version = 4")
    empty = shutil.copy(journal, tmp_path / "empty.sqlite")
    changed(empty, "DELETE FROM outcomes")
    scored = shutil.copy(text, tmp_path / "scored.jsonl")
    shutil.copy(journal, tmp_path / "scored.jsonl.journal")
    for path, said in (
        (scored, f"is not a journal; that of `qreward score` is {scored}.journal"),
        (tmp_path / "none.sqlite", "there is no journal at"),
        (other, "is no journal of qreward"),
        (text, "is not a journal; name another file"),
        (old, "has schema version 4"),
        (empty, "has no outcomes"),
    ):
        result = run_cli("journal", path)
        assert (result.exit_code, result.stdout) == (2, ""), path
        assert said in result.stderr


def test_it_is_read_while_a_run_writes(run_cli, journal):
    with closing(sqlite3.connect(journal, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM outcomes WHERE step = 2")
        assert "9 outcomes" in run_cli("journal", journal).stdout
        writer.execute("ROLLBACK")


def test_names_do_not_command_the_terminal(run_cli, journal):
    changed(journal, "UPDATE outcomes SET split = ?, source = ?, judge = ?", "[/b]\x1b[2J", "\x1b]8;;x", "[/x]\x1b[1m")
    result = run_cli("journal", journal)
    assert (result.exit_code, "[/b]" in result.stdout) == (0, True)
    assert all(letter.isprintable() for letter in result.stdout.replace("\n", ""))


def test_runs_are_told_apart_and_steps_of_several_files_are_in_their_order(run_cli, tmp_path):
    def write(name, run, *steps, took_s=1.0):
        record(tmp_path / name, [(sample(step, step=step), scored(0.5, took_s)) for step in steps], run_id=run)

    write("a.sqlite", "first", 2, 1)
    write("b.sqlite", "first", 10, 1, took_s=9.0)
    write("b.sqlite", "second", 1)
    lines = run_cli("journal", tmp_path / "a.sqlite", tmp_path / "b.sqlite").stdout.splitlines()
    assert "5 outcomes of 2 runs, 0 of them failed" in lines[0]
    rows = [line.split() for line in lines if " quality " in line]
    assert [(row[0], row[1], row[3], row[6]) for row in rows] == [
        ("first", "1", "2", "9.00s"), ("first", "2", "1", "1.00s"), ("first", "10", "1", "9.00s"),
        ("second", "1", "1", "1.00s"),
    ]  # fmt: skip
