"""`qreward sources`: the sources of a run that goes on, and what is said where there is none."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing

import pytest

from ..kit import record
from .conftest import refusal


@pytest.fixture
def journal(tmp_path):
    """A journal that two processes of a run write to, over one source."""
    path = tmp_path / "verdicts.sqlite"
    record(path, [])
    told = dict.fromkeys(("in_flight", "requests", "answered", "throttled", "transient", "permanent", "invalid"), 3)
    told |= {"by_program": False, "waiting": 0, "cost_usd": 0.0, "concurrency": 8, "requests_per_minute": None}
    told |= {"learned": "", "latency_p50_s": 1.5, "latency_p95_s": None}
    with closing(sqlite3.connect(path)) as connection, connection:
        for process, state, problem in ((1, "up", ""), (2, "down", "fast is down\x1b[2J (refused)")):
            row = ("job", process, "fast", time.time() + 60, json.dumps({**told, "state": state, "problem": problem}))
            connection.execute("INSERT INTO live VALUES (?, ?, ?, ?, ?)", row)
    return path


def test_processes_are_added_up_and_the_worst_state_is_shown(run_cli, journal):
    shown = run_cli("sources", journal)
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0
    assert lines[1].split() == ["job", "fast", "down", "2", "0", "6", "16", "-", "6", "18", "1.50s", "-"]
    assert lines[2] == "  fast: fast is down\\x1b[2J (refused)"


def test_a_source_is_held_and_released(run_cli, journal):
    assert "down, to be held" in run_cli("sources", journal, "--hold", "fast").stdout
    with closing(sqlite3.connect(journal)) as connection:
        assert connection.execute("SELECT * FROM holds").fetchall() == [("job", "fast")]
    assert "held" not in run_cli("sources", journal, "--release", "fast").stdout
    assert "no source 'slow'; sources: fast" in refusal(run_cli("sources", journal, "--hold", "slow", "--hold", "fast"))


def test_without_a_run_there_is_nothing_to_hold(run_cli, tmp_path):
    path = tmp_path / "verdicts.sqlite"
    record(path, [])
    assert "no run is under way that writes to" in run_cli("sources", path).stdout
    assert "there is nothing to hold" in refusal(run_cli("sources", path, "--hold", "fast"))


def test_what_the_program_holds_only_the_program_releases(run_cli, journal):
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("UPDATE live SET state = json_set(state, '$.by_program', json('true')) WHERE engine = 1")
    assert "the program itself holds 'fast'" in refusal(run_cli("sources", journal, "--release", "fast"))
